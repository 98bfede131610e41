"""The guard under many threads, and what it leaves in a slot for the next owner: nothing."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore import allocator
from kvstore.errors import GenlockError, InvalidInput, NoCapacity
from kvstore.guard import Guard
from kvstore.ids import PageRef
from kvstore.layout import AttentionKind, HeadOrder, KvFormat, PageLayout
from kvstore.lifecycle import Slot, apply_event
from kvstore.pool import PoolStorage
from kvstore.step import PageRun
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from tests.support.kv_batch import RIGHT, Batch, guard_of, header_for
from tests.support.kv_world import (
    HEADER_BYTES,
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    T,
    body,
    fill,
    slot_bytes_of,
    values_of,
)

# --- what is left in a slot -------------------------------------------------------------------------------------------

LAYOUTS = {
    "gqa_none": LAYOUT,
    "gqa_int8": replace(LAYOUT, kv_format=KvFormat.INT8, layers=2),
    "gqa_fp16_odd": replace(LAYOUT, element="fp16", key_width=3, value_width=5, layers=3),
    "mla_int8": PageLayout("m", AttentionKind.MLA, 2, 1, 8, 2, T, KvFormat.INT8),
    "mla_bf16": PageLayout("m", AttentionKind.MLA, 2, 1, 8, 2, T, KvFormat.NONE, "bf16"),
}


def scribble(guard: Guard, page_id: int) -> None:
    guard._pool.slots_SU8[page_id] = np.random.default_rng(page_id).integers(1, 256, guard.layout.slot_bytes)


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("end", ["retire", "condemn", "quarantine"])
def test_scrubbing_leaves_no_byte(name: str, end: str) -> None:
    guard = guard_of(layout=LAYOUTS[name])
    refs = guard.allocate(OWNER, 8)
    for ref in refs:
        scribble(guard, ref.page_id)
    if end == "retire":
        guard.retire(refs, OWNER)
    elif end == "condemn":
        guard.condemn(refs)
    else:
        guard.hold(refs)
        guard.retire(refs, OWNER)
        assert slot_bytes_of(guard, 0) != bytes(guard.layout.slot_bytes)
        guard.prove(refs)
    assert guard.free_pages == 8
    assert all(slot_bytes_of(guard, i) == bytes(guard.layout.slot_bytes) for i in range(8))


def test_the_tag_moves_before_the_bytes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guard_of()
    (ref,) = guard.allocate(OWNER, 1)
    seen: list[tuple[int, bool]] = []
    real = PoolStorage.scrub

    def scrub(self: PoolStorage, page_id: int) -> None:
        seen.append((int(self.live_S2[page_id, 1]), page_id in guard._book._free))
        real(self, page_id)

    monkeypatch.setattr(PoolStorage, "scrub", scrub)
    guard.retire([ref], OWNER)
    assert seen == [(ref.tag.generation + 1, False)], "a reader of old bytes sees the new tag; nobody owns the slot yet"


def tail_mask(layout: PageLayout, rows: int) -> np.ndarray:
    """bool [slot_bytes]: bytes of a slot that belong to no valid row and to no header."""
    mask = np.ones(layout.slot_bytes, dtype=bool)
    mask[:HEADER_BYTES] = False
    for layer in range(layout.layers):
        base = HEADER_BYTES + layer * layout.layer_bytes
        for s in layout.streams:
            for at, width in ((s.codes_offset, s.width * layout.element_bytes), (s.scales_offset, 4)):
                if at == s.scales_offset and not s.scale_bytes:
                    continue
                part = mask[base + at : base + at + s.heads * T * width].reshape(s.heads, T, width)
                part[:, :rows] = False
    return mask


@pytest.mark.parametrize("name", list(LAYOUTS))
@pytest.mark.parametrize("rows", range(1, T + 1))
def test_a_sealed_page_shows_nothing_of_its_slots_former_owner(name: str, rows: int) -> None:
    """Also without scrubbing: rows without a token, the padding and the rest of the header are zeros."""
    guard = guard_of(1, scrub=False, layout=LAYOUTS[name])
    (ref,) = guard.allocate(OWNER, 1)
    scribble(guard, ref.page_id)
    guard.retire([ref], OWNER)
    (ref,) = guard.allocate(NEIGHBOUR, 1)
    before = np.frombuffer(slot_bytes_of(guard, 0), dtype=np.uint8)
    assert before.all(), "the former owner's bytes are there"
    desc = guard.seal(ref, NEIGHBOUR, header_for(guard, ref, rows=rows), 0)
    after = np.frombuffer(slot_bytes_of(guard, 0), dtype=np.uint8)
    mask = tail_mask(guard.layout, rows)
    assert not after[mask].any()
    kept = ~mask
    kept[:HEADER_BYTES] = False
    assert (after[kept] == before[kept]).all(), "valid rows are not touched"
    assert after[:HEADER_BYTES].tobytes() == desc.header.pack()


def test_token_major_tails_are_zeroed_too() -> None:
    layout = replace(LAYOUT, order=HeadOrder.TOKEN_MAJOR)
    storage = PoolStorage(layout, 1, MemoryEngine(MemoryFabric(), "x").allocate(1, layout.slot_bytes))
    storage.slots_SU8[:] = 7
    storage.zero_tail(0, 1)
    kept = 2 * layout.kv_heads * layout.key_width * 4
    assert int((storage.slots_SU8[0, HEADER_BYTES:] == 7).sum()) == kept


def test_the_engines_buffer_must_hold_the_pool() -> None:
    with pytest.raises(InvalidInput):
        PoolStorage(LAYOUT, 2, np.zeros(100, dtype=np.uint8))


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(*works: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(w,)) for w in works]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


class YieldingCounter(Counter[str]):
    """Lets another thread run between the look at a count and its change."""

    def __getitem__(self, name: str) -> int:
        value = super().__getitem__(name)
        time.sleep(0)
        return value


@pytest.mark.usefixtures("busy_switching")
def test_counting_from_many_threads_loses_nothing() -> None:
    guard = guard_of()
    guard.counters = YieldingCounter()

    def count() -> None:
        for _ in range(200):
            guard.count("x")

    in_threads(*[count] * 4)
    assert guard.counters["x"] == 800


@pytest.mark.usefixtures("busy_switching")
def test_the_book_survives_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads get their turn in the middle of every event."""

    def slow_event(*args: Any, **named: Any) -> Slot:
        time.sleep(0)
        return apply_event(*args, **named)

    monkeypatch.setattr(allocator, "apply_event", slow_event)
    guard = guard_of(6)
    (common,) = guard.allocate(9, 1)
    guard.seal(common, 9, header_for(guard, common), 0)

    def live(owner: int) -> Callable[[], None]:
        rng = random.Random(owner)

        def work() -> None:
            for _ in range(60):
                try:
                    refs = guard.allocate(owner, rng.randint(1, 3))
                except NoCapacity:
                    continue
                for ref in refs:
                    fill(guard, ref, [owner] * T)
                    guard.seal(ref, owner, header_for(guard, ref), 0)
                guard.share([*refs, common])
                guard.lease([common])
                guard.hold([common])
                assert all(values_of(guard, r.page_id) == [owner] * T for r in refs), "a page with two owners"
                guard.unshare([common])
                guard.release([common])
                guard.prove([common])
                if rng.random() < 0.5:
                    guard.condemn(refs)
                    guard.unshare(refs)
                else:
                    guard.unshare(refs)
                    guard.retire(refs, owner)

        return work

    in_threads(*[live(owner) for owner in range(1, 5)])
    guard.retire([common], 9)
    assert guard.counts().free == guard.free_pages == 6


