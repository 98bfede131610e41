"""The reconciler: every phase with everything that can be heard, and laws that hold whatever is heard."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.control.core import backoff_ms, leavers, reconcile, unsettled
from cluster.control.state import (
    Drain,
    DrainAsked,
    Ended,
    Found,
    Kill,
    Phase,
    Policy,
    Record,
    Row,
    Silent,
    Start,
    Started,
    StartFailed,
    State,
    Step,
    Stop,
    Told,
)
from cluster.registry.records import Desired
from cluster.roles import Role

POLICY = Policy(
    start_ms=1000, drain_ms=500, open_ms=100, stop_ms=200, backoff_ms=100, backoff_cap_ms=800, healthy_ms=5000,
    stall_ms=300, late_answers=3, kill_ms=2000,
)  # fmt: skip
NOW = 100_000


def desired(prefill: int = 1, decode: int = 1, **more: object) -> Desired:
    return Desired(revision=1, prefill=prefill, decode=decode, **more)


def did(actions: tuple[object, ...]) -> list[object]:
    return [action for action in actions if not isinstance(action, Record)]


def row(worker_id: str = "decode-0", phase: Phase = Phase.READY, **more: object) -> Row:
    role = Role(worker_id.split("-")[0])
    deadline = NOW + 1000 if phase is Phase.STARTING else NOW + 500 if phase is Phase.DRAINING else 0
    step = Step.DRAIN if phase is Phase.DRAINING else Step.NONE
    more = {"life": 1, "deadline_ms": deadline, "step": step, "incarnation": 7, "ready_ms": NOW - 1000, **more}
    return Row(worker_id, role, phase, "", NOW, **more)


def state(*rows: Row, wanted: Desired | None = None, policy: Policy = POLICY) -> State:
    counts = {role: sum(r.role is role and not r.leaving for r in rows) for role in Role}
    wanted = wanted or desired(counts[Role.PREFILL], counts[Role.DECODE])
    lives = max((r.life for r in rows), default=0)
    return State(wanted, MappingProxyType({r.worker_id: r for r in rows}), policy, lives)


def told(worker_id: str = "decode-0", asked: int = NOW, **more: object) -> Told:
    return Told(worker_id, **{"life": 1, "asked_ms": asked, "incarnation": 7, **more})


# --- every phase with everything heard ----------------------------------------------------------------------------

GOOD, STALLED, UNPROVED = told(), told(step_age_ms=301), told(fault="its self-test has not passed")
HEARD = {
    "good": GOOD,
    "stalled": STALLED,
    "unproved": UNPROVED,
    "self-drain": told(draining=True),
    "late": Silent("decode-0", 1, "late"),
    "refused": Silent("decode-0", 1, "refused", refused=True),
    "ended": Ended("decode-0", 1, "died"),
    "start failed": StartFailed("decode-0", 1, "no place"),
    "restart": DrainAsked("decode-0", leaving=False, reason="asked"),
    "drain": DrainAsked("decode-0", leaving=True, reason="asked"),
    "found": Found("decode-0", Role.DECODE, "h:1", 9),
}
S, R, DG, DR, X = Phase.STARTING, Phase.READY, Phase.DEGRADED, Phase.DRAINING, Phase.STOPPED
# Per phase: what it becomes (None: the row is gone), in the order of HEARD.
TABLE = {
    S: (R, S, S, DR, S, S, X, X, S, S, S),
    R: (R, DG, DG, DR, R, DG, X, X, DR, DR, R),
    DG: (R, DG, DG, DR, DG, DG, X, X, DR, DR, DG),
    # An asked end begins anew at once: the next life is STARTING in the same turn's advance.
    DR: (DR, DR, DR, DR, DR, DR, S, X, DR, DR, DR),
    X: (X, X, X, X, X, X, X, X, S, None, S),
}
CELLS = [(phase, name, TABLE[phase][i]) for phase in TABLE for i, name in enumerate(HEARD)]


@pytest.mark.parametrize(("phase", "name", "after"), CELLS, ids=str)
def test_phase_by_event(phase: Phase, name: str, after: Phase | None):
    failures = 1 if phase is X else 0
    first = row(phase=phase, failures=failures, not_before_ms=NOW + 100 if phase is X else 0)
    leaving = name == "drain"
    before = state(first, wanted=desired(0, 0 if leaving else 1))
    new, actions = reconcile(before, NOW, [HEARD[name]])
    got = new.rows.get("decode-0")
    assert (None if got is None else got.phase) is after, did(actions)
    if after is phase and after is not S:
        assert not [a for a in did(actions) if isinstance(a, (Start, Kill))]


def test_news_of_an_earlier_life_changes_nothing():
    before = state(row(life=2, incarnation=8))
    old = [replace(seen, life=1) for seen in HEARD.values() if hasattr(seen, "life")]
    new, actions = reconcile(before, NOW, old)
    assert (new, did(actions)) == (before, [])
    # The right life number, but the pool that answers there is another one.
    new, actions = reconcile(before, NOW, [told(life=2, incarnation=7, fault="bad")])
    assert (new, did(actions)) == (before, [])


def test_an_overtaken_answer_changes_nothing():
    before = state(row(told_ms=NOW))
    assert reconcile(before, NOW, [told(asked=NOW - 1, fault="bad")])[0] == before


# --- drained nodes ---------------------------------------------------------------------------------------------------

CLOSED = MappingProxyType({"node-a": "id-a"})


def test_what_a_drained_node_held_starts_elsewhere():
    draining = row(phase=DR, step=Step.STOP, node="node-a", node_id="id-a")
    new, actions = reconcile(state(draining, wanted=desired(0, 1, closed=CLOSED)), NOW, [Ended("decode-0", 1)])
    assert did(actions) == [Start("decode-0", Role.DECODE, 2, avoid=frozenset({"id-a"}))]
    assert (new.rows["decode-0"].node, new.rows["decode-0"].node_id) == ("", ""), "where it will be, nobody knows"


def test_a_crash_meanwhile_does_not_lead_back_to_it():
    crashed = row(phase=X, node="node-a", node_id="id-a", failures=1, not_before_ms=NOW)
    _new, actions = reconcile(state(crashed, wanted=desired(0, 1, closed=CLOSED)), NOW)
    assert [action.avoid for action in did(actions)] == [{"id-a"}]


@pytest.mark.parametrize(("node_id", "goes"), [("id-a", True), ("id-a2", False), ("", False)])
def test_what_comes_up_on_a_node_that_was_drained_meanwhile_goes(node_id: str, goes: bool):
    starting = row(phase=S, incarnation=0)
    before = state(starting, wanted=desired(0, 1, closed=CLOSED))
    new, actions = reconcile(before, NOW, [Started("decode-0", 1, "h:1", "node-a", node_id)])
    assert new.rows["decode-0"].phase is (DR if goes else S), "a node that came back has another id"
    assert [type(action) for action in did(actions)] == ([Drain] if goes else [])


def test_a_cordoned_node_takes_nobody_and_keeps_whom_it_has():
    wanted = desired(0, 2, cordoned_nodes=CLOSED, cordoned_lives=MappingProxyType({"decode-0": 7}))
    there = row(node="node-a", node_id="id-a", ready_ms=NOW)
    new, actions = reconcile(state(there, wanted=wanted), NOW)
    assert new.rows["decode-0"] == there
    assert did(actions) == [Start("decode-1", Role.DECODE, 2, avoid=frozenset({"id-a"}))]
    late, actions = reconcile(new, NOW, [Started("decode-1", 2, "h:1", "node-a", "id-a")])
    assert late.rows["decode-1"].asked == "node node-a is cordoned"
    assert [action for action in did(actions) if action.worker_id != "decode-1"] == []


def test_a_cordon_by_a_node_is_of_one_life():
    wanted = Desired(cordoned=frozenset({"a"}), cordoned_lives=MappingProxyType({"b": 7, "c": 0}))
    cordoned = {(name, life) for name in "abc" for life in (0, 7, 8) if wanted.is_cordoned(name, life)}
    assert cordoned == {("a", 0), ("a", 7), ("a", 8), ("b", 7)}


# --- a fleet comes up and changes its size --------------------------------------------------------------------------


def test_an_empty_fleet_starts_what_is_wanted_once():
    new, actions = reconcile(State(desired(1, 2), policy=POLICY), NOW)
    assert sorted(a.worker_id for a in did(actions)) == ["decode-0", "decode-1", "prefill-0"]
    assert sorted(a.life for a in did(actions)) == [1, 2, 3]
    again, actions = reconcile(new, NOW + 1)
    assert (again, did(actions)) == (new, [])
    assert "0 of 2 decode workers are ready" in unsettled(new)


def test_found_workers_are_not_started_again():
    found = [Found("decode-0", Role.DECODE, "h:1", 7), Found("prefill-0", Role.PREFILL, "h:2", 8)]
    new, actions = reconcile(State(desired(), policy=POLICY), NOW, found)
    assert did(actions) == []
    new, _ = reconcile(new, NOW, [told(), told("prefill-0", incarnation=8, life=2)])
    assert unsettled(new) == ""


def test_a_worker_found_draining_ends_and_is_the_one_that_goes():
    found = [Found("decode-0", Role.DECODE, "h:1", 7, draining=True), Found("decode-1", Role.DECODE, "h:2", 8)]
    new, actions = reconcile(State(desired(0, 1), policy=POLICY), NOW, found)
    assert did(actions) == [Drain("decode-0", 1, NOW + 500)]
    assert new.rows["decode-0"].leaving
    assert not new.rows["decode-1"].leaving


def test_a_found_worker_that_is_to_go_drains_and_one_without_an_endpoint_is_stopped():
    found = [Found("decode-0", Role.DECODE, "h:1", 7), Found("decode-1", Role.DECODE)]
    _new, actions = reconcile(State(desired(0, 0), policy=POLICY), NOW, found)
    assert did(actions) == [Drain("decode-0", 1, NOW + 500), Stop("decode-1", 2)]


def test_scale_down_takes_who_serves_nobody_then_the_least_loaded_then_the_youngest():
    rows = [row("decode-0", load=5), row("decode-1", load=1), row("decode-2", load=1), row("decode-3", DG, load=9)]
    assert leavers(rows, 4) == ["decode-3", "decode-2", "decode-1", "decode-0"]
    new, actions = reconcile(state(*rows, wanted=desired(0, 2)), NOW)
    assert sorted(a.worker_id for a in did(actions)) == ["decode-2", "decode-3"]
    assert all(isinstance(a, Drain) for a in did(actions))
    assert reconcile(new, NOW + 1)[1] == ()


def test_a_drain_waits_until_who_stays_is_known_to_be_ready():
    rows = [row("decode-0"), row("decode-1", ready_ms=NOW - 99)]
    new, actions = reconcile(state(*rows), NOW, [DrainAsked("decode-0", leaving=False, reason="asked")])
    assert did(actions) == []
    new, actions = reconcile(new, NOW + 1)
    assert did(actions) == [Drain("decode-0", 1, NOW + 501)]


def test_a_worker_is_ready_when_it_has_exchanged_a_page_with_those_that_are():
    starting = row("prefill-1", S)
    before = state(row("decode-0", proves=True, tried=MappingProxyType({"prefill-0": 7})), row("prefill-0"), starting)
    new, _ = reconcile(before, NOW, [told("prefill-1")])
    assert new.rows["prefill-1"].phase is S
    assert "decode-0" in new.rows["prefill-1"].reason
    tried = MappingProxyType({"prefill-0": 7, "prefill-1": 7})
    new, _ = reconcile(new, NOW + 1, [told(asked=NOW + 1, proves=True, tried=tried), told("prefill-1", NOW + 1)])
    assert new.rows["prefill-1"].phase is R
    new, _ = reconcile(state(row(phase=S), row("prefill-0")), NOW, [told(proves=True)])
    assert "prefill-0" in new.rows["decode-0"].reason


def test_a_decode_worker_is_not_ready_before_it_has_passed_with_one_that_is_known():
    """Also where that one is not ready itself yet: both begin together."""
    starting = row("prefill-0", S)
    new, _ = reconcile(state(row(phase=S), starting), NOW, [told(proves=True)])
    assert (new.rows["decode-0"].phase, new.rows["decode-0"].reason) == (
        S, "has not exchanged a page with prefill-0 yet",
    )  # fmt: skip
    passed = told(asked=NOW + 1, proves=True, tried=MappingProxyType({"prefill-0": 7}))
    new, _ = reconcile(new, NOW + 1, [passed])
    assert (new.rows["decode-0"].phase, new.rows["decode-0"].reason) == (R, "")


@pytest.mark.parametrize("prefill", [None, row("prefill-0", S, incarnation=0), row("prefill-0", Phase.DRAINING)])
def test_a_decode_worker_that_knows_no_prefill_worker_is_ready_and_says_so(prefill):
    rows = [row(phase=S), *([prefill] if prefill is not None else [])]
    new, _ = reconcile(state(*rows), NOW, [told(proves=True)])
    assert new.rows["decode-0"].phase is R
    assert "no prefill worker is known" in new.rows["decode-0"].reason
    later = replace(new, rows=MappingProxyType({**new.rows, "prefill-0": row("prefill-0")}))
    new, _ = reconcile(later, NOW + 1, [told(asked=NOW + 1, proves=True)])
    assert (new.rows["decode-0"].phase, new.rows["decode-0"].reason) == (
        R, "has not exchanged a page with prefill-0 yet",
    )  # fmt: skip
    new, _ = reconcile(new, NOW + 2, [told(asked=NOW + 2, proves=True, tried=MappingProxyType({"prefill-0": 7}))])
    assert (new.rows["decode-0"].phase, new.rows["decode-0"].reason) == (R, "")


@pytest.mark.parametrize("name", ["decode-9", "prefill-9"])
def test_one_that_cannot_be_reached_keeps_no_new_worker_out_for_ever(name: str):
    """Of two ready workers of the other role one answers to nobody: after half of the start's time the other one is
    enough, and the reason of who is ready names the first."""
    new_one = row(name, S, incarnation=7)
    if name == "decode-9":
        others = [row("prefill-0"), row("prefill-1")]
        heard = {"proves": True, "tried": MappingProxyType({"prefill-0": 7})}
    else:
        tried = {"decode-0": MappingProxyType({"prefill-9": 7}), "decode-1": MappingProxyType({"prefill-0": 7})}
        others = [row("prefill-0"), *(row(key, proves=True, tried=value) for key, value in tried.items())]
        heard = {}
    before = state(new_one, *others)
    early, _ = reconcile(before, NOW + 499, [told(name, NOW + 499, **heard)])
    assert early.rows[name].phase is S
    late, _ = reconcile(early, NOW + 500, [told(name, NOW + 500, **heard)])
    assert late.rows[name].phase is R
    if name == "decode-9":
        assert late.rows[name].reason == "has not exchanged a page with prefill-1 yet"
    # With nobody at all there is no exchange to rely on.
    strangers = [replace(other, tried=MappingProxyType({})) for other in others]
    heard = {**heard, "tried": MappingProxyType({})}
    none, _ = reconcile(state(new_one, *strangers), NOW + 500, [told(name, NOW + 500, **heard)])
    assert none.rows[name].phase is S


def test_a_worker_that_needs_no_proof_waits_for_nobody():
    new, _ = reconcile(state(row(phase=S), row("prefill-0", S)), NOW, [told(proves=False)])
    assert (new.rows["decode-0"].phase, new.rows["decode-0"].reason) == (R, "")


def test_decode_drains_before_prefill():
    rows = [row("decode-0"), row("decode-1"), row("prefill-0"), row("prefill-1")]
    new, actions = reconcile(state(*rows, wanted=desired(1, 1)), NOW)
    assert did(actions) == [Drain("decode-1", 1, NOW + 500)]
    assert new.rows["prefill-1"].leaving
    assert new.rows["prefill-1"].phase is R
    new, actions = reconcile(new, NOW + 10, [Ended("decode-1", 1)])
    assert did(actions) == [Drain("prefill-1", 1, NOW + 510)]
    assert "decode-1" not in new.rows


def test_a_worker_that_was_to_go_and_was_not_asked_yet_stays_when_it_is_wanted_again():
    rows = [row("decode-0"), row("decode-1"), row("prefill-0"), row("prefill-1")]
    new, _ = reconcile(state(*rows, wanted=desired(1, 1)), NOW)
    new, actions = reconcile(replace(new, desired=desired(2, 1)), NOW + 1)
    assert did(actions) == []
    assert not new.rows["prefill-1"].leaving


def test_scale_up_while_one_drains_starts_within_the_surge():
    rows = [row("decode-0"), row("decode-1", DR, leaving=True), row("decode-2", DR, leaving=True)]
    new, actions = reconcile(state(*rows, wanted=desired(0, 2)), NOW)
    assert did(actions) == [], "three processes are all that two wanted and one of surge allow"
    new, actions = reconcile(new, NOW + 1, [Ended("decode-1", 1)])
    assert did(actions) in ([Start("decode-3", Role.DECODE, 2)], [Start("decode-1", Role.DECODE, 2)])
    assert sum(r.alive for r in new.rows.values()) == 3


# --- drains -----------------------------------------------------------------------------------------------------------


def test_a_decode_drain_waits_for_the_opening_then_for_the_last_request():
    new, _ = reconcile(state(row()), NOW, [DrainAsked("decode-0", leaving=False, reason="asked")])
    for at, answer in ((50, told(asked=NOW + 50)), (150, told(asked=NOW + 150, running=1))):
        new, actions = reconcile(new, NOW + at, [answer])
        assert did(actions) == []
    new, actions = reconcile(new, NOW + 200, [told(asked=NOW + 200)])
    assert did(actions) == [Stop("decode-0", 1)]
    new, actions = reconcile(new, NOW + 210, [Ended("decode-0", 1)])
    assert did(actions) == [Start("decode-0", Role.DECODE, 2)]
    assert new.rows["decode-0"].restarts == 1


@pytest.mark.parametrize("holding", ["lease", "owed", "waiting", "decode not asked since"])
def test_a_prefill_drain_waits_for_promised_pages_and_for_handoffs_that_are_owed(holding: str):
    drain = DrainAsked("prefill-0", leaving=False, reason="asked")
    new, _ = reconcile(state(row("prefill-0"), row("decode-0")), NOW, [drain])
    at = NOW + 150
    quiet = [told("prefill-0", at), told("decode-0", at)]
    held = {
        "lease": [told("prefill-0", at, leases=1), quiet[1]],
        "waiting": [told("prefill-0", at, waiting=1), quiet[1]],
        "owed": [quiet[0], told("decode-0", at, owed=MappingProxyType({"prefill-0": 1}))],
        "decode not asked since": [quiet[0], told("decode-0", NOW + 50)],
    }[holding]
    new, actions = reconcile(new, at, held)
    assert did(actions) == []
    later = [replace(answer, asked_ms=at + 10) for answer in quiet]
    new, actions = reconcile(new, at + 10, later)
    assert did(actions) == [Stop("prefill-0", 1)]


def test_a_drain_that_nobody_answers_is_stopped_then_killed_then_given_up():
    drain = DrainAsked("decode-0", leaving=True, reason="asked")
    new, _ = reconcile(state(row(), wanted=desired(0, 0)), NOW, [drain])
    seen = []
    for at in range(0, 2000, 50):
        new, actions = reconcile(new, NOW + at)
        seen += did(actions)
    assert seen == [Stop("decode-0", 1), Kill("decode-0", 1)]
    assert not new.rows


def test_an_asked_restart_is_found_again_by_incarnation_and_happens_once():
    wanted = desired(0, 1, restarts=MappingProxyType({"decode-0": 7}))
    new, actions = reconcile(state(row(), wanted=wanted), NOW)
    assert did(actions) == [Drain("decode-0", 1, NOW + 500)]
    new, actions = reconcile(new, NOW + 10, [Ended("decode-0", 1)])
    assert did(actions) == [Start("decode-0", Role.DECODE, 2)]
    new, actions = reconcile(new, NOW + 20, [told(life=2, incarnation=8, asked=NOW + 20)])
    assert did(actions) == []
    assert new.rows["decode-0"].phase is R


# --- bad ends -------------------------------------------------------------------------------------------------------


def test_back_off_grows_to_its_cap_and_is_forgotten_after_a_healthy_time():
    assert [backoff_ms(POLICY, n) for n in range(6)] == [0, 100, 200, 400, 800, 800]
    now, new = NOW, state(row(phase=X, life=0, incarnation=0), wanted=desired(0, 1))
    waits = []
    for life in range(1, 6):
        began = now
        new, actions = reconcile(new, now)
        while not did(actions):
            now += 10
            new, actions = reconcile(new, now)
        waits.append(now - began)
        new, _ = reconcile(new, now, [StartFailed("decode-0", life, "no place")])
    assert waits == [0, 100, 200, 400, 800]
    assert "no place" in unsettled(new)
    healthy = state(row(failures=5, ready_ms=NOW - 5000))
    new, _ = reconcile(healthy, NOW, [Ended("decode-0", 1)])
    assert new.rows["decode-0"].failures == 1


def test_a_dead_worker_stays_down_where_restarts_are_off():
    policy = replace(POLICY, restart=False)
    new, _ = reconcile(state(row(), policy=policy), NOW, [Ended("decode-0", 1, "killed")])
    new, actions = reconcile(new, NOW + 10_000)
    assert did(actions) == []
    assert new.rows["decode-0"].reason == "killed"


def test_liveness_is_later_than_readiness_and_one_good_answer_ends_both():
    new, _ = reconcile(state(row()), NOW, [STALLED])
    assert new.rows["decode-0"].phase is DG
    new, actions = reconcile(new, NOW + 1999, [told(asked=NOW + 1999, step_age_ms=400)])
    assert did(actions) == []
    back, _ = reconcile(new, NOW + 1999, [told(asked=NOW + 1999)])
    assert back.rows["decode-0"].phase is R
    new, actions = reconcile(new, NOW + 2000, [told(asked=NOW + 2000, step_age_ms=400)])
    assert did(actions) == [Kill("decode-0", 1)]


def test_load_alone_never_makes_a_worker_degraded():
    new = state(row())
    for at in range(0, 100_000, 100):
        answer = told(asked=NOW + at, running=4096, waiting=65_536, leases=256, step_age_ms=299)
        new, actions = reconcile(new, NOW + at, [Silent("decode-0", 1, "late"), Silent("decode-0", 1, "late"), answer])
        assert did(actions) == []
        assert new.rows["decode-0"].phase is R


def test_a_start_that_never_gets_ready_is_killed_and_tried_again():
    new, _ = reconcile(State(desired(0, 1), policy=POLICY), NOW)
    new, actions = reconcile(new, NOW + 999, [Started("decode-0", 1, "h:1"), UNPROVED])
    assert did(actions) == []
    new, actions = reconcile(new, NOW + 1000)
    assert did(actions) == [Kill("decode-0", 1)]
    assert "self-test" in new.rows["decode-0"].reason
    new, actions = reconcile(new, NOW + 1010, [Ended("decode-0", 1)])
    new, actions = reconcile(new, NOW + 1110)
    assert did(actions) == [Start("decode-0", Role.DECODE, 2)]


# --- laws -----------------------------------------------------------------------------------------------------------

NAMES = ["decode-0", "decode-1", "prefill-0"]
SEEN = st.one_of(
    st.builds(
        Told, st.sampled_from(NAMES), st.integers(1, 3), st.integers(NOW, NOW + 9000), st.integers(1, 3),
        st.sampled_from(["", "bad"]), st.integers(0, 2), st.just(0), st.integers(0, 1), st.booleans(),
        st.sampled_from([0, 500]),
    ),
    st.builds(Silent, st.sampled_from(NAMES), st.integers(1, 3), st.just("x"), st.booleans()),
    st.builds(Ended, st.sampled_from(NAMES), st.integers(1, 3)),
    st.builds(StartFailed, st.sampled_from(NAMES), st.integers(1, 3), st.just("x")),
    st.builds(Started, st.sampled_from(NAMES), st.integers(1, 3), st.just("h:1")),
    st.builds(DrainAsked, st.sampled_from(NAMES), st.booleans(), st.just("x")),
    st.builds(Found, st.sampled_from(NAMES), st.sampled_from(list(Role)), st.just("h:1"), st.integers(1, 3)),
)  # fmt: skip
TURNS = st.lists(
    st.tuples(st.integers(0, 700), st.integers(0, 3), st.integers(0, 2), st.lists(SEEN, max_size=3)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_laws(turns):
    now, new = NOW, State(desired(1, 2), policy=POLICY)
    asked: set[tuple[object, ...]] = set()
    for wait, decode, prefill, heard in turns:
        now += wait
        new = replace(new, desired=desired(prefill, decode))
        new, actions = reconcile(new, now, heard)
        for action in did(actions):
            assert (action.life, type(action)) not in asked, f"{action} was asked for before in this life"
            asked.add((action.life, type(action)))
            if isinstance(action, Start):
                assert sum(r.alive for r in new.of(action.role)) <= new.wanted(action.role) + POLICY.surge
        for r in new.rows.values():
            waiting = r.phase is S or r.step is not Step.NONE
            assert not waiting or r.deadline_ms <= now + 1000, "every wait has a deadline"
            assert r.step is Step.NONE or r.deadline_ms > now, "a deadline that has passed has been acted on"
    # From here on nobody answers: every drain ends, and every end is bounded.
    ending = {(r.worker_id, r.life) for r in new.rows.values() if r.step is not Step.NONE}
    for _ in range(40):
        now += 100
        new, _ = reconcile(new, now)
    assert not ending & {(r.worker_id, r.life) for r in new.rows.values() if r.alive}
