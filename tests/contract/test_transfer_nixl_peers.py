"""Peers of nixl that stop, leave or die in the middle of a read. Everything runs with the real library."""

import signal
import threading
import time

import numpy as np
import pytest

from kvstore.errors import TransferTimeout, Unavailable
from kvstore.transfer import nixl as nixl_engine
from kvstore.transfer import nixl_agent
from kvstore.transfer.base import PagePair, TransferState
from tests.contract.nixl_kit import MIB, stop, stuck_read, until_quiesced
from tests.contract.transfer_kit import INCARNATION, TIMEOUT_MS, Child, Kit, Pool, random_pairs, read

# -- peers that stop, leave, die -------------------------------------------------------------------------------------


def test_a_stopped_peer_times_out_over_tcp_and_late_bytes_land(nixl_tcp: Kit) -> None:
    child, reader, transfer = stuck_read(nixl_tcp)
    assert not transfer.quiesced()
    at_time_out = reader.buffer.copy()
    child.signal(signal.SIGCONT)
    assert until_quiesced(transfer)
    assert transfer.wait(TIMEOUT_MS) is TransferState.TIMED_OUT  # end states are final
    landed = reader.slots.copy()
    assert (reader.buffer != at_time_out).any() or not landed[:15].any()
    for local in range(15):  # only what was posted, and in its place
        assert (landed[local] == child.slots[15 - local]).all() or not landed[local].any()


def test_what_was_posted_lands_after_the_time_out(nixl_tcp: Kit) -> None:
    """The reason for quarantine: one page that is on its way when the peer stops is stored when it goes on."""
    child, reader = nixl_tcp.child(8, MIB, seed=1), nixl_tcp.pool(8, MIB)
    reader.slots[:] = 0
    engine, peer = reader.engine, reader.engine.connect(child.export)
    source = engine._source(peer)
    stop(child)
    batches = list(engine._batches(source, (3,), (4,)))
    transfer = nixl_engine.NixlTransfer(engine, source, None, batches)  # without the look: the page itself is posted
    assert transfer.wait(200) is TransferState.TIMED_OUT
    assert not transfer.quiesced()
    assert not reader.slots[4].any()
    child.signal(signal.SIGCONT)
    assert until_quiesced(transfer)
    np.testing.assert_array_equal(reader.slots[4], child.slots[3])


def test_a_stuck_read_of_tags_is_not_overtaken(nixl_tcp: Kit) -> None:
    child, reader = nixl_tcp.child(8, 192), nixl_tcp.pool(8, 192)
    peer = reader.engine.connect(child.export)
    stop(child)
    for reason in ("tags_timeout", "tags_stuck"):
        with pytest.raises(TransferTimeout) as caught:
            reader.engine.read_tags(peer, 200)
        assert caught.value.reason == reason
    child.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            assert (reader.engine.read_tags(peer, TIMEOUT_MS)[:, 0] == INCARNATION).all()
            return
        except TransferTimeout:
            time.sleep(0.01)
    pytest.fail("the tags never came")


def test_closing_the_engine_proves_that_a_stuck_transfer_ended(nixl_tcp: Kit) -> None:
    child, reader, transfer = stuck_read(nixl_tcp)
    view = reader.buffer
    assert not transfer.quiesced()
    reader.engine.close()
    assert transfer.quiesced()
    kept = view.copy()
    child.signal(signal.SIGCONT)
    time.sleep(0.3)
    np.testing.assert_array_equal(view, kept)


def test_a_disconnected_peer_with_a_stuck_read_is_kept_until_it_ends(nixl_tcp: Kit) -> None:
    child, reader = nixl_tcp.child(8, 192, seed=1), nixl_tcp.pool(8, 192, seed=2)
    engine, peer = reader.engine, reader.engine.connect(child.export)
    stop(child)
    transfer = engine.read_pages(peer, [PagePair(1, 1)])
    with pytest.raises(TransferTimeout):
        engine.read_tags(peer, 100)
    engine.disconnect(peer)
    assert len(engine._remotes) == len(engine._late) == 1
    assert engine.regions() == 2  # the pool, and the buffer in which tags may still land
    assert transfer.wait(100) is TransferState.TIMED_OUT
    assert not transfer.quiesced()
    child.signal(signal.SIGCONT)
    assert until_quiesced(transfer)
    again = engine.connect(child.export)
    assert read(reader, again, [PagePair(2, 2)]) is TransferState.DONE
    engine.disconnect(again)
    assert engine._remotes == {}
    assert engine._late == []
    assert engine.regions() == 1
    assert len(engine._cells) == nixl_engine.CELLS


def test_a_stopped_peer_can_still_be_read_over_cma(nixl: Kit) -> None:
    child, reader = nixl.child(8, 192, seed=1), nixl.pool(8, 192)
    peer = reader.engine.connect(child.export)
    stop(child)
    assert read(reader, peer, [PagePair(3, 4)]) is TransferState.DONE
    np.testing.assert_array_equal(reader.slots[4], child.slots[3])


