"""The guard: steps that end rows and spare neighbours, pages that are sealed and described, many threads at once."""

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
from kvstore.digest import Digester
from kvstore.errors import CorruptPage, GenlockError, InvalidInput, LifecycleError, NoCapacity, StalePage
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef, Tag
from kvstore.layout import AttentionKind, HeadOrder, KvFormat, PageLayout
from kvstore.lifecycle import Slot, SlotState, apply_event
from kvstore.pool import PoolStorage
from kvstore.step import PageRun, PlanRow, StepArrays, StepPlan
from kvstore.tables import FLAG_KERNEL_READ, FLAG_NONFINITE
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from tests.support.kv_world import (
    HEADER_BYTES,
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    SECRET,
    Moments,
    T,
    body,
    fill,
    history,
    make_guard,
    make_keyer,
    next_token,
    run_step,
    seal_prompt,
    slot_bytes_of,
    values_of,
)

MINE, THEIRS = [10, 11, 12, 13, 14], [70, 71, 72, 73, 74]


def guard_of(slots: int = 8, *, scrub: bool = True, layout: PageLayout = LAYOUT) -> Guard:
    return make_guard(MemoryEngine(MemoryFabric(), "pool"), 22, layout, slots, scrub=scrub)


class Batch:
    """Two requests of five tokens, about to get their sixth."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.mine, self.theirs = history(guard, OWNER, MINE), history(guard, NEIGHBOUR, THEIRS)
        self.plan = StepPlan(
            1, (next_token(OWNER, MINE, 15, self.mine), next_token(NEIGHBOUR, THEIRS, 75, self.theirs))
        )

    def run(self, moments: Moments | None = None) -> tuple[object, object]:
        """(answer or reason) of both."""
        published = run_step(self.guard, self.plan, moments)
        return tuple(p.error.reason if p.error else p.output for p in (published[OWNER], published[NEIGHBOUR]))  # type: ignore[return-value]


RIGHT = (pytest.approx(12.5), pytest.approx(72.5))


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_healthy_step_answers_both_and_frees_its_holds() -> None:
    batch = Batch(guard_of())
    assert batch.run() == RIGHT
    assert [batch.guard._book.slot(r.page_id).holds for r in (*batch.mine.refs, *batch.theirs.refs)] == [0] * 4
    assert values_of(batch.guard, batch.mine.refs[1].page_id)[:2] == [14, 15]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("when", ["before", "before_write", "before_attend", "after_compare", "before_exit"])
@pytest.mark.parametrize("how", ["retire", "condemn"])
def test_a_page_that_goes_at_any_moment_ends_its_row_alone(which: int, when: str, how: str) -> None:
    batch = Batch(guard_of())
    ref = batch.mine.refs[which]

    def go(row: int = 0) -> None:
        if row == 0 and batch.guard.is_live(ref):
            batch.guard.retire([ref], OWNER) if how == "retire" else batch.guard.condemn([ref])

    if when == "before":
        go()
        mine, theirs = batch.run()
    else:
        mine, theirs = batch.run(Moments(**{when: go}))
    assert theirs == RIGHT[1]
    assert mine in ("stale_at_entry", "stale_write", "stale_in_kernel", "stale_at_exit")
    assert batch.guard.counters[f"refused_{mine}"] == 1
    assert batch.guard.counts().quarantined == 0, "the step's own holds have ended"
    assert batch.guard.counts().total == 8


def test_a_page_given_back_within_a_step_waits_for_its_end() -> None:
    batch = Batch(guard_of(4))
    guard = batch.guard
    with guard.step(batch.plan) as step:
        guard.retire([batch.mine.refs[1]], OWNER)
        assert guard.slot_state(batch.mine.refs[1].page_id) is SlotState.QUARANTINED
        with pytest.raises(NoCapacity):
            guard.allocate(3, 1)
        assert [p.error is None for p in step.publish([(OWNER, 0), (NEIGHBOUR, 0)])] == [False, True]
    assert guard.free_pages == 1


def test_holds_end_when_a_step_breaks() -> None:
    batch = Batch(guard_of())
    with pytest.raises(ZeroDivisionError), batch.guard.step(batch.plan):
        raise ZeroDivisionError
    assert batch.run() == RIGHT


def test_two_steps_cannot_write_one_page_at_once() -> None:
    batch = Batch(guard_of())
    with batch.guard.step(batch.plan) as outer:
        assert batch.run() == ("stale_write", "stale_write")
        assert all(p.error is None for p in outer.publish([(OWNER, 0), (NEIGHBOUR, 0)]))


def test_a_page_that_an_engine_may_still_write_is_not_written() -> None:
    batch = Batch(guard_of())
    batch.guard.hold([batch.mine.refs[1]])
    assert batch.run() == ("stale_write", RIGHT[1])
    batch.guard.prove([batch.mine.refs[1]])
    assert batch.run() == RIGHT


@pytest.mark.parametrize("bad", ["no_pages", "far", "negative", "empty", "twice", "forged"])
def test_a_row_that_cannot_be_right_spares_its_neighbour(bad: str) -> None:
    batch = Batch(guard_of())
    mine, theirs = batch.plan.rows
    rows = {
        "no_pages": replace(mine, pages=PageRun(())),
        "far": replace(mine, first_position=1 << 20),
        "negative": replace(mine, first_position=-1),
        "empty": replace(mine, token_ids=()),
        "forged": replace(mine, pages=PageRun((mine.pages.refs[0], PageRef(-1, mine.pages.refs[1].tag)))),
        "twice": mine,
    }
    extra = (PlanRow(OWNER, (15,), 4, batch.mine),) if bad == "twice" else ()
    plan = StepPlan(1, (rows[bad], theirs, *extra))
    with batch.guard.step(plan) as step:
        published = step.publish([(row.request_no, 1.0) for row in plan.rows])
    errors = [p.error for p in published]
    assert errors[1] is None
    assert all(isinstance(e, StalePage) for i, e in enumerate(errors) if i != 1)


def swap_tables(arrays: StepArrays) -> None:
    for name in ("page_ids_BP", "expected_BP2", "slot_N", "write_expected_N2"):
        array = getattr(arrays, name)
        array[:] = array[::-1].copy()


def test_rows_that_disagree_on_entry_write_nothing() -> None:
    batch = Batch(guard_of())
    pages = [r.page_id for r in (*batch.mine.refs, *batch.theirs.refs)]
    before = [slot_bytes_of(batch.guard, p) for p in pages]
    assert batch.run(Moments(on_arrays=swap_tables)) == ("rows_disagree", "rows_disagree")
    assert [slot_bytes_of(batch.guard, p) for p in pages] == before
    assert batch.run() == RIGHT


@pytest.mark.parametrize("when", ["before_write", "before_attend", "before_exit"])
def test_rows_that_come_to_disagree_within_the_step_are_not_answered(when: str) -> None:
    batch = Batch(guard_of())
    seen: list[StepArrays] = []

    def swap() -> None:
        seen[0].logits_at_R[:] = seen[0].logits_at_R[::-1].copy()

    assert batch.run(Moments(on_arrays=seen.append, **{when: swap})) == ("rows_disagree", "rows_disagree")  # type: ignore[arg-type]


@pytest.mark.parametrize(("outputs", "answered"), [
    ([(OWNER, 1), (NEIGHBOUR, 2)], [1, 2]),
    ([(NEIGHBOUR, 2), (OWNER, 1)], [None, None]),
    ([(OWNER, 1), (OWNER, 2)], [1, None]),
    ([(3, 1), (NEIGHBOUR, 2)], [None, 2]),
    ([(OWNER, 1)], [None, None]),
    ([(OWNER, 1), (NEIGHBOUR, 2), (3, 3)], [None, None]),
    ([], [None, None]),
])  # fmt: skip
def test_outputs_are_given_by_number_and_in_order(outputs: list[tuple[int, int]], answered: list[int | None]) -> None:
    batch = Batch(guard_of())
    with batch.guard.step(batch.plan) as step:
        published = step.publish(outputs)
    assert [p.request_no for p in published] == [OWNER, NEIGHBOUR]
    assert [p.output for p in published] == answered
    assert [p.error is None for p in published] == [a is not None for a in answered]
    assert all(p.error is None or p.error.reason == "rows_disagree" for p in published)


def test_rows_without_logits_have_no_output_and_no_error() -> None:
    batch = Batch(guard_of())
    mine, theirs = batch.plan.rows
    plan = StepPlan(1, (replace(mine, wants_logits=False), theirs))
    published = run_step(batch.guard, plan)
    assert (published[OWNER].output, published[OWNER].error) == (None, None)
    assert published[NEIGHBOUR].output == RIGHT[1]


def test_flags_of_kernels_become_errors_in_the_order_of_causes() -> None:
    batch = Batch(guard_of())
    with batch.guard.step(batch.plan) as step:
        step.read.flags_B[0] |= FLAG_NONFINITE | FLAG_KERNEL_READ
        step.write.flags_B[1] |= FLAG_KERNEL_READ
        published = step.publish([(OWNER, 1), (NEIGHBOUR, 2)])
    assert isinstance(published[0].error, CorruptPage)
    assert published[0].error.reason == "nonfinite_kv"
    assert published[1].error is not None
    assert published[1].error.reason == "stale_in_kernel"
    assert [p.output for p in published] == [None, None]


def test_an_empty_step_publishes_nothing() -> None:
    with guard_of().step(StepPlan(1, ())) as step:
        assert step.publish([]) == []


def test_steps_are_counted() -> None:
    batch = Batch(guard_of())
    batch.run()
    counters = batch.guard.counters
    assert counters["read_entry"] == counters["read_exit"] == counters["read_kernel"] == 4
    assert counters["write_rows"] == 2


# --- sealing and describing -------------------------------------------------------------------------------------------


def header_for(guard: Guard, ref: PageRef, index: int = 0, rows: int = T) -> PageHeader:
    return PageHeader(ref.tag, guard.layout.fingerprint, index * T, rows, bytes(range(32)))


WRONG_HEADERS: dict[str, Callable[[PageHeader], PageHeader]] = {
    "tag": lambda h: replace(h, tag=Tag(h.tag.incarnation, h.tag.generation + 2)),
    "layout_fingerprint": lambda h: replace(h, layout_fingerprint=h.layout_fingerprint + 1),
    "first_position": lambda h: replace(h, first_position=T),
    "valid_rows": lambda h: replace(h, valid_rows=T + 1),
    "prefix_key": lambda h: replace(h, prefix_key=b"short"),
}


@pytest.mark.parametrize("name", list(WRONG_HEADERS))
def test_a_header_that_is_not_the_pages_own_is_refused_and_nothing_changed(name: str) -> None:
    guard = guard_of()
    (ref,) = guard.allocate(OWNER, 1)
    fill(guard, ref, [1, 2, 3, 4])
    before = slot_bytes_of(guard, ref.page_id)
    with pytest.raises(LifecycleError) as caught:
        guard.seal(ref, OWNER, WRONG_HEADERS[name](header_for(guard, ref)), 0)
    assert caught.value.field == f"header.{name}"
    assert slot_bytes_of(guard, ref.page_id) == before
    assert guard.slot_state(ref.page_id) is SlotState.OPEN
    guard.seal(ref, OWNER, header_for(guard, ref), 0)


@pytest.mark.parametrize("rows", [0, -1, 1 << 40])
def test_impossible_row_counts_are_refused(rows: int) -> None:
    guard = guard_of()
    (ref,) = guard.allocate(OWNER, 1)
    with pytest.raises(LifecycleError):
        guard.seal(ref, OWNER, header_for(guard, ref, rows=rows), 0)


@pytest.mark.parametrize("case", ["foreign", "sealed", "stale", "beyond", "negative"])
def test_only_the_owner_seals_an_open_page_once(case: str) -> None:
    guard = guard_of()
    (ref,) = guard.allocate(OWNER, 1)
    owner, named = OWNER, ref
    if case == "foreign":
        owner = NEIGHBOUR
    elif case == "sealed":
        guard.seal(ref, OWNER, header_for(guard, ref), 0)
    elif case == "stale":
        guard.retire([ref], OWNER)
    else:
        named = PageRef({"beyond": 8, "negative": ref.page_id - 8}[case], ref.tag)
    before = [slot_bytes_of(guard, i) for i in range(8)]
    with pytest.raises(GenlockError):
        guard.seal(named, owner, header_for(guard, named), 0)
    assert [slot_bytes_of(guard, i) for i in range(8)] == before
    assert guard.counters["sealed"] == (case == "sealed")


def test_a_sealed_page_is_described_as_it_was_sealed() -> None:
    guard = guard_of()
    descs = seal_prompt(guard, make_keyer(), MINE)
    assert [guard.describe(d.ref, d.logical_index) for d in descs] == descs


@pytest.mark.parametrize("case", ["open", "retired", "condemned", "header"])
def test_what_cannot_be_described(case: str) -> None:
    guard = guard_of()
    (desc,) = seal_prompt(guard, make_keyer(), MINE[:T])
    ref, error = desc.ref, StalePage
    if case == "open":
        (ref,), error = guard.allocate(OWNER, 1), LifecycleError  # type: ignore[assignment]
    elif case == "retired":
        guard.retire([ref], OWNER)
    elif case == "condemned":
        guard.share([ref])
        guard.condemn([ref])
    else:
        guard._pool.slots_SU8[ref.page_id, 20] ^= 1
    with pytest.raises(error):
        guard.describe(ref, 0)


class SlowDigester(Digester):
    """Something happens while a page is digested."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def body_sums(self, slot_U8: np.ndarray) -> np.ndarray:
        sums = super().body_sums(slot_U8)
        self.meanwhile()
        return sums


