"""The contract of kvstore/transfer/base.py, for every engine."""

import contextlib
import gc
import json
import mmap
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvstore.digest import Digester
from kvstore.errors import GenlockError, InvalidInput, TransferError, TransferTimeout, Unavailable
from kvstore.transfer.base import (
    MAX_PAGES_PER_TRANSFER,
    PagePair,
    Peer,
    PoolExport,
    TransferEngine,
    TransferState,
    tag_table_bytes,
)
from kvstore.transfer.common import slots_of, tags_of
from kvstore.transfer.faulty import FaultyEngine
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from kvstore.transfer.mooncake import MooncakeEngine
from kvstore.transfer.shm import ShmEngine

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHILD = pathlib.Path(__file__).with_name("transfer_peer.py")
TIMEOUT_MS = 10_000
KINDS = ("memory", "shm", "mooncake", "faulty")
PROCESS_KINDS = ("shm", "mooncake", "faulty")
INCARNATION = 0x1234_5678_9ABC_DEF1


@dataclass
class Pool:
    """One engine with its published pool."""

    engine: TransferEngine
    buffer: np.ndarray
    export: PoolExport

    @property
    def slots(self) -> np.ndarray:
        return slots_of(self.buffer, self.export.slots, self.export.slot_bytes)

    @property
    def tags(self) -> np.ndarray:
        return tags_of(self.buffer, self.export.slots)


