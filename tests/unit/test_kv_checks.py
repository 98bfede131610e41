"""For every check one fault that it alone catches: with it on a typed error, with it off the wrong thing happens.

A scenario gets the checks, plays its fault and returns the wrong thing that came of it, in words; or it raises the
typed error. Where a later check would also stop the fault, `backups` names those and they are off in both runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from decode.handoff import Accepted, Completed, HandoffReceiver, PagePromised
from kvstore.checks import ALL_CHECKS, Checks, check_names
from kvstore.errors import (
    CorruptPage,
    GenlockError,
    LayoutMismatch,
    NoCapacity,
    PagePinned,
    StalePage,
    TransferTimeout,
    Unavailable,
)
from kvstore.guard import Guard
from kvstore.ids import PageRef
from kvstore.step import PageRun, PlanRow, StepArrays, StepPlan
from kvstore.transfer.faults import BitFlip, Ending, FaultHooks, TransferFaults
from kvstore.transfer.memory import MemoryEngine
from tests.support.kv_world import (
    HEADER_BYTES,
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    Moments,
    T,
    World,
    fill,
    history,
    make_guard,
    next_token,
    run_step,
    seal_prompt,
    values_of,
)

TOKENS = [10, 11, 12, 13, 14, 15]
OTHERS = [70, 71, 72, 73, 74, 75]


@dataclass(frozen=True)
class Scenario:
    play: Callable[[Checks], str]
    error: type[GenlockError]
    reason: str
    backups: tuple[str, ...] = ()


SCENARIOS: dict[str, list[Scenario]] = {}


def isolates(name: str, error: type[GenlockError], reason: str, *backups: str):  # type: ignore[no-untyped-def]
    def add(play: Callable[[Checks], str]) -> Callable[[Checks], str]:
        SCENARIOS.setdefault(name, []).append(Scenario(play, error, reason, backups))
        return play

    return add


# --- handoff --------------------------------------------------------------------------------------------------------


class Attempt:
    """Decode's side of a handoff of two pages. The first token is a number."""

    def __init__(self, checks: Checks) -> None:
        self.world = World(checks)
        self.descs = self.world.prompt(TOKENS)
        self.local = self.world.sink.allocate(OWNER, 2)
        self.receiver: HandoffReceiver[int] = HandoffReceiver(
            b"ticket", LAYOUT, self.world.expected(TOKENS), self.local, checks
        )
        self.receiver.on_event(Accepted(b"handoff", b"ticket", self.world.source.export, 1000))

    def promise(self, index: int, handoff_id: bytes = b"handoff") -> None:
        order = self.receiver.on_event(PagePromised(handoff_id, self.descs[index]))
        if order is not None:
            self.world.receiver.pull(self.world.peer, [order], OWNER, self.receiver.expected, 100)
            self.receiver.verified((order,))

    def complete(self, first: int, pages: int = 2, handoff_id: bytes = b"handoff") -> None:
        self.receiver.on_event(Completed(handoff_id, pages, first, 0, 0))


@isolates("handoff_id", StalePage, "unknown_handoff")
def the_end_of_another_handoff(checks: Checks) -> str:
    """All pages are our own and proved; the first token is another request's."""
    attempt = Attempt(checks)
    attempt.promise(0)
    attempt.promise(1)
    attempt.complete(first=666, handoff_id=b"other")
    done = attempt.receiver.completed
    return "took another request's first token" if attempt.receiver.ready and done and done.first == 666 else ""


@isolates("exact_set", StalePage, "duplicate_page")
def one_page_twice_and_another_never(checks: Checks) -> str:
    attempt = Attempt(checks)
    attempt.promise(0)
    attempt.promise(0)
    attempt.complete(first=1)
    missing = values_of(attempt.world.sink, attempt.local[1].page_id) != [14, 15, 0, 0]
    return "ready without its second page" if attempt.receiver.ready and missing else ""


@isolates("exact_set", StalePage, "pages_missing")
def fewer_pages_than_the_prompt_has(checks: Checks) -> str:
    attempt = Attempt(checks)
    attempt.promise(1)
    attempt.complete(first=1, pages=1)
    return "ready without its first page" if attempt.receiver.ready else ""


