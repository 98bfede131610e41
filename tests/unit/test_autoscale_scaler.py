"""From what workers tell to signals: differences within one life, and missing rather than wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.autoscale.decide import Counts
from cluster.autoscale.scaler import Meter, Scaler, Told, decision_message
from genlock.v1 import worker_pb2
from kvstore.errors import InvalidInput
from wire.load import LoadTally


def status(incarnation: int = 1, *, running: int = 0, free: int = 100, **load: int) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(
        incarnation=incarnation,
        running_requests=running,
        pool=worker_pb2.PoolStatus(pages=100, free=free, quarantined=3),
        load=worker_pb2.LoadCounters(**{"slots": 8, **load}),
    )


def prefill(status_: worker_pb2.WorkerStatus | None, name: str = "prefill-0", ready: bool = True) -> Told:
    return Told(name, "prefill", ready, status_)


def decode(status_: worker_pb2.WorkerStatus | None, name: str = "decode-0", ready: bool = True) -> Told:
    return Told(name, "decode", ready, status_)


def test_rates_are_differences_over_the_window() -> None:
    meter = Meter(window_ms=10_000)
    for second in range(31):
        told = [
            prefill(status(arrived_tokens=100 * second, busy_ms=500 * second, computed_tokens=100 * second,
                           queued=second, queue_ms=40 * second, backlog_tokens=7)),
            decode(status(running=4, free=60, token_count=10 * second, token_ms=200 * second, first_tokens=second,
                          first_token_ms=90 * second, arrived_requests=second)),
        ]  # fmt: skip
        seen = meter.read(told, second * 1000.0)
    assert seen.prefill.arriving_tokens_per_s == pytest.approx(100.0)
    assert seen.prefill.worker_tokens_per_s == pytest.approx(200.0)
    assert seen.prefill.queue_ms == pytest.approx(40.0)
    assert seen.prefill.ttft_ms == pytest.approx(90.0)
    assert seen.prefill.backlog_tokens == 7
    assert seen.decode.token_ms == pytest.approx(20.0)
    assert (seen.decode.running, seen.decode.free_pages, seen.decode.quarantined_pages) == (4, 60, 3)
    assert seen.arrivals == pytest.approx(10.0, abs=1)


def test_a_new_life_begins_at_nothing() -> None:
    meter = Meter()
    meter.read([decode(status(1, first_tokens=1000, first_token_ms=9_000_000))], 0.0)
    seen = meter.read([decode(status(2, first_tokens=2, first_token_ms=100))], 1000.0)
    assert seen.prefill.ttft_ms == pytest.approx(50.0)


def test_a_ready_worker_that_tells_nothing_makes_its_role_missing() -> None:
    meter = Meter()
    seen = meter.read([prefill(status()), prefill(None, "prefill-1"), decode(status())], 0.0)
    assert seen.prefill.backlog_tokens is None
    assert seen.decode.running == 0
    seen = meter.read([prefill(status()), prefill(None, "prefill-1", ready=False), decode(status())], 1.0)
    assert seen.prefill.backlog_tokens == 0, "one that is not ready is not missed"
    assert (seen.prefill.unseen, seen.decode.unseen) == (1, 0), "but what it does is not known"


def test_the_speed_is_remembered_while_nothing_is_computed() -> None:
    meter = Meter(window_ms=1000)
    meter.read([prefill(status(busy_ms=0, computed_tokens=0))], 0.0)
    meter.read([prefill(status(busy_ms=1000, computed_tokens=500))], 500.0)
    for at in range(1, 20):
        seen = meter.read([prefill(status(busy_ms=1000, computed_tokens=500))], at * 1000.0)
    assert seen.prefill.worker_tokens_per_s == pytest.approx(500.0)


def test_scaler_grows_under_load_and_forgets_wishes_with_the_policy() -> None:
    scaler = Scaler(window_ms=5000)
    policy = "up: {delay_ms: 2000}"
    targets = []
    for second in range(8):
        told = [prefill(status()), decode(status(running=8, arrived_requests=second))]
        decision = scaler.decide(policy, told, Counts(1, 1), second * 1000.0)
        targets.append(decision.target.decode)
    assert targets[:2] == [1, 1]
    assert targets[2] == 2
    decision = scaler.decide("up: {delay_ms: 2001}", told, Counts(1, 1), 8000.0)
    assert decision.target.decode == 1
    message = decision_message(decision, 5)
    assert message.held
    assert message.inputs["decode.running"] == 8
    assert message.reasons


def test_the_door_wakes_a_fleet_of_zero() -> None:
    scaler = Scaler()
    policy = "to_zero: {enabled: true, idle_ms: 1000}\nprefill: {low: 0}\ndecode: {low: 0}"
    assert scaler.decide(policy, [], Counts(0, 0), 0.0, at_door=0.0).target == Counts(0, 0)
    assert scaler.decide(policy, [], Counts(0, 0), 1000.0, at_door=2.0).target == Counts(1, 1)


@pytest.mark.parametrize(("at_door", "target"), [(0.0, Counts(0, 0)), (None, Counts(1, 1))])
def test_a_fleet_goes_to_zero_only_where_a_door_can_wake_it(at_door: float | None, target: Counts) -> None:
    scaler = Scaler()
    policy = "to_zero: {enabled: true, idle_ms: 1000}\nprefill: {low: 0}\ndecode: {low: 0}\ndown: {delay_ms: 0}"
    told = [prefill(status()), decode(status())]
    for at_ms in (0.0, 1000.0, 2000.0):
        decision = scaler.decide(policy, told, Counts(1, 1), at_ms, at_door)
    assert decision.target == target


@pytest.mark.parametrize("age_ms", [1000.0, 1001.0])
def test_answers_that_are_old_hold_their_role_and_no_other(age_ms: float) -> None:
    now_ms = 60_000.0
    busy = replace(decode(status(running=32)), at_ms=now_ms - age_ms)
    told = [
        replace(prefill(status()), at_ms=now_ms),
        replace(decode(status(running=32), "decode-1"), at_ms=now_ms),
        busy,
    ]
    policy = "stale_ms: 1000\nup: {delay_ms: 0}"
    decision = Scaler().decide(policy, told, Counts(1, 2), now_ms)
    held = age_ms > 1000
    assert (decision.target.decode == 2) is held
    assert any(reason.startswith("decode holds: metrics are") for reason in decision.reasons) is held
    assert not any(reason.startswith("prefill holds") for reason in decision.reasons)


def test_a_policy_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidInput):
        Scaler().decide("mode: fast", [], Counts(1, 1), 0.0)


def test_the_tally_sums() -> None:
    tally = LoadTally()
    tally.arrived(10)
    tally.step(3, 6, 4)
    tally.waited(7.9)
    tally.first_token(12.5)
    read = tally.read(backlog_tokens=5, slots=8)
    assert (read.arrived_tokens, read.busy_ms, read.computed_tokens, read.token_ms, read.token_count) == (
        10,
        4,
        6,
        12,
        3,
    )
    assert (read.queue_ms, read.queued, read.first_token_ms, read.first_tokens) == (7, 1, 12, 1)
    assert (read.backlog_tokens, read.slots) == (5, 8)