@dataclass
class Child:
    """A pool in another process."""

    process: subprocess.Popen
    export: PoolExport
    slots: np.ndarray

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@dataclass
class Kit:
    """Makes engines of one kind and closes them."""

    kind: str
    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    made: list[TransferEngine] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    @property
    def wire_name(self) -> str:
        return "shm" if self.kind == "faulty" else self.kind

    def engine(self, address: str = "", **options: object) -> TransferEngine:
        match self.kind:
            case "memory":
                engine = MemoryEngine(self.fabric, address or f"pool-{len(self.made)}")
            case "shm":
                engine = ShmEngine(**options)
            case "faulty":
                engine = FaultyEngine(ShmEngine(**options))
            case _:
                engine = MooncakeEngine(**options)
        self.made.append(engine)
        return engine

    def pool(self, slots: int, slot_bytes: int, seed: int = 0, incarnation: int = INCARNATION, **options) -> Pool:
        engine = self.engine(**options)
        buffer = engine.allocate(slots, slot_bytes)
        pool = Pool(engine, buffer, engine.publish(incarnation, "layout"))
        pool.slots[:] = np.random.default_rng(seed).integers(0, 256, pool.slots.shape, dtype=np.uint8)
        return pool

    def child(self, slots: int, slot_bytes: int, seed: int = 0, incarnation: int = INCARNATION) -> Child:
        numbers = [str(n) for n in (slots, slot_bytes, incarnation, seed)]
        process = subprocess.Popen(
            [sys.executable, str(CHILD), self.wire_name, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        export = PoolExport(**json.loads(process.stdout.readline()))
        content = np.random.default_rng(seed).integers(0, 256, (slots, slot_bytes), dtype=np.uint8)
        self.children.append(Child(process, export, content))
        return self.children[-1]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.process.stdin.close()
            child.process.stdout.close()
        for engine in self.made:
            engine.close()


def _require(kind: str) -> None:
    reason = MooncakeEngine.available() if kind == "mooncake" else None
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=KINDS)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    _require(request.param)
    made = Kit(request.param)
    yield made
    made.close()


@pytest.fixture(params=PROCESS_KINDS)
def process_kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    _require(request.param)
    made = Kit(request.param)
    yield made
    made.close()


@pytest.fixture
def mooncake() -> Iterator[Kit]:
    _require("mooncake")
    made = Kit("mooncake")
    yield made
    made.close()


@pytest.fixture
def shm() -> Iterator[Kit]:
    made = Kit("shm")
    yield made
    made.close()


def _pairs(seed: int, count: int, remote_slots: int, local_slots: int) -> list[PagePair]:
    rng = random.Random(seed)
    return [
        PagePair(*pair)
        for pair in zip(rng.sample(range(remote_slots), count), rng.sample(range(local_slots), count), strict=True)
    ]


def _read(reader: Pool, peer: Peer, pairs: list[PagePair], timeout_ms: int = TIMEOUT_MS) -> TransferState:
    return reader.engine.read_pages(peer, pairs).wait(timeout_ms)


def _assert_exactly(before: np.ndarray, reader: Pool, source_slots: np.ndarray, pairs: list[PagePair]) -> None:
    """The named slots hold the source's bytes and every other byte of the whole buffer is as it was."""
    expected = before.copy()
    expected_slots = slots_of(expected, reader.export.slots, reader.export.slot_bytes)
    for pair in pairs:
        expected_slots[pair.local_page_id] = source_slots[pair.remote_page_id]
    np.testing.assert_array_equal(reader.buffer, expected)


# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [64, 192, 64 * 33, 4096 + 64, 401_408])
def test_pages_arrive_exactly(kit: Kit, slot_bytes: int) -> None:
    source, reader = kit.pool(9, slot_bytes, seed=1), kit.pool(12, slot_bytes, seed=2)
    peer = reader.engine.connect(source.export)
    for count in (1, 2, 7):
        before, pairs = reader.buffer.copy(), _pairs(slot_bytes + count, count, 9, 12)
        transfer = reader.engine.read_pages(peer, pairs)
        assert transfer.wait(TIMEOUT_MS) is TransferState.DONE
        assert transfer.quiesced()
        _assert_exactly(before, reader, source.slots, pairs)


def test_pages_arrive_from_another_process(process_kit: Kit) -> None:
    child, reader = process_kit.child(40, 4096 + 64, seed=3), process_kit.pool(40, 4096 + 64, seed=4)
    peer = reader.engine.connect(child.export)
    before, pairs = reader.buffer.copy(), _pairs(5, 25, 40, 40)
    assert _read(reader, peer, pairs) is TransferState.DONE
    _assert_exactly(before, reader, child.slots, pairs)


def test_empty_batch_is_done_at_once(kit: Kit) -> None:
    source, reader = kit.pool(2, 64, seed=1), kit.pool(2, 64, seed=2)
    before = reader.buffer.copy()
    transfer = reader.engine.read_pages(reader.engine.connect(source.export), [])
    assert transfer.wait(0) is TransferState.DONE
    assert transfer.quiesced()
    np.testing.assert_array_equal(reader.buffer, before)


def test_more_pages_than_an_engine_takes_at_once(kit: Kit) -> None:
    source, reader = kit.pool(2500, 64, seed=1), kit.pool(2300, 64, seed=2)
    before, pairs = reader.buffer.copy(), _pairs(7, 2300, 2500, 2300)
    assert _read(reader, reader.engine.connect(source.export), pairs) is TransferState.DONE
    _assert_exactly(before, reader, source.slots, pairs)


def test_contiguous_runs(kit: Kit) -> None:
    source, reader = kit.pool(64, 4096 + 64, seed=1), kit.pool(70, 4096 + 64, seed=2)
    peer = reader.engine.connect(source.export)
    for shift in (0, 3):
        runs = [*range(20), *range(40, 64), 33, *range(25, 30)]
        pairs = [PagePair(page, page + shift) for page in runs]
        before = reader.buffer.copy()
        assert _read(reader, peer, pairs) is TransferState.DONE
        _assert_exactly(before, reader, source.slots, pairs)


def test_neighbours_on_one_side_only(kit: Kit) -> None:
    source, reader = kit.pool(16, 192, seed=1), kit.pool(16, 192, seed=2)
    pairs = [PagePair(i, 15 - i) for i in range(8)] + [PagePair(8, 0), PagePair(10, 1), PagePair(11, 3)]
    before = reader.buffer.copy()
    assert _read(reader, reader.engine.connect(source.export), pairs) is TransferState.DONE
    _assert_exactly(before, reader, source.slots, pairs)


def test_one_source_page_into_two_slots(kit: Kit) -> None:
    source, reader = kit.pool(4, 192, seed=1), kit.pool(4, 192, seed=2)
    pairs, before = [PagePair(2, 0), PagePair(2, 3)], reader.buffer.copy()
    assert _read(reader, reader.engine.connect(source.export), pairs) is TransferState.DONE
    _assert_exactly(before, reader, source.slots, pairs)


def test_two_peers_are_not_mixed_up(kit: Kit) -> None:
    one, other, reader = kit.pool(4, 192, seed=1), kit.pool(6, 192, seed=2), kit.pool(4, 192, seed=3)
    before = reader.buffer.copy()
    peers = [reader.engine.connect(pool.export) for pool in (one, other)]
    assert _read(reader, peers[1], [PagePair(1, 0)]) is TransferState.DONE
    assert _read(reader, peers[0], [PagePair(1, 1)]) is TransferState.DONE
    expected = before.copy()
    slots_of(expected, 4, 192)[0], slots_of(expected, 4, 192)[1] = other.slots[1], one.slots[1]
    np.testing.assert_array_equal(reader.buffer, expected)


# -- refusals --------------------------------------------------------------------------------------------------------


BAD_PAIRS = (
    (PagePair(8, 0), "remote_page_id"),
    (PagePair(-1, 0), "remote_page_id"),
    (PagePair(1 << 40, 0), "remote_page_id"),
    (PagePair(0, 8), "local_page_id"),
    (PagePair(0, -1), "local_page_id"),
    (PagePair(0, 3), "local_page_id"),  # 3 is already a target of the batch
    (PagePair(1 << 70, 0), "remote_page_id"),
    (PagePair(0.5, 0), "pairs"),
    (PagePair("one", 0), "pairs"),
    ((1, 2, 3), "pairs"),
)


def test_bad_pairs_are_refused_before_anything_moves(kit: Kit) -> None:
    source, reader = kit.pool(8, 192, seed=1), kit.pool(8, 192, seed=2)
    peer, before = reader.engine.connect(source.export), reader.buffer.copy()
    for bad, refused in BAD_PAIRS:
        with pytest.raises(InvalidInput) as caught:
            reader.engine.read_pages(peer, [PagePair(2, 3), bad])
        assert caught.value.field == refused, bad
    with pytest.raises(InvalidInput) as caught:
        reader.engine.read_pages(peer, [PagePair(0, 0)] * (MAX_PAGES_PER_TRANSFER + 1))
    assert caught.value.field == "pairs"
    kit.fabric.land_all()
    time.sleep(0.05)
    np.testing.assert_array_equal(reader.buffer, before)


def test_connect_refuses_a_bad_export(kit: Kit) -> None:
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    for change, refused in (
        ({"engine": "carrier_pigeon"}, "export.engine"),
        ({"slot_bytes": 256}, "export.slot_bytes"),
        ({"slot_bytes": 63}, "export.slot_bytes"),
        ({"slots": 0}, "export.slots"),
    ):
        with pytest.raises(InvalidInput) as caught:
            reader.engine.connect(replace(source.export, **change))
        assert caught.value.field == refused


def test_connect_refuses_a_bad_address(kit: Kit) -> None:
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    for address in ("", "{}", "[1]", "null", '{"pid": 1}', "127.0.0.1:1", "[" * 100_000):
        with pytest.raises((InvalidInput, Unavailable)) as caught:
            reader.engine.connect(replace(source.export, address=address))
        assert caught.value.field == "export.address" or caught.value.reason == "peer_gone", address


def test_connect_refuses_another_number_of_slots(kit: Kit) -> None:
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    with pytest.raises(Unavailable):
        reader.engine.connect(replace(source.export, slots=4096))


def test_order_of_calls_is_checked(kit: Kit) -> None:
    source, engine = kit.pool(8, 192), kit.engine()
    with pytest.raises(TransferError):
        engine.publish(INCARNATION, "layout")
    with pytest.raises(TransferError):
        engine.connect(source.export)
    for slots, slot_bytes, refused in ((0, 192, "slots"), (8, 100, "slot_bytes"), (8, 0, "slot_bytes")):
        with pytest.raises(InvalidInput) as caught:
            engine.allocate(slots, slot_bytes)
        assert caught.value.field == refused
    buffer = engine.allocate(8, 192)
    assert buffer.ctypes.data % 4096 == 0
    assert buffer.size == tag_table_bytes(8) + 8 * 192
    assert not buffer.any()
    with pytest.raises(TransferError):
        engine.allocate(8, 192)
    for incarnation in (0, -1, 1 << 63):
        with pytest.raises(InvalidInput) as caught:
            engine.publish(incarnation, "layout")
        assert caught.value.field == "incarnation"
    engine.publish(INCARNATION, "layout")
    with pytest.raises(TransferError):
        engine.publish(INCARNATION, "layout")


# -- incarnations ----------------------------------------------------------------------------------------------------


def test_publish_stamps_the_incarnation_into_every_row(kit: Kit) -> None:
    pool = kit.pool(300, 64)
    assert (pool.tags[:, 0] == INCARNATION).all()
    assert pool.export.incarnation == INCARNATION


def test_connect_refuses_another_incarnation(kit: Kit) -> None:
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(source.export, incarnation=INCARNATION + 1))
    assert caught.value.reason == "incarnation_changed"


