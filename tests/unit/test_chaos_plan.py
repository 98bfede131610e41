"""The plan of a chaos run is a function of its seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cluster.chaos.plan import OF_WORKERS, Behaviour, Fault, PlannedFault, Shape, make_plan
from kvstore.errors import InvalidInput

SHAPE = Shape(seed=3, minutes=4)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    assert make_plan(SHAPE) == make_plan(Shape(seed=3, minutes=4))
    assert make_plan(SHAPE) != make_plan(replace(SHAPE, seed=4))


def test_a_longer_run_begins_as_the_shorter_one():
    assert make_plan(SHAPE)[:5] == make_plan(replace(SHAPE, minutes=1))


def test_every_kind_comes_before_any_comes_twice():
    kinds = [f.kind for played in make_plan(replace(SHAPE, faults_per_round=1)) for f in played.faults]
    assert set(kinds[: len(SHAPE.kinds)]) == set(SHAPE.kinds)


@pytest.mark.parametrize("workers", [SHAPE.workers, ("prefill-0", "decode-0")])
def test_a_worker_has_one_fault_of_its_own_in_a_round(workers: tuple[str, ...]):
    for played in make_plan(replace(SHAPE, workers=workers, faults_per_round=8)):
        targets = Counter(f.target for f in played.faults if f.kind in OF_WORKERS)
        assert set(targets) <= set(workers)
        assert all(count == 1 for count in targets.values())


def test_faults_and_requests_lie_inside_their_round_and_requests_are_numbered_through():
    numbers = []
    for played in make_plan(SHAPE):
        assert all(0 < f.at_ms < SHAPE.round_ms for f in played.faults)
        assert [f.at_ms for f in played.faults] == sorted(f.at_ms for f in played.faults)
        assert [a.at_ms for a in played.asks] == sorted(a.at_ms for a in played.asks)
        assert all(0 <= a.prompt_no < SHAPE.prompts for a in played.asks)
        numbers += [a.number for a in played.asks]
    assert numbers == list(range(len(numbers)))


def test_requests_come_at_the_rate_that_was_asked_for():
    plan = make_plan(replace(SHAPE, minutes=20, faults_per_round=0))
    asks = sum(len(played.asks) for played in plan)
    assert asks == pytest.approx(20 * 60 * SHAPE.rate_per_s, rel=0.1)


def test_most_clients_read_and_some_are_slow_leave_or_have_no_patience():
    asks = [a for played in make_plan(replace(SHAPE, minutes=20, faults_per_round=0)) for a in played.asks]
    counts = Counter(a.behaviour for a in asks)
    assert 0.8 < counts[Behaviour.READS] / len(asks) < 0.9
    for behaviour in (Behaviour.SLOW, Behaviour.LEAVES, Behaviour.IMPATIENT):
        assert 0.03 < counts[behaviour] / len(asks) < 0.07
    assert all((a.act_ms == 0) == (a.behaviour is Behaviour.READS) or a.behaviour is Behaviour.LEAVES for a in asks)
    assert {a.answer_tokens for a in asks} == set(range(SHAPE.answer_tokens[0], SHAPE.answer_tokens[1] + 1))


def drawn(kind: Fault, minutes: float = 20) -> list[PlannedFault]:
    shape = replace(SHAPE, kinds=(kind,), faults_per_round=1, minutes=minutes, rate_per_s=0.01)
    return [fault for played in make_plan(shape) for fault in played.faults]


def test_foreign_pages_are_for_all_decode_workers_and_for_no_other():
    assert {f.target for f in drawn(Fault.FOREIGN_PAGE)} == {"decode-0", "decode-1"}


@pytest.mark.parametrize(
    ("kind", "least_ms", "least", "most"),
    [
        # A killed worker's next life has a small pool where an amount is given, and only there.
        (Fault.KILL, 0, 0, 0), (Fault.SMALL_POOL, 0, 20, 32), (Fault.STOP, 300, 0, 0), (Fault.DISK_FULL, 1000, 0, 0),
        (Fault.CLOCK_JUMP, 500, 1000, 120_000), (Fault.FOREIGN_PAGE, 1000, 0, 0), (Fault.REGISTRY_KILL, 1000, 0, 0),
        # A link that carries nothing is cut.
        (Fault.LINK_CUT, 500, 0, 0), (Fault.LINK_SLOW, 1000, 256, 4096),
        (Fault.CANCEL_STORM, 0, 10, 24), (Fault.SLOW_READERS, 0, 3, 6), (Fault.SAME_IDS, 0, 4, 8),
    ],
)  # fmt: skip
def test_a_fault_lasts_long_enough_and_is_as_large_as_its_kind_wants(
    kind: Fault, least_ms: int, least: int, most: int
) -> None:
    faults = drawn(kind)
    assert all(f.kind is kind and least_ms <= f.for_ms < SHAPE.round_ms for f in faults)
    assert all(least <= f.amount <= most for f in faults)
    assert len({f.for_ms for f in faults}) > 1 or not least_ms


def test_a_storm_of_cancels_leaves_in_both_ways_and_a_flood_of_ids_has_one_label():
    only = replace(SHAPE, kinds=(Fault.CANCEL_STORM,), faults_per_round=1, rate_per_s=0.01)
    behaviours = {a.behaviour for a in make_plan(only)[0].asks}
    assert {Behaviour.LEAVES, Behaviour.ABORTS} <= behaviours
    only = replace(only, kinds=(Fault.SAME_IDS,))
    assert Counter(a.label for a in make_plan(only)[0].asks).most_common(1)[0][1] >= 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("minutes", 0), ("minutes", float("nan")), ("minutes", 1e9), ("rate_per_s", 0), ("rate_per_s", float("inf")),
        ("prompts", 1), ("round_ms", 10), ("answer_tokens", (5, 4)), ("kinds", (Fault.KILL, Fault.KILL)),
    ],
)  # fmt: skip
def test_a_shape_that_cannot_be_is_refused(field: str, value: object):
    with pytest.raises(InvalidInput) as refused:
        replace(SHAPE, **{field: value})
    assert refused.value.reason == "bad_chaos"


def test_memory_pressure_is_of_the_host_and_leaves_it_a_part():
    only = replace(SHAPE, kinds=(Fault.MEMORY_PRESSURE,), faults_per_round=1)
    faults = [fault for played in make_plan(only) for fault in played.faults]
    assert len(faults) == only.rounds
    assert all(f.target == "" and 0 < f.amount < 100 and f.for_ms < SHAPE.round_ms for f in faults)


def test_a_fault_of_the_link_is_of_a_pair_and_there_is_none_without_one():
    only = replace(SHAPE, kinds=(Fault.LINK_CUT, Fault.LINK_SLOW), links=(("decode-1", "prefill-2"),))
    faults = [fault for played in make_plan(only) for fault in played.faults]
    assert {(f.target, f.peer) for f in faults} == {("decode-1", "prefill-2")}
    assert not any(played.faults for played in make_plan(replace(only, links=())))