@isolates("stream_end", Unavailable, "handoff_cut")
def a_stream_that_ends_before_the_first_token(checks: Checks) -> str:
    attempt = Attempt(checks)
    attempt.promise(0)
    attempt.promise(1)
    attempt.receiver.on_end(None)
    return "over without a first token" if attempt.receiver.ready and attempt.receiver.completed is None else ""


# --- receipt --------------------------------------------------------------------------------------------------------


@isolates("bounds", CorruptPage, "page_out_of_bounds")
def read_beyond_the_pool(checks: Checks) -> str:
    """The engine does not look either, and reads what lies there. What arrived is refused all the same."""
    world = World(checks, TransferFaults(wrap_out_of_range=True))
    (desc, _) = world.prompt(TOKENS)
    local = world.sink.allocate(OWNER, 1)
    outside = replace(desc, ref=PageRef(desc.ref.page_id + world.slots, desc.ref.tag))
    try:
        world.pull([outside], TOKENS, local=local)
    except StalePage:  # the source has no live tag for such a page
        landed = values_of(world.sink, local[0].page_id)
        return "memory outside the pool was read" if landed == TOKENS[:T] else ""
    return "adopted"


@isolates("incarnation", StalePage, "stale_incarnation")
def a_page_of_another_life_over_an_old_connection(checks: Checks) -> str:
    world = World(checks, TransferFaults(follow_restart=True))
    world.prompt(OTHERS)
    world.fabric.kill("prefill")
    reborn = make_guard(MemoryEngine(world.fabric, "prefill"), 12)
    descs = seal_prompt(reborn, world.keyer, TOKENS)
    refs = world.pull(descs, TOKENS)
    assert world.peer.export.incarnation == 11
    right = values_of(world.sink, refs[0].page_id) == TOKENS[:T]
    return "adopted from a life that was never connected" if right else ""


@isolates("layout", LayoutMismatch, "descriptor_layout")
def pages_of_another_element_type(checks: Checks) -> str:
    ours = replace(LAYOUT, element="bf16")
    world = World(checks, source_layout=replace(LAYOUT, element="fp16"), layout=ours)
    assert world.source.layout.slot_bytes == ours.slot_bytes
    refs = world.pull(world.prompt(TOKENS[:T]), TOKENS[:T])
    wrong = values_of(world.sink, refs[0].page_id) != TOKENS[:T] == values_of(world.source, 0)
    return "adopted bytes that mean other numbers" if wrong else ""


@isolates("header", StalePage, "header_mismatch")
def a_page_that_says_another_position_than_its_descriptor(checks: Checks) -> str:
    world = World(checks)
    key = world.expected(TOKENS[:T]).keys[0]
    (ref,) = world.source.allocate(OWNER, 1)
    fill(world.source, ref, TOKENS[:T])
    header = world.prompt(TOKENS)[1].header
    sealed = world.source.seal(ref, OWNER, replace(header, tag=ref.tag, valid_rows=T, prefix_key=key), 1)
    refs = world.pull([replace(sealed, logical_index=0, first_position=0)], TOKENS[:T])
    assert sealed.first_position == T
    return "adopted keys that were rotated for other positions" if world.sink.is_live(refs[0]) else ""


@isolates("header", StalePage, "page_misplaced")
def a_descriptor_that_says_another_position_than_its_place(checks: Checks) -> str:
    world = World(checks)
    key = world.expected(TOKENS[:T]).keys[0]
    (ref,) = world.source.allocate(OWNER, 1)
    header = replace(world.prompt(TOKENS)[1].header, tag=ref.tag, valid_rows=T, prefix_key=key)
    sealed = world.source.seal(ref, OWNER, header, 1)
    refs = world.pull([replace(sealed, logical_index=0)], TOKENS[:T])
    landed = world.sink.landed_header(refs[0])
    return "adopted for place 0, says position 4" if landed and landed.first_position == T else ""


@isolates("prefix_key", StalePage, "foreign_prefix_key")
def a_sound_page_of_another_prompt(checks: Checks) -> str:
    world = World(checks)
    refs = world.pull(world.prompt(OTHERS), TOKENS)
    return "another prompt's page" if values_of(world.sink, refs[0].page_id) == OTHERS[:T] else ""