def test_connect_refuses_a_pool_whose_rows_changed_life(kit: Kit) -> None:
    source, reader = kit.pool(300, 192), kit.pool(8, 192)
    source.tags[299, 0] += 1
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(source.export)
    assert caught.value.reason == "incarnation_changed"


def test_a_pool_that_took_the_place_of_a_closed_one_is_refused(kit: Kit) -> None:
    reader = kit.pool(8, 192)
    first = kit.pool(8, 192, address="worker-1") if kit.kind == "memory" else kit.pool(8, 192)
    first.engine.close()
    second_incarnation = INCARNATION + 2
    if kit.kind == "memory":
        second = kit.pool(8, 192, address="worker-1", incarnation=second_incarnation)
    else:
        second = kit.pool(8, 192, incarnation=second_incarnation)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(first.export)
    assert caught.value.reason in ("incarnation_changed", "peer_gone")
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(second.export, incarnation=INCARNATION))
    assert caught.value.reason == "incarnation_changed"
    reader.engine.connect(second.export)


def test_a_restarted_process_is_another_peer(process_kit: Kit) -> None:
    reader = process_kit.pool(8, 192)
    first = process_kit.child(8, 192)
    peer = reader.engine.connect(first.export)
    first.kill()
    second = process_kit.child(8, 192, incarnation=INCARNATION + 2)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(first.export)
    assert caught.value.reason in ("incarnation_changed", "peer_gone")
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(second.export, incarnation=INCARNATION))
    assert caught.value.reason == "incarnation_changed"
    assert _read(reader, peer, [PagePair(0, 0)], 3_000) is not TransferState.DONE
    assert _read(reader, reader.engine.connect(second.export), [PagePair(0, 0)]) is TransferState.DONE


