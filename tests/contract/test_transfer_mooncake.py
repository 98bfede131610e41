"""What mooncake does when a peer stops answering, and whom it lets in."""

import contextlib
import os
import pathlib
import signal
import threading
import time

import numpy as np
import pytest

from kvstore.digest import Digester
from kvstore.errors import CorruptPage, TransferTimeout, Unavailable
from kvstore.guard import Guard
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import PagePair, TransferState, tag_table_bytes
from kvstore.transfer.mooncake import Descriptor, MooncakeTransfer, parse_address
from tests.contract.nixl_kit import MIB, until_quiesced
from tests.contract.transfer_kit import TIMEOUT_MS, Child, Kit, Pool, random_pairs, read
from tests.support.kv_world import LAYOUT, SECRET, make_keyer, seal_prompt

NOBODYS = 1 << 40  # an address that no pool has registered


def test_a_stopped_peer_times_out_within_our_deadline(mooncake: Kit) -> None:
    child, reader = mooncake.child(16, 1 << 20, seed=1), mooncake.pool(16, 1 << 20)
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    pairs = [PagePair(i, 15 - i) for i in range(16)]
    transfer = reader.engine.read_pages(peer, pairs)
    started = time.monotonic()
    assert transfer.wait(300) is TransferState.TIMED_OUT
    assert not transfer.quiesced()
    with pytest.raises(TransferTimeout):
        reader.engine.read_tags(peer, 300)
    with pytest.raises(TransferTimeout):
        reader.engine.read_tags(peer, 300)  # the stuck read is not overtaken
    assert time.monotonic() - started < 5
    child.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while not transfer.quiesced() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert transfer.quiesced()  # each descriptor reached its end
    assert transfer.wait(TIMEOUT_MS) is TransferState.TIMED_OUT
    for pair in pairs:
        landed = reader.slots[pair.local_page_id]
        assert (landed == child.slots[pair.remote_page_id]).all() or not landed.any()
    reader.engine.read_tags(peer, TIMEOUT_MS)


def test_late_bytes_do_land_after_a_time_out(mooncake: Kit) -> None:
    """The reason for quarantine: without `quiesced` a reused slot would be overwritten."""
    child, reader = mooncake.child(16, 1 << 20, seed=1), mooncake.pool(16, 1 << 20)
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    transfer = reader.engine.read_pages(peer, [PagePair(i, 15 - i) for i in range(16)])
    assert transfer.wait(200) is TransferState.TIMED_OUT
    at_time_out = reader.buffer.copy()
    child.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while not transfer.quiesced() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (reader.buffer != at_time_out).any()


def test_closing_the_engine_proves_that_a_stuck_transfer_ended(mooncake: Kit) -> None:
    child, reader = mooncake.child(16, 1 << 20, seed=1), mooncake.pool(16, 1 << 20)
    view = reader.buffer
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    transfer = reader.engine.read_pages(peer, [PagePair(i, i) for i in range(16)])
    assert transfer.wait(200) is TransferState.TIMED_OUT
    assert not transfer.quiesced()
    reader.engine.close()
    assert transfer.quiesced()
    kept = view.copy()
    child.signal(signal.SIGCONT)
    time.sleep(0.3)
    np.testing.assert_array_equal(view, kept)


def test_a_stopped_peer_is_refused_at_connect_and_holds_up_nobody(mooncake: Kit) -> None:
    child, source = mooncake.child(8, 192, seed=1), mooncake.pool(8, 192, seed=3)
    reader = mooncake.pool(8, 192, connect_timeout_ms=400)
    peer = reader.engine.connect(source.export)
    child.signal(signal.SIGSTOP)
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