@isolates("prefix_key", StalePage, "foreign_prefix_key")
def a_sound_page_of_another_tenant(checks: Checks) -> str:
    world = World(checks)
    refs = world.pull(world.prompt(TOKENS, tenant="other"), TOKENS)
    return "another tenant's page" if values_of(world.sink, refs[0].page_id) == TOKENS[:T] else ""


@isolates("digest", CorruptPage, "digest_mismatch")
def one_flipped_bit(checks: Checks) -> str:
    world = World(checks, TransferFaults(bit_flips=(BitFlip(0, HEADER_BYTES + LAYOUT.streams[1].codes_offset + 3, 6),)))
    refs = world.pull(world.prompt(TOKENS), TOKENS)
    return "adopted other values" if values_of(world.sink, refs[0].page_id) != TOKENS[:T] else ""


@isolates("digest", CorruptPage, "digest_mismatch")
def a_torn_page(checks: Checks) -> str:
    """The source's slot gets its next content in the middle of the copy, and its old tag back: nobody else can see."""

    def tear(pair: object) -> None:
        fill(world.source, descs[0].ref, OTHERS[:T])

    world = World(checks, TransferFaults(torn_page=0), hooks=FaultHooks(between_halves=tear))
    descs = world.prompt(TOKENS[:T])
    refs = world.pull(descs, TOKENS[:T])
    return "adopted half of each" if values_of(world.sink, refs[0].page_id) == OTHERS[:T] else ""


@isolates("source_tag", StalePage, "source_moved_on")
def a_page_that_was_taken_back_while_it_was_read(checks: Checks) -> str:
    def take_back(pairs: object) -> None:
        world.source.retire([d.ref for d in descs], OWNER)

    world = World(checks, hooks=FaultHooks(before_copy=take_back), scrub=False)
    descs = world.prompt(TOKENS)
    refs = world.pull(descs, TOKENS)
    gone = not any(world.source.is_live(d.ref) for d in descs)
    return "adopted a page that its owner had freed" if gone and world.sink.is_live(refs[0]) else ""


# --- steps ----------------------------------------------------------------------------------------------------------


class Bench:
    """One pool with a request of four tokens behind it and a healthy neighbour in the same batch."""

    def __init__(self, checks: Checks, slots: int = 5) -> None:
        self.world = World(checks, slots=slots)
        self.guard: Guard = self.world.sink
        self.mine = history(self.guard, OWNER, TOKENS[:T])
        self.theirs = history(self.guard, NEIGHBOUR, OTHERS[:T])
        self.plan = StepPlan(
            1, (next_token(OWNER, TOKENS[:T], 14, self.mine), next_token(NEIGHBOUR, OTHERS[:T], 74, self.theirs))
        )

    def give_away(self, ref: PageRef, owner: int = OWNER, value: float = 500.0) -> None:
        """The page goes back and another request gets the slot and fills it."""
        self.guard.retire([ref], owner)
        (other,) = [r for r in self.guard.allocate(3, self.guard.free_pages) if r.page_id == ref.page_id]
        fill(self.guard, other, [value] * T)

    def run(self, moments: Moments | None = None, *, neighbour: bool = True) -> float:
        published = run_step(self.guard, self.plan, moments)
        if neighbour:
            assert published[NEIGHBOUR].error is None
            assert published[NEIGHBOUR].output == pytest.approx(72.0), "the neighbour finishes, and right"
        mine = published[OWNER]
        if mine.error is not None:
            assert mine.output is None
            raise mine.error
        assert mine.output is not None
        return mine.output


RIGHT = 12.0  # mean of 10..14
FOREIGN = (4 * 500 + 14) / 5


def foreign(answer: float) -> str:
    return "answered from a foreign page" if answer == pytest.approx(FOREIGN) else ""


def test_the_bench_answers_right_when_nothing_is_wrong() -> None:
    assert Bench(ALL_CHECKS).run() == pytest.approx(RIGHT)


@isolates("entry", StalePage, "stale_at_entry", "kernel", "exit")
def a_page_that_moved_on_before_the_step(checks: Checks) -> str:
    bench = Bench(checks)
    bench.give_away(bench.mine.refs[0])
    return foreign(bench.run())