# -- tags ------------------------------------------------------------------------------------------------------------


def test_read_tags_returns_live_values(kit: Kit) -> None:
    source, reader = kit.pool(300, 64), kit.pool(8, 64)
    peer = reader.engine.connect(source.export)
    rng = np.random.default_rng(9)
    for _ in range(3):
        source.tags[:, 1] = rng.integers(1, 1 << 62, 300)
        tags = reader.engine.read_tags(peer, TIMEOUT_MS)
        assert tags.shape == (300, 2)
        assert tags.dtype == np.int64
        np.testing.assert_array_equal(tags, source.tags)
        kept = tags.copy()
        source.tags[:, 1] += 1
        np.testing.assert_array_equal(tags, kept)  # a copy of that moment, not a window


def test_read_tags_of_another_process(process_kit: Kit) -> None:
    child, reader = process_kit.child(300, 64), process_kit.pool(8, 64)
    peer = reader.engine.connect(child.export)
    child.tell("tag 299 77")
    tags = reader.engine.read_tags(peer, TIMEOUT_MS)
    assert tags[299].tolist() == [INCARNATION, 77]
    assert not tags[:299, 1].any()


def test_tags_read_after_pages_expose_every_overwrite(kit: Kit) -> None:
    """A writer moves the tag before it overwrites, so a page between two equal odd tags is whole and of that tag."""
    source, reader = kit.pool(1, 256 << 10), kit.pool(1, 256 << 10)
    source.slots[0], source.tags[0, 1] = 1, 1
    peer, stop = reader.engine.connect(source.export), threading.Event()

    def overwrite() -> None:
        while not stop.is_set():
            source.tags[0, 1] += 1  # even: nobody's
            source.slots[0] = (source.tags[0, 1] + 1) % 251
            source.tags[0, 1] += 1  # odd: sealed
            time.sleep(0.004)

    writer = threading.Thread(target=overwrite)
    writer.start()
    accepted = 0
    try:
        deadline = time.monotonic() + 30
        while accepted < 20 and time.monotonic() < deadline:
            before = int(reader.engine.read_tags(peer, TIMEOUT_MS)[0, 1])
            assert _read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
            if before % 2 and int(reader.engine.read_tags(peer, TIMEOUT_MS)[0, 1]) == before:
                accepted += 1
                assert np.unique(reader.slots[0]).tolist() == [before % 251]
    finally:
        stop.set()
        writer.join()
    assert accepted == 20