def listening() -> set[tuple[str, int]]:
    """(address in hex, port) of every socket on which this process listens."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_the_library_listens_on_every_interface_whatever_host_it_is_given(mooncake: Kit) -> None:
    """A fact about the library, not a wish: why deployments fence its ports off. When this fails, look whether the
    library has learnt to bind, and tell operators."""
    before = listening()
    mooncake.pool(8, 192)
    opened = listening() - before
    assert opened
    assert {address.strip("0") for address, _port in opened} == {""}, "all zeros: every interface"


def test_a_stranger_can_write_registered_memory_and_the_receipt_finds_out(mooncake: Kit) -> None:
    """The library asks nobody who he is. What is damaged in a sealed page does not pass its digest."""
    layout = LAYOUT
    engine, victim, stranger = mooncake.engine(), mooncake.engine(), mooncake.pool(8, 192)
    source = Guard(layout, 4, engine, 11, Digester(SECRET, layout.slot_bytes))
    sink = Guard(layout, 4, victim, 12, Digester(SECRET, layout.slot_bytes))
    keyer, tokens = make_keyer(), range(layout.page_tokens)
    receiver, peer = PageReceiver(sink, victim), victim.connect(source.export)
    [desc] = seal_prompt(source, keyer, tokens)
    expected = ExpectedPages(len(tokens), layout.page_tokens, keyer.chain("t", tokens, layout.page_tokens))
    [first] = sink.allocate(1, 1)
    receiver.pull(peer, [PageOrder(desc, first)], 1, expected, TIMEOUT_MS)
    address = parse_address(source.export.address)
    target = address.base + tag_table_bytes(source.export.slots) + desc.ref.page_id * layout.slot_bytes + 256
    written = stranger.engine.call(
        lambda library: library.transfer_sync_write(address.session, stranger.slots.ctypes.data, target, 64)
    )
    assert written == 0, "the write went through: nothing of the library's stops it"
    [second] = sink.allocate(1, 1)
    with pytest.raises(CorruptPage):
        receiver.pull(peer, [PageOrder(desc, second)], 1, expected, TIMEOUT_MS)


# -- what a failure proves -------------------------------------------------------------------------------------------


def test_after_a_failed_read_nothing_lands(mooncake: Kit) -> None:
    """Over TCP a failed batch of one descriptor has ended. Others of the same read may go on: `quiesced` waits."""
    failed = 0
    for delay_ms in (1, 12):
        child, reader = mooncake.child(64, MIB, seed=1), mooncake.pool(64, MIB)
        peer = reader.engine.connect(child.export)
        transfer = reader.engine.read_pages(peer, random_pairs(delay_ms, 64, 64, 64))
        timer = threading.Timer(delay_ms / 1000, child.kill)
        timer.start()
        state = transfer.wait(TIMEOUT_MS)
        timer.join()
        if state is TransferState.FAILED:
            failed += 1
            assert until_quiesced(transfer)
            kept = reader.buffer.copy()
            time.sleep(0.2)
            np.testing.assert_array_equal(reader.buffer, kept)
        reader.engine.close()
    assert failed, "the owner died in the middle of a read"


def test_a_read_with_one_bad_page_is_quiet_only_when_the_others_have_ended(mooncake: Kit) -> None:
    child, reader = mooncake.child(64, MIB, seed=1), mooncake.pool(64, MIB)
    engine, peer = reader.engine, reader.engine.connect(child.export)
    reader.slots[:] = 0
    base, remote = reader.slots.ctypes.data, parse_address(child.export.address).base + tag_table_bytes(64)
    read_them = [Descriptor(base + i * MIB, remote + i * MIB if i else NOBODYS, MIB, i, 1) for i in range(64)]
    transfer = MooncakeTransfer(engine, engine._source(peer), read_them)
    assert transfer.wait(TIMEOUT_MS) is TransferState.FAILED
    before = reader.slots.copy()
    assert until_quiesced(transfer)
    kept = reader.slots.copy()
    assert (before != kept).any(), "the others were on their way when the read had failed"
    time.sleep(0.2)
    np.testing.assert_array_equal(reader.slots, kept)


def raw_batch(reader: Pool, child: Child, first_remote: int | None) -> tuple[int, np.ndarray]:
    """The library's own batch of 64 pages: its end state, and the slots as they were when it was told."""
    base, address = reader.slots.ctypes.data, parse_address(child.export.address)
    reader.slots[:] = 0
    local = [base + i * MIB for i in range(64)]
    remote = [address.base + tag_table_bytes(64) + i * MIB for i in range(64)]
    remote[0] = first_remote or remote[0]
    sizes = [MIB] * 64
    batch = reader.engine.call(lambda lib: lib.batch_transfer_async_read(address.session, local, remote, sizes))
    deadline = time.monotonic() + 20
    while not (state := reader.engine.call(lambda lib: lib.transfer_check_status(batch))):
        assert time.monotonic() < deadline
    return state, reader.slots.copy()


@pytest.mark.parametrize(("first_remote", "told"), [(NOBODYS, -1), (None, 1)], ids=["failed", "completed"])
def test_the_state_of_a_batch_of_several_proves_nothing(mooncake: Kit, first_remote: int | None, told: int) -> None:
    """A fact about the library, and why each descriptor is a batch of its own: of several it tells the state of the
    first, and the rest goes on landing, whether that one failed or not."""
    child, reader = mooncake.child(64, MIB, seed=1), mooncake.pool(64, MIB)
    peer = reader.engine.connect(child.export)
    assert read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE  # connections are there
    for _ in range(10):
        state, at_the_end = raw_batch(reader, child, first_remote)
        assert state == told
        deadline = time.monotonic() + 20
        while not reader.slots.any(axis=1)[1:].all() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        if (reader.slots != at_the_end).any():
            return
    pytest.fail("ten batches ended whole")


def test_every_descriptor_is_a_batch_of_its_own(mooncake: Kit) -> None:
    source, reader = mooncake.pool(64, 4096, seed=1), mooncake.pool(64, 4096)
    peer = reader.engine.connect(source.export)
    sizes: list[int] = []

    class Watched:
        def __init__(self, library: object) -> None:
            self._library = library

        def batch_transfer_async_read(self, session: str, local: list, remote: list, nbytes: list) -> int:
            sizes.append(len(nbytes))
            return self._library.batch_transfer_async_read(session, local, remote, nbytes)

        def __getattr__(self, name: str) -> object:
            return getattr(self._library, name)

    lent = reader.engine._library
    lent._object = Watched(lent._object)
    assert read(reader, peer, random_pairs(1, 40, 64, 64)) is TransferState.DONE
    reader.engine.read_tags(peer, TIMEOUT_MS)
    assert len(sizes) > 30
    assert set(sizes) == {1}
