"""Gateways, drains and the controller in the simulator, and what a careless drain costs."""

from collections import Counter
from dataclasses import replace

import pytest

from decode.core import DecodeCore
from kvstore.checks import ALL_CHECKS
from kvstore.errors import Unavailable
from sim import callers, control_side
from sim.control_side import Controller
from sim.decode_side import DecodeWorker
from sim.faults import NO_FAULTS, Faults
from sim.load import draw_shape
from sim.runner import run
from sim.world import World, make_kit

KIT = make_kit()
DOOR_OF_DECODE, DOOR_OF_PREFILL = 45, 104  # seeds whose drain meets a request on its way


def test_a_door_that_closes_at_once_loses_requests(monkeypatch):
    assert not run(DOOR_OF_DECODE, kit=KIT).violations
    monkeypatch.setattr(Controller, "open_ms", lambda self, role, limit_ms: 1)
    assert [v.law for v in run(DOOR_OF_DECODE, kit=KIT).violations] == ["drain_lost_request"]


TURNED_AWAY = 9, 33  # seeds whose requests meet a door that is closed already, with another pair there


@pytest.mark.parametrize("seed", TURNED_AWAY)
def test_what_a_closed_door_turns_away_goes_to_another_pair(monkeypatch, seed):
    monkeypatch.setattr(Controller, "open_ms", lambda self, role, limit_ms: 1)
    drains = Faults(scale_down=0.3, restart_asked=0.1)
    assert not run(seed, kit=KIT, faults=drains).violations
    monkeypatch.setattr(callers, "may_go_elsewhere", lambda error, *, begun, moves: False)
    assert [v.law for v in run(seed, kit=KIT, faults=drains).violations] == ["drain_lost_request"]


def test_prefill_must_stay_open_for_handoffs_that_are_owed(monkeypatch):
    assert not run(DOOR_OF_PREFILL, kit=KIT).violations
    monkeypatch.setattr(Controller, "open_ms", lambda self, role, limit_ms: min(control_side.POLICY.open_ms, limit_ms))
    assert [v.law for v in run(DOOR_OF_PREFILL, kit=KIT).violations] == ["drain_lost_request"]


def test_drains_alone_cost_no_answer():
    """Scale-downs and restarts with time, nothing else wrong: whoever is routed is answered."""
    for seed in (6, 10, 21):  # two workers of each role
        result = run(seed, kit=KIT, faults=Faults(scale_down=0.3, restart_asked=0.1))
        assert not result.violations, result.violations[0]
        assert result.injected["scale_down"]
        refused = {"no_decode_worker", "no_prefill_worker", "decode_full", "pool_exhausted", "too_many_leases"}
        assert set(result.outcomes) <= {"ok", *refused}, result.outcomes


@pytest.mark.parametrize("site", ["scale_down", "restart_asked", "drain_short", "drain_rude"])
def test_a_drained_worker_comes_back_as_another_life(site):
    changed = False
    for seed in (6, 10, 21):  # two workers of each role
        world = World(seed, KIT, Faults(**{site: 0.5}), ALL_CHECKS)
        lives = {worker.name: worker.guard.incarnation for worker in world.workers}
        assert world.run() == []
        shape = draw_shape(seed)
        now = {worker.name: worker.guard.incarnation for worker in world.workers if worker.alive}
        assert len(now) == shape.prefills + shape.decodes
        changed |= not set(now.values()) <= set(lives.values())
    assert changed


def test_gateways_spread_their_requests():
    result = World(6, KIT, NO_FAULTS, ALL_CHECKS)
    assert result.run() == []
    used = {request.route.prefill.name for request in result.requests if request.route is not None}
    assert len(used) == draw_shape(6).prefills


# --- who computes a preempted request again ------------------------------------------------------------------------

PRESSED = Faults(pool_pressure=0.5, scale_down=0.08, restart_asked=0.04)
MOVED = 203  # a seed in which a request is preempted while its prefill worker drains


def hasty(monkeypatch) -> None:
    """Drains that end while requests still run, so that preempted ones find their prefill worker gone."""
    monkeypatch.setattr(control_side, "POLICY", replace(control_side.POLICY, open_ms=60))


def test_a_preempted_request_whose_prefill_worker_drains_is_computed_by_another(monkeypatch):
    hasty(monkeypatch)
    world = World(MOVED, KIT, PRESSED, ALL_CHECKS)
    assert world.run() == []
    assert world.tally.reasons["recompute_moved"]


def test_a_decode_worker_that_goes_back_all_the_same_breaks_a_law(monkeypatch):
    hasty(monkeypatch)
    inner = DecodeWorker.on_assigned

    def stay(worker, number, attempt, answer):
        inner(worker, number, attempt, worker.places.get(number, answer))

    monkeypatch.setattr(DecodeWorker, "on_assigned", stay)
    assert [v.law for v in run(MOVED, kit=KIT, faults=PRESSED).violations] == ["drained_with_lease"]


@pytest.mark.parametrize("seed", [27, 33])
def test_a_question_that_nobody_answers_ends_in_time(monkeypatch, seed: int):
    faults = Faults(pool_pressure=0.4, assign_lost=0.5)
    result = run(seed, kit=KIT, faults=faults)
    assert not result.violations
    assert result.outcomes["prefill_not_assigned"]

    def expire(core, now_ms):
        return [] if now_ms < 1 << 40 else core.fail(0, Unavailable("never"))

    monkeypatch.setattr(DecodeCore, "expire", expire)
    assert [v.law for v in run(seed, kit=KIT, faults=faults).violations] == ["overdue"]


def test_who_was_named_for_a_preempted_request_may_go_and_answers_may_be_late_or_doubled():
    injected: Counter[str] = Counter()
    for seed in range(20, 60):
        world = World(seed, KIT, Faults(pool_pressure=0.4, assigned_leaves=0.6, assign_late=0.3, assign_twice=0.5),
                      ALL_CHECKS)  # fmt: skip
        assert world.run() == []
        injected += world.dice.injected
    assert min(injected[site] for site in ("assigned_leaves", "assign_late", "assign_twice")) > 0, injected