# -- end states, time, peers that go ---------------------------------------------------------------------------------


def test_done_is_final_and_moves_nothing_again(kit: Kit) -> None:
    source, reader = kit.pool(8, 192, seed=1), kit.pool(8, 192, seed=2)
    transfer = reader.engine.read_pages(reader.engine.connect(source.export), [PagePair(1, 2)])
    assert transfer.wait(TIMEOUT_MS) is TransferState.DONE
    source.slots[1] ^= 0xFF
    reader.slots[2] = 7
    for timeout_ms in (0, 50):
        assert transfer.wait(timeout_ms) is TransferState.DONE
    kit.fabric.land_all()
    assert (reader.slots[2] == 7).all()


def test_closing_our_engine_quiesces_everything(kit: Kit) -> None:
    source, reader = kit.pool(8, 192, seed=1), kit.pool(8, 192, seed=2)
    view = reader.slots
    peer = reader.engine.connect(source.export)
    transfer = reader.engine.read_pages(peer, [PagePair(1, 2)])
    reader.engine.close()
    assert transfer.quiesced()
    assert transfer.wait(TIMEOUT_MS) in (TransferState.FAILED, TransferState.DONE)
    kept = view.copy()
    kit.fabric.land_all()
    assert transfer.wait(0) is transfer.wait(TIMEOUT_MS)
    np.testing.assert_array_equal(view, kept)  # the caller's arrays outlive the engine
    reader.engine.close()
    for call in (
        lambda: reader.engine.read_pages(peer, [PagePair(0, 0)]),
        lambda: reader.engine.read_tags(peer, TIMEOUT_MS),
        lambda: reader.engine.connect(source.export),
        lambda: reader.engine.allocate(8, 192),
    ):
        with pytest.raises(GenlockError):
            call()


def test_reads_fail_once_the_source_closed(kit: Kit) -> None:
    source, reader = kit.pool(8, 192, seed=1), kit.pool(8, 192, seed=2)
    peer, before = reader.engine.connect(source.export), reader.buffer.copy()
    source.engine.close()
    with contextlib.suppress(TransferError):
        assert _read(reader, peer, [PagePair(0, 0)], 3_000) is not TransferState.DONE
    with pytest.raises(TransferError):
        reader.engine.read_tags(peer, 3_000)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(source.export)
    assert caught.value.reason == "peer_gone"
    np.testing.assert_array_equal(reader.buffer, before)


def test_disconnect_forgets_one_peer(kit: Kit) -> None:
    source, reader = kit.pool(8, 192, seed=1), kit.pool(8, 192, seed=2)
    one, other = reader.engine.connect(source.export), reader.engine.connect(source.export)
    reader.engine.disconnect(one)
    reader.engine.disconnect(one)
    reader.engine.disconnect(Peer(source.export, 10_000))
    with pytest.raises(TransferError):
        reader.engine.read_pages(one, [PagePair(0, 0)])
    with pytest.raises(TransferError):
        reader.engine.read_tags(one, TIMEOUT_MS)
    assert _read(reader, other, [PagePair(0, 0)]) is TransferState.DONE