@isolates("kernel", StalePage, "stale_in_kernel", "exit")
def a_page_that_moves_on_before_the_kernel(checks: Checks) -> str:
    bench = Bench(checks)
    return foreign(bench.run(Moments(before_attend=lambda: bench.give_away(bench.mine.refs[0]))))


@isolates("exit", StalePage, "stale_at_exit")
def a_page_that_moves_on_between_comparison_and_load(checks: Checks) -> str:
    bench = Bench(checks)
    moves = Moments(after_compare=lambda row: bench.give_away(bench.mine.refs[0]) if row == 0 else None)
    return foreign(bench.run(moves))


@isolates("rows", StalePage, "rows_disagree")
def tokens_of_two_rows_change_places(checks: Checks) -> str:
    def swap(arrays: StepArrays) -> None:
        arrays.token_ids_N[:] = arrays.token_ids_N[::-1].copy()

    answer = Bench(checks).run(Moments(on_arrays=swap), neighbour=False)
    return "answered from the neighbour's token" if answer == pytest.approx((10 + 11 + 12 + 13 + 74) / 5) else ""


@isolates("rows", StalePage, "rows_disagree")
def tables_of_two_rows_change_places(checks: Checks) -> str:
    """Pages, tags and write slots move together: every tag is right, and every page is the neighbour's."""

    def swap(arrays: StepArrays) -> None:
        for name in ("page_ids_BP", "expected_BP2", "slot_N", "write_expected_N2"):
            array = getattr(arrays, name)
            array[:] = array[::-1].copy()

    answer = Bench(checks).run(Moments(on_arrays=swap), neighbour=False)
    return "answered from the neighbour's pages" if answer == pytest.approx((70 + 71 + 72 + 73 + 14) / 5) else ""


@isolates("rows", StalePage, "rows_disagree")
def logits_of_two_rows_change_places(checks: Checks) -> str:
    def swap(arrays: StepArrays) -> None:
        arrays.logits_at_R[:] = arrays.logits_at_R[::-1].copy()

    answer = Bench(checks).run(Moments(on_arrays=swap), neighbour=False)
    return "got the neighbour's answer" if answer == pytest.approx(72.0) else ""


@isolates("rows", StalePage, "rows_disagree")
def flags_that_are_put_to_another_row(checks: Checks) -> str:
    """The write kernel sees the stale page and blames the row that it is told: here the neighbour."""
    bench = Bench(checks.without("exit"))
    plan = bench.plan

    def blame(arrays: StepArrays) -> None:
        arrays.row_N[:] = arrays.row_N[::-1].copy()

    published = run_step(
        bench.guard,
        plan,
        Moments(on_arrays=blame, before_write=lambda: bench.guard.retire([bench.theirs.refs[1]], NEIGHBOUR)),
    )
    error = published[OWNER].error
    assert error is not None
    if error.reason == "stale_write":
        return "a healthy row was failed for its neighbour"
    raise error


@isolates("write", StalePage, "stale_write")
def a_write_to_a_sealed_page(checks: Checks) -> str:
    """The row owns the page and its tag is right, but others read it by now and its digest is known."""
    bench = Bench(checks)
    sealed = bench.mine.refs[0]
    bench.guard.share([sealed])
    row = PlanRow(OWNER, (99,), 3, PageRun((sealed,)))
    bench.plan = StepPlan(1, (row, bench.plan.rows[1]))
    bench.run()
    return "a sealed page was overwritten" if values_of(bench.guard, sealed.page_id)[3] == 99 else ""


@isolates("write", StalePage, "stale_write")
def a_write_to_somebody_elses_page(checks: Checks) -> str:
    """A scheduler that mixes up two refs: tags are right, the page is another request's."""
    bench = Bench(checks)
    theirs = bench.theirs.refs[1]
    bench.plan = StepPlan(
        1, (next_token(OWNER, TOKENS[:T], 14, PageRun((bench.mine.refs[0], theirs))), bench.plan.rows[1])
    )
    bench.run(neighbour=False)
    return "two requests wrote one page" if bench.guard.is_live(theirs) else ""