def test_a_stopped_peer_is_refused_at_connect_and_holds_up_nobody(nixl_tcp: Kit) -> None:
    child, source = nixl_tcp.child(8, 192, seed=1), nixl_tcp.pool(8, 192, seed=3)
    reader = nixl_tcp.pool(8, 192, connect_timeout_ms=400)
    peer = reader.engine.connect(source.export)
    stop(child)
    outcome: list[str] = []

    def connect() -> None:
        with pytest.raises(Unavailable) as caught:
            reader.engine.connect(child.export)
        outcome.append(caught.value.reason)

    thread = threading.Thread(target=connect)
    thread.start()
    for _ in range(20):
        assert read(reader, peer, [PagePair(1, 1)], 2_000) is TransferState.DONE
    thread.join(10)
    assert outcome == ["peer_gone"]
    assert len(reader.engine._late) == 1  # bytes may still land in that buffer


def test_after_a_failed_read_nothing_lands(nixl_tcp: Kit) -> None:
    """The end state of a broken connection is a proof: quiesced, and the buffer stays as it is."""
    for delay_ms in (0, 1, 3, 10):
        child, reader = nixl_tcp.child(64, MIB, seed=1), nixl_tcp.pool(64, MIB)
        peer = reader.engine.connect(child.export)
        transfer = reader.engine.read_pages(peer, random_pairs(delay_ms, 64, 64, 64))
        timer = threading.Timer(delay_ms / 1000, child.kill)
        timer.start()
        state = transfer.wait(TIMEOUT_MS)
        timer.join()
        if state is TransferState.FAILED:
            assert transfer.quiesced()
            kept = reader.buffer.copy()
            time.sleep(0.1)
            np.testing.assert_array_equal(reader.buffer, kept)
        reader.engine.close()


def test_a_reader_that_leaves_in_the_middle_does_not_harm_the_owner(nixl_tcp: Kit) -> None:
    child = nixl_tcp.child(64, MIB, seed=1)
    for seed in range(3):
        reader = nixl_tcp.pool(64, MIB)
        transfer = reader.engine.read_pages(reader.engine.connect(child.export), random_pairs(seed, 64, 64, 64))
        transfer.wait(5)
        reader.engine.close()
        assert transfer.quiesced()
    reader = nixl_tcp.pool(64, MIB)
    assert read(reader, reader.engine.connect(child.export), [PagePair(1, 2)]) is TransferState.DONE
    assert child.process.poll() is None


class Watched:
    """The library's agent. `released`: of each read that was let go, whether it was still under way."""

    def __init__(self, agent: object, running: object) -> None:
        self._agent, self._running = agent, running
        self.released: list[bool] = []

    def releaseXferReq(self, handle: int) -> object:
        self.released.append(self._agent.getXferStatus(handle) == self._running)
        return self._agent.releaseXferReq(handle)

    def __getattr__(self, name: str) -> object:
        return getattr(self._agent, name)


def watched_read(owner: Child, reader: Pool) -> Watched:
    """A read of which a whole batch is under way."""
    agent = reader.engine.agent
    watched = agent._agent._object = Watched(agent._agent._object, agent._library.NIXL_IN_PROG)
    transfer = reader.engine.read_pages(reader.engine.connect(owner.export), random_pairs(1, 64, 64, 64))
    deadline = time.monotonic() + 20
    while transfer._bytes_under_way < 8 * MIB and time.monotonic() < deadline:
        with transfer._lock:
            transfer._advance()
    watched.released.clear()
    return watched


def test_a_reader_that_leaves_waits_for_what_it_has_under_way(nixl_tcp: Kit) -> None:
    """Else the owner's UCX answers over an endpoint that closes, and aborts the owner's process now and then."""
    child, reader = nixl_tcp.child(64, MIB, seed=1), nixl_tcp.pool(64, MIB)
    watched = watched_read(child, reader)
    reader.engine.close()
    assert watched.released
    assert not any(watched.released)


def test_a_reader_that_leaves_does_not_wait_for_a_peer_that_stands_still(
    nixl_tcp: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "SEE_OFF_S", 0.2)
    child, reader = nixl_tcp.child(64, MIB, seed=1), nixl_tcp.pool(64, MIB)
    peer = reader.engine.connect(child.export)
    assert read(reader, peer, [PagePair(1, 2)]) is TransferState.DONE
    stop(child)
    reader.engine.read_pages(peer, random_pairs(1, 64, 64, 64))
    reader.engine.close()
    assert reader.engine.stopped


@pytest.mark.parametrize("kind", ["nixl", "nixl_tcp"])
def test_an_owner_that_closes_while_it_is_read_lives_on(kind: str, request: pytest.FixtureRequest) -> None:
    kit = request.getfixturevalue(kind)
    child, reader = kit.child(16, MIB, seed=1), kit.pool(16, MIB)
    peer = reader.engine.connect(child.export)
    states: list[TransferState] = []

    def pull() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            states.append(read(reader, peer, random_pairs(len(states), 8, 16, 16), 2_000))
            if states[-1] is not TransferState.DONE:
                return

    thread = threading.Thread(target=pull)
    thread.start()
    while not states and thread.is_alive():
        time.sleep(0.001)
    child.tell("close")
    thread.join(30)
    assert states[0] is TransferState.DONE
    assert states[-1] is TransferState.FAILED
    child.tell("tag 1 1")  # its memory is still there
    assert child.process.poll() is None