def test_a_peer_of_another_engine_is_unknown(kit: Kit) -> None:
    source, one, other = kit.pool(8, 192), kit.pool(8, 192), kit.pool(8, 192)
    foreign = one.engine.connect(source.export)
    other.engine.connect(one.export)  # takes the same handle number
    with pytest.raises(TransferError):
        other.engine.read_pages(foreign, [PagePair(0, 0)])


def test_a_killed_peer_ends_transfers(process_kit: Kit) -> None:
    child, reader = process_kit.child(8, 192, seed=1), process_kit.pool(8, 192, seed=2)
    peer = reader.engine.connect(child.export)
    assert _read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
    child.kill()
    started = time.monotonic()
    state = _read(reader, peer, [PagePair(1, 1)], 3_000)
    assert state in (TransferState.FAILED, TransferState.TIMED_OUT)
    with pytest.raises(TransferError):
        reader.engine.read_tags(peer, 3_000)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(child.export)
    assert caught.value.reason == "peer_gone"
    assert time.monotonic() - started < 20  # nothing waited for a library's own limit


def test_a_peer_killed_before_the_wait_ends_the_transfer(process_kit: Kit) -> None:
    child, reader = process_kit.child(64, 1 << 20, seed=1), process_kit.pool(64, 1 << 20)
    peer = reader.engine.connect(child.export)
    transfer = reader.engine.read_pages(peer, _pairs(1, 64, 64, 64))
    child.kill()
    assert transfer.wait(5_000) in (TransferState.FAILED, TransferState.TIMED_OUT)
    reader.engine.close()
    assert transfer.quiesced()


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
        assert _read(reader, peer, [PagePair(1, 1)], 2_000) is TransferState.DONE
    thread.join(10)
    assert outcome == ["peer_gone"]


def test_a_stopped_peer_can_still_be_read_over_shared_memory(shm: Kit) -> None:
    child, reader = shm.child(8, 192, seed=1), shm.pool(8, 192)
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    assert _read(reader, peer, [PagePair(3, 4)]) is TransferState.DONE
    np.testing.assert_array_equal(reader.slots[4], child.slots[3])


# -- threads and resources -------------------------------------------------------------------------------------------


def test_several_threads_read_at_once(kit: Kit) -> None:
    source, reader = kit.pool(64, 8256, seed=1), kit.pool(64, 8256, seed=2)
    peer = reader.engine.connect(source.export)
    failures: list[str] = []

    def pull(worker: int) -> None:
        try:
            pull_rounds(worker)
        except Exception as error:  # would be lost with its thread
            failures.append(repr(error))

    def pull_rounds(worker: int) -> None:
        rng = random.Random(worker)
        mine = range(worker * 16, worker * 16 + 16)
        for _ in range(25):
            pairs = [PagePair(rng.randrange(64), local) for local in rng.sample(mine, 12)]
            if _read(reader, peer, pairs) is not TransferState.DONE:
                failures.append("not done")
            if not (reader.engine.read_tags(peer, TIMEOUT_MS)[:, 0] == INCARNATION).all():
                failures.append("tags")
            if any((reader.slots[p.local_page_id] != source.slots[p.remote_page_id]).any() for p in pairs):
                failures.append("bytes")

    threads = [threading.Thread(target=pull, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _resources() -> dict[str, int]:
    gc.collect()
    maps = pathlib.Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "pools": maps.count("memfd:genlock-pool"),
    }


def test_nothing_is_left_behind(kit: Kit) -> None:
    def live_once(seed: int) -> None:
        source, reader = kit.pool(8, 192, seed=seed), kit.pool(8, 192)
        peer = reader.engine.connect(source.export)
        assert _read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
        reader.engine.disconnect(peer)
        again = reader.engine.connect(source.export)
        reader.engine.read_tags(again, TIMEOUT_MS)
        for pool in (reader, source):
            pool.engine.close()
        kit.made.clear()

    live_once(0)  # libraries keep some threads and descriptors of their first use
    baseline = _resources()
    for seed in range(10):  # twenty engines
        live_once(seed)
    deadline = time.monotonic() + 10
    while (now := _resources()) != baseline and time.monotonic() < deadline:
        time.sleep(0.05)
    assert now == baseline
    assert kit.fabric.pools == 0
    assert kit.fabric.pending == 0


# -- shared memory: what its design promises -------------------------------------------------------------------------


def test_peers_cannot_map_a_pool_writable(shm: Kit) -> None:
    child = shm.child(8, 192)
    address = json.loads(child.export.address)
    fd = os.open(f"/proc/{address['pid']}/fd/{address['fd']}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "another"}, "other_host"),
        ({"pid_namespace": "pid:[1]"}, "other_pid_namespace"),
        ({"start_ticks": 1}, "peer_gone"),
        ({"pid": 2**22 + 1}, "peer_gone"),
        ({"fd": 10_000}, "peer_gone"),
        ({"fd": 0}, "peer_gone"),
        ({"nonce": "00" * 16}, "incarnation_changed"),
    ],
)
def test_shared_memory_refuses_what_is_not_that_pool(shm: Kit, change: dict[str, object], reason: str) -> None:
    child, reader = shm.child(8, 192), shm.pool(8, 192)
    address = json.loads(child.export.address) | change
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(child.export, address=json.dumps(address)))
    assert caught.value.reason == reason