@pytest.mark.parametrize("call", ["seal", "describe"])
def test_a_page_condemned_while_it_is_digested_gets_no_descriptor(call: str) -> None:
    digester = SlowDigester(SECRET, LAYOUT.slot_bytes)
    guard = Guard(LAYOUT, 4, MemoryEngine(MemoryFabric(), "pool"), 22, digester)
    (ref,) = guard.allocate(OWNER, 1)
    if call == "describe":
        guard.seal(ref, OWNER, header_for(guard, ref), 0)
    digester.meanwhile = lambda: guard.condemn([ref])
    work = {
        "seal": lambda: guard.seal(ref, OWNER, header_for(guard, ref), 0),
        "describe": lambda: guard.describe(ref, 0),
    }
    with pytest.raises(StalePage):
        work[call]()


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
    assert after[:HEADER_BYTES].tobytes() == desc.header().pack()


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


# --- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "slot_bytes", "field"), [
    (replace(LAYOUT, kv_format=KvFormat.FP8), 0, "kv_format"),
    (replace(LAYOUT, kv_format=KvFormat.INT4), 0, "kv_format"),
    (replace(LAYOUT, order=HeadOrder.TOKEN_MAJOR), 0, "layout.order"),
    (LAYOUT, 64, "digest.slot_bytes"),
])  # fmt: skip
def test_what_no_kernel_serves_is_refused(layout: PageLayout, slot_bytes: int, field: str) -> None:
    engine = MemoryEngine(MemoryFabric(), "pool")
    with pytest.raises(InvalidInput) as caught:
        Guard(layout, 2, engine, 1, Digester(SECRET, layout.slot_bytes + slot_bytes))
    assert caught.value.field == field


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