@pytest.mark.usefixtures("busy_switching")
@pytest.mark.parametrize("seed", range(4))
def test_steps_while_others_take_pages_away(seed: int) -> None:
    """A row is answered right or not at all, and no step writes into a page that it has lost."""
    guard = guard_of(10)
    rng = random.Random(seed)
    running = threading.Event()
    running.set()
    victims: list[tuple[int, PageRun]] = []
    foreign_writes: list[object] = []
    lock = threading.Lock()

    def churn() -> None:
        while running.is_set():
            with lock:
                owner, run = victims[-1] if victims else (0, PageRun(()))
            for ref in rng.sample(run.refs, len(run.refs)):
                try:
                    guard.retire([ref], owner)
                except GenlockError:
                    continue
                try:
                    taken = guard.allocate(99, 1)
                except NoCapacity:
                    continue
                fill(guard, taken[0], [500.0] * T)
                looks = [values_of(guard, taken[0].page_id) for _ in range(20)]
                foreign_writes.extend(look for look in looks if look != [500.0] * T)
                guard.retire(taken, 99)

    outcomes = {"right": 0, "refused": 0}

    def steps() -> None:
        try:
            for n in range(60):
                batch = Batch(guard)
                with lock:
                    victims.append((OWNER, batch.mine))
                mine, theirs = batch.run()
                assert theirs == RIGHT[1], "the neighbour"
                assert isinstance(mine, str) or mine == RIGHT[0], f"step {n} answered {mine}"
                outcomes["refused" if isinstance(mine, str) else "right"] += 1
                with lock:
                    victims.clear()
                for ref in (*batch.mine.refs, *batch.theirs.refs):
                    guard.condemn([ref])
        finally:
            running.clear()

    in_threads(steps, churn)
    assert not foreign_writes
    assert sum(outcomes.values()) == 60
    assert guard.counts().free == 10


def test_no_ref_is_live_outside_the_pool() -> None:
    guard = guard_of()
    (ref,) = guard.allocate(OWNER, 1)
    assert guard.is_live(ref)
    for page_id in (-8 + ref.page_id, 8, 1 << 40):
        assert not guard.is_live(PageRef(page_id, ref.tag))
        with pytest.raises(InvalidInput):
            guard.slot_state(page_id)
    assert guard.condemn([PageRef(-8 + ref.page_id, ref.tag)]) == 0
    assert guard.is_live(ref)
    assert body(slot_bytes_of(guard, 0)) == bytes(LAYOUT.slot_bytes - HEADER_BYTES)