def test_no_access_to_the_peers_process_names_the_remedy(shm: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    child, reader = shm.child(8, 192), shm.pool(8, 192)
    really_read = os.readlink

    def refuse(path: str) -> str:
        if str(child.process.pid) in str(path):
            raise PermissionError(13, "Permission denied")
        return really_read(path)

    monkeypatch.setattr(os, "readlink", refuse)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(child.export)
    assert caught.value.reason == "no_access"
    assert "transfer.engine" in caught.value.message


def test_without_a_pidfd_death_is_still_noticed(shm: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unsupported)
    child, reader = shm.child(8, 192), shm.pool(8, 192)
    peer = reader.engine.connect(child.export)
    assert _read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
    child.process.kill()
    deadline = time.monotonic() + 10
    while _read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE and time.monotonic() < deadline:
        time.sleep(0.01)  # not reaped yet: a zombie counts as dead
    assert _read(reader, peer, [PagePair(0, 0)]) is TransferState.FAILED


def test_shared_memory_stops_at_its_deadline(shm: Kit) -> None:
    now_ms = [0]

    def clock_ms() -> int:
        now_ms[0] += 10
        return now_ms[0]

    source, reader = shm.pool(40, 1 << 20, seed=1), shm.pool(40, 1 << 20, clock_ms=clock_ms)
    reader.slots[:] = 0
    peer, pairs = reader.engine.connect(source.export), [PagePair(i, i) for i in range(40)]
    transfer = reader.engine.read_pages(peer, pairs)
    assert transfer.wait(25) is TransferState.TIMED_OUT
    assert transfer.quiesced()
    assert transfer.wait(TIMEOUT_MS) is TransferState.TIMED_OUT
    assert not (reader.slots[39]).any()
    assert _read(reader, peer, pairs) is TransferState.DONE


# -- digests computed on the way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shm", "mooncake", "faulty"])
@pytest.mark.parametrize(("slot_bytes", "count"), [(192, 9), (1 << 20, 19)])
def test_body_sums_are_those_of_the_landed_bodies(kind: str, slot_bytes: int, count: int) -> None:
    _require(kind)
    kit = Kit(kind)
    try:
        digester = Digester(b"0123456789abcdef", slot_bytes)
        source, reader = kit.pool(24, slot_bytes, seed=1), kit.pool(24, slot_bytes, seed=2, digester=digester)
        peer = reader.engine.connect(source.export)
        pairs = [*_pairs(3, count, 24, 24)][: count - 3]
        transfer = reader.engine.read_pages(peer, pairs)
        assert transfer.wait(TIMEOUT_MS) is TransferState.DONE
        expected = digester.body_sums_many(source.slots, np.array([p.remote_page_id for p in pairs]))
        np.testing.assert_array_equal(transfer.body_sums, expected)
    finally:
        kit.close()


def test_without_a_digester_there_are_no_sums(kit: Kit) -> None:
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    transfer = reader.engine.read_pages(reader.engine.connect(source.export), [PagePair(0, 0)])
    transfer.wait(TIMEOUT_MS)
    assert transfer.body_sums is None
