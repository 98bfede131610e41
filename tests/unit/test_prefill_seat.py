"""Who computes a preempted request again: the router's choice, and the gateway's books of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.gateway.running import MAX_RECOMPUTES, RequestFacts
from cluster.gateway.seat import PrefillSeat
from cluster.gateway.served import Sources
from cluster.gateway.state import GatewayState
from cluster.roles import Role
from cluster.router import WorkerView, another_prefill
from genlock.v1 import worker_pb2
from kvstore.errors import Unavailable
from tests.support.fake_workers import config, served_model

DECODE = WorkerView("d", Role.DECODE, "d:1", ready=True)


def prefill(name: str, **fields: object) -> WorkerView:
    return replace(WorkerView(name, Role.PREFILL, f"{name}:1", ready=True, request_limit=4), **fields)


def again(*workers: WorkerView, decode: WorkerView = DECODE, present: str = "a") -> str:
    return another_prefill([decode, *workers], "d", present).worker_id


def test_it_goes_back_to_where_its_pages_are_cached_however_busy_that_is():
    assert again(prefill("a", outstanding_tokens=999, outstanding_requests=4), prefill("b")) == "a"


def test_where_its_own_worker_does_not_serve_the_least_loaded_other_one_does():
    gone = prefill("a", ready=False)
    assert again(gone, prefill("b", outstanding_tokens=9), prefill("c", outstanding_tokens=3)) == "c"
    assert again(prefill("b", outstanding_requests=4), prefill("c", outstanding_tokens=9)) == "c", "one with room first"
    assert again(prefill("b", outstanding_requests=4)) == "b", "it was admitted long ago"


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        ({"ready": False}, "no_prefill_worker"),
        ({"layout_fingerprint": "2"}, "no_matching_layout"),
        ({"worker_id": "not proved"}, "no_proved_pair"),
    ],
)
def test_only_a_worker_that_may_hand_over_pages_is_named(mine: dict[str, object], reason: str):
    decode = replace(DECODE, layout_fingerprint="1", proved_peers=frozenset({"a", "b"}))
    with pytest.raises(Unavailable) as caught:
        again(replace(prefill("a"), **mine), decode=decode)
    assert caught.value.reason == reason
    assert again(replace(prefill("a"), **mine), prefill("b"), decode=decode) == "b"


def test_a_worker_that_drains_is_the_last_resort_of_its_own_requests_alone():
    leaving = prefill("a", ready=False, answers=True)
    assert again(leaving, prefill("b", outstanding_tokens=999)) == "b"
    assert again(leaving) == "a"
    with pytest.raises(Unavailable):
        again(leaving, present="z")
    with pytest.raises(Unavailable):
        again(leaving, decode=replace(DECODE, proved_peers=frozenset({"b"})))


def test_a_decode_worker_that_was_lost_sight_of_still_gets_one():
    assert another_prefill([prefill("b")], "d", "a").worker_id == "b"


# --- books -----------------------------------------------------------------------------------------------------------


def status(name: str, role: Role, **fields: object) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(worker_id=name, role=role.value, **fields)


def state_with(*ready: str) -> GatewayState:
    state = GatewayState(config(), served_model(), Sources(lambda: 1_500.0, lambda count: b"7" * count))
    for name in ready:
        role = Role.DECODE if name == "d" else Role.PREFILL
        state.add_worker(name, role, f"{name}:1")
        state.set_fleet(state.fleet.answered(name, f"{name}:1", status(name, role)))
    return state


def recomputes(state: GatewayState) -> dict[str, float]:
    return {
        sample.labels["result"]: sample.value
        for family in state.metrics.registry.collect() if family.name == "genlock_recomputes"
        for sample in family.samples
    }  # fmt: skip


async def test_a_recompute_is_claimed_counted_and_told_until_the_next_token():
    state = state_with("d", "a", "b")
    facts = RequestFacts("s", received_ms=1_000.0)
    facts.routed("d", "a", 10)
    seat = PrefillSeat(state, facts, 0, "d", "a", 10)
    assert state.ledger.loads["a"].tokens == 10
    seat.computed()
    assert not state.ledger.loads
    answer = seat.another(1)
    assert (answer.attempt, answer.prefill_worker, answer.prefill_endpoint) == (1, "a", "a:1")
    assert seat.waiting
    assert state.ledger.loads["a"].tokens == 10
    state.set_fleet(state.fleet.answered("a", "a:1", status("a", Role.PREFILL, draining=True)))
    assert seat.another(2).prefill_worker == "b"
    assert (seat.worker, facts.prefill_worker) == ("b", "b")
    assert {name: load.tokens for name, load in state.ledger.loads.items()} == {"b": 10}
    seat.release()
    seat.release()
    assert not state.ledger.loads
    assert facts.preemptions == 2
    assert [(told.after_ms, told.from_worker, told.to_worker) for told in facts.recomputes] == [
        (500, "a", "a"), (500, "a", "b"),
    ]  # fmt: skip
    assert recomputes(state) == {"kept": 1, "moved": 1, "none": 0}
    await state.close()


async def test_where_nobody_may_the_error_is_the_routers_and_nothing_is_claimed():
    state = state_with("d")
    facts = RequestFacts("s")
    seat = PrefillSeat(state, facts, 1, "d", "a", 10)
    with pytest.raises(Unavailable) as caught:
        seat.another(1)
    assert caught.value.reason == "no_prefill_worker"
    assert not state.ledger.loads
    assert [(told.index, told.to_worker, told.reason) for told in facts.recomputes] == [(1, "", "no_prefill_worker")]
    assert recomputes(state) == {"kept": 0, "moved": 0, "none": 1}
    for _ in range(MAX_RECOMPUTES):
        with pytest.raises(Unavailable):
            seat.another(2)
    assert (facts.preemptions, len(facts.recomputes)) == (MAX_RECOMPUTES + 1, MAX_RECOMPUTES)
    await state.close()
