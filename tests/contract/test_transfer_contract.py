"""The contract of kvstore/transfer/base.py, for every engine."""

import contextlib
import gc
import os
import pathlib
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvstore.digest import Digester
from kvstore.errors import GenlockError, InvalidInput, TransferError, Unavailable
from kvstore.transfer.base import (
    MAX_PAGES_PER_TRANSFER,
    PagePair,
    Peer,
    TransferState,
    tag_table_bytes,
)
from kvstore.transfer.common import slots_of
from tests.contract.transfer_kit import (
    INCARNATION,
    TIMEOUT_MS,
    Kit,
    assert_exactly,
    kit_of,
    random_pairs,
    read,
)

# -- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [64, 192, 64 * 33, 4096 + 64, 401_408])
def test_pages_arrive_exactly(kit: Kit, slot_bytes: int) -> None:
    source, reader = kit.pool(9, slot_bytes, seed=1), kit.pool(12, slot_bytes, seed=2)
    peer = reader.engine.connect(source.export)
    for count in (1, 2, 7):
        before, pairs = reader.buffer.copy(), random_pairs(slot_bytes + count, count, 9, 12)
        transfer = reader.engine.read_pages(peer, pairs)
        assert transfer.wait(TIMEOUT_MS) is TransferState.DONE
        assert transfer.quiesced()
        assert_exactly(before, reader, source.slots, pairs)


def test_pages_arrive_from_another_process(process_kit: Kit) -> None:
    child, reader = process_kit.child(40, 4096 + 64, seed=3), process_kit.pool(40, 4096 + 64, seed=4)
    peer = reader.engine.connect(child.export)
    before, pairs = reader.buffer.copy(), random_pairs(5, 25, 40, 40)
    assert read(reader, peer, pairs) is TransferState.DONE
    assert_exactly(before, reader, child.slots, pairs)


def test_empty_batch_is_done_at_once(kit: Kit) -> None:
    source, reader = kit.pool(2, 64, seed=1), kit.pool(2, 64, seed=2)
    before = reader.buffer.copy()
    transfer = reader.engine.read_pages(reader.engine.connect(source.export), [])
    assert transfer.wait(0) is TransferState.DONE
    assert transfer.quiesced()
    np.testing.assert_array_equal(reader.buffer, before)


def test_more_pages_than_an_engine_takes_at_once(kit: Kit) -> None:
    source, reader = kit.pool(2500, 64, seed=1), kit.pool(2300, 64, seed=2)
    before, pairs = reader.buffer.copy(), random_pairs(7, 2300, 2500, 2300)
    assert read(reader, reader.engine.connect(source.export), pairs) is TransferState.DONE
    assert_exactly(before, reader, source.slots, pairs)


def test_contiguous_runs(kit: Kit) -> None:
    source, reader = kit.pool(64, 4096 + 64, seed=1), kit.pool(70, 4096 + 64, seed=2)
    peer = reader.engine.connect(source.export)
    for shift in (0, 3):
        runs = [*range(20), *range(40, 64), 33, *range(25, 30)]
        pairs = [PagePair(page, page + shift) for page in runs]
        before = reader.buffer.copy()
        assert read(reader, peer, pairs) is TransferState.DONE
        assert_exactly(before, reader, source.slots, pairs)


def test_neighbours_on_one_side_only(kit: Kit) -> None:
    source, reader = kit.pool(16, 192, seed=1), kit.pool(16, 192, seed=2)
    pairs = [PagePair(i, 15 - i) for i in range(8)] + [PagePair(8, 0), PagePair(10, 1), PagePair(11, 3)]
    before = reader.buffer.copy()
    assert read(reader, reader.engine.connect(source.export), pairs) is TransferState.DONE
    assert_exactly(before, reader, source.slots, pairs)


def test_one_source_page_into_two_slots(kit: Kit) -> None:
    source, reader = kit.pool(4, 192, seed=1), kit.pool(4, 192, seed=2)
    pairs, before = [PagePair(2, 0), PagePair(2, 3)], reader.buffer.copy()
    assert read(reader, reader.engine.connect(source.export), pairs) is TransferState.DONE
    assert_exactly(before, reader, source.slots, pairs)


def test_two_peers_are_not_mixed_up(kit: Kit) -> None:
    one, other, reader = kit.pool(4, 192, seed=1), kit.pool(6, 192, seed=2), kit.pool(4, 192, seed=3)
    before = reader.buffer.copy()
    peers = [reader.engine.connect(pool.export) for pool in (one, other)]
    assert read(reader, peers[1], [PagePair(1, 0)]) is TransferState.DONE
    assert read(reader, peers[0], [PagePair(1, 1)]) is TransferState.DONE
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
    for address in ("", "{}", "[1]", "null", '{"pid": 1}', "127.0.0.1:1", "[" * 3_000, "[" * 100_000):
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
    assert read(reader, peer, [PagePair(0, 0)], 3_000) is not TransferState.DONE
    assert read(reader, reader.engine.connect(second.export), [PagePair(0, 0)]) is TransferState.DONE


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
            assert read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
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
        assert read(reader, peer, [PagePair(0, 0)], 3_000) is not TransferState.DONE
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
    assert read(reader, other, [PagePair(0, 0)]) is TransferState.DONE


def test_a_peer_of_another_engine_is_unknown(kit: Kit) -> None:
    source, one, other = kit.pool(8, 192), kit.pool(8, 192), kit.pool(8, 192)
    foreign = one.engine.connect(source.export)
    other.engine.connect(one.export)  # takes the same handle number
    with pytest.raises(TransferError):
        other.engine.read_pages(foreign, [PagePair(0, 0)])


def test_a_killed_peer_ends_transfers(process_kit: Kit) -> None:
    child, reader = process_kit.child(8, 192, seed=1), process_kit.pool(8, 192, seed=2)
    peer = reader.engine.connect(child.export)
    assert read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
    child.kill()
    started = time.monotonic()
    state = read(reader, peer, [PagePair(1, 1)], 3_000)
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
    transfer = reader.engine.read_pages(peer, random_pairs(1, 64, 64, 64))
    child.kill()
    assert transfer.wait(5_000) in (TransferState.FAILED, TransferState.TIMED_OUT)
    reader.engine.close()
    assert transfer.quiesced()


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
            if read(reader, peer, pairs) is not TransferState.DONE:
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
        assert read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
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


@pytest.mark.parametrize("kind", ["shm", "mooncake", "nixl", "nixl-tcp", "faulty"])
@pytest.mark.parametrize(("slot_bytes", "count"), [(192, 9), (1 << 20, 19)])
def test_body_sums_are_those_of_the_landed_bodies(kind: str, slot_bytes: int, count: int) -> None:
    with kit_of(kind) as kit:
        digester = Digester(b"0123456789abcdef", slot_bytes)
        source, reader = kit.pool(24, slot_bytes, seed=1), kit.pool(24, slot_bytes, seed=2, digester=digester)
        peer = reader.engine.connect(source.export)
        pairs = [*random_pairs(3, count, 24, 24)][: count - 3]
        transfer = reader.engine.read_pages(peer, pairs)
        assert transfer.wait(TIMEOUT_MS) is TransferState.DONE
        expected = digester.body_sums_many(source.slots, np.array([p.remote_page_id for p in pairs]))
        np.testing.assert_array_equal(transfer.body_sums, expected)


def test_without_a_digester_there_are_no_sums(kit: Kit) -> None:
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    transfer = reader.engine.read_pages(reader.engine.connect(source.export), [PagePair(0, 0)])
    transfer.wait(TIMEOUT_MS)
    assert transfer.body_sums is None
