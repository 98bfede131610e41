"""The guard: steps that end rows and spare neighbours, pages that are sealed and described, many threads at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvstore.digest import Digester
from kvstore.errors import CorruptPage, GenlockError, InvalidInput, LifecycleError, NoCapacity, StalePage
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef, Tag
from kvstore.layout import HeadOrder, KvFormat, PageLayout
from kvstore.lifecycle import SlotState
from kvstore.step import PageRun, PlanRow, StepArrays, StepPlan
from kvstore.tables import FLAG_KERNEL_READ, FLAG_NONFINITE
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from tests.support.kv_batch import MINE, RIGHT, Batch, guard_of, header_for
from tests.support.kv_world import (
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    SECRET,
    Moments,
    T,
    fill,
    make_keyer,
    run_step,
    seal_prompt,
    slot_bytes_of,
    values_of,
)

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