@isolates("write", StalePage, "stale_in_kernel")
def a_late_write_into_a_page_that_was_given_away(checks: Checks) -> str:
    """Between the kernel's comparison and its store the page goes back. The step's hold keeps the slot from others."""
    bench = Bench(checks)
    guard, mine = bench.guard, bench.mine.refs[1]
    taken: list[PageRef] = []

    def give_away(row: int) -> None:
        if row == 0 and not taken:
            guard.retire([mine], OWNER)
            taken.extend(guard.allocate(3, guard.free_pages))

    try:
        bench.run(Moments(after_write_compare=give_away))
    except StalePage:
        if any(ref.page_id == mine.page_id for ref in taken) and values_of(guard, mine.page_id)[0] == 14:
            return "written into the next owner's page"
        raise
    return ""


# --- life cycle -----------------------------------------------------------------------------------------------------


@isolates("quarantine", NoCapacity, "no_pages")
def late_bytes_into_the_next_owners_page(checks: Checks) -> str:
    world = World(checks, TransferFaults(ending=Ending.LATE, delay_ms=50), slots=3)
    descs = world.prompt(TOKENS)
    local = world.sink.allocate(OWNER, 2)
    with pytest.raises(TransferTimeout):
        world.pull(descs, TOKENS, local=local)
    world.sink.retire(local, OWNER)
    pages = PageRun(world.sink.allocate(NEIGHBOUR, 3))
    fill(world.sink, pages.refs[0], OTHERS[:T])
    fill(world.sink, pages.refs[1], OTHERS[:T])
    fill(world.sink, pages.refs[2], OTHERS[:T])
    assert world.fabric.land_all() == 1
    world.receiver.sweep()
    answer = run_step(world.sink, StepPlan(1, (PlanRow(NEIGHBOUR, (74,), 8, pages),)))[NEIGHBOUR]
    assert answer.error is None
    right = (2 * sum(OTHERS[:T]) + 74) / 9
    return "late bytes changed a neighbour's answer" if answer.output != pytest.approx(right) else ""


@isolates("tag_bump", StalePage, "stale_at_entry")
def an_old_name_for_a_reused_slot(checks: Checks) -> str:
    bench = Bench(checks)
    bench.give_away(bench.mine.refs[0])
    return foreign(bench.run())


@isolates("pins", PagePinned, "page_pinned")
def a_shared_page_is_freed_under_its_reader(checks: Checks) -> str:
    bench = Bench(checks)
    bench.guard.share([bench.theirs.refs[0]])
    bench.guard.retire([bench.theirs.refs[0]], NEIGHBOUR)
    published = run_step(bench.guard, bench.plan)
    assert published[OWNER].error is None
    return "its reader was failed" if published[NEIGHBOUR].error is not None else ""


# --- all of them ----------------------------------------------------------------------------------------------------

CASES = [(name, s) for name, scenarios in SCENARIOS.items() for s in scenarios]
IDS = [f"{name}-{s.play.__name__}" for name, s in CASES]


def test_every_check_has_a_fault_that_it_catches() -> None:
    assert set(SCENARIOS) == set(check_names())


@pytest.mark.parametrize(("name", "scenario"), CASES, ids=IDS)
def test_with_the_check_a_typed_error(name: str, scenario: Scenario) -> None:
    with pytest.raises(scenario.error) as caught:
        scenario.play(ALL_CHECKS.without(*scenario.backups))
    assert caught.value.reason == scenario.reason


@pytest.mark.parametrize(("name", "scenario"), CASES, ids=IDS)
def test_with_all_checks_a_typed_error(name: str, scenario: Scenario) -> None:
    with pytest.raises(scenario.error):
        scenario.play(ALL_CHECKS)


@pytest.mark.parametrize(("name", "scenario"), CASES, ids=IDS)
def test_without_the_check_the_wrong_thing_happens(name: str, scenario: Scenario) -> None:
    assert scenario.play(ALL_CHECKS.without(name, *scenario.backups))


def test_checks_are_named_strictly() -> None:
    with pytest.raises(TypeError):
        ALL_CHECKS.without("digests")
    assert replace(ALL_CHECKS, digest=False) == ALL_CHECKS.without("digest") != ALL_CHECKS
