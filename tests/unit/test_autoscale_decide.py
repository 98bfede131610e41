"""The autoscaler's decision: every stage, and what it does when it cannot see."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscale.decide import Counts, Decision, Memory, decide, gpus_of
from cluster.autoscale.policy import Policy, policy_from
from cluster.autoscale.signals import DecodeSignals, PrefillSignals, Signals

NOW_MS = 1_000_000.0
QUICK = "up: {delay_ms: 0, step: 100}\ndown: {delay_ms: 0, step: 100}\n"


def signals(now_ms: float = NOW_MS, *, arrivals: float | None = 5.0, **changes: float | None) -> Signals:
    """Half-busy: 1P + 1D is right. Keys: p_<field> and d_<field>."""
    prefill = PrefillSignals(now_ms, 1, 0.0, 3000.0, 6000.0, 0.0, None)
    decode = DecodeSignals(now_ms, 1, 20.0, 0.0, 64.0, 1000.0, 800.0, 0.0, None)
    for key, value in changes.items():
        if key.startswith("p_"):
            prefill = replace(prefill, **{key[2:]: value})
        else:
            decode = replace(decode, **{key[2:]: value})
    return Signals(prefill, decode, arrivals)


def once(policy: Policy | str, seen: Signals, current: Counts, memory: Memory | None = None) -> Decision:
    known = policy_from(QUICK + policy) if isinstance(policy, str) else policy
    return decide(known, memory or Memory(), seen, current, NOW_MS)[1]


def test_enough_is_left_alone() -> None:
    decision = once("", signals(), Counts(1, 1))
    assert decision.held
    assert decision.target == Counts(1, 1)
    assert decision.inputs["prefill.arriving_tokens_per_s"] == 3000.0


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"p_arriving_tokens_per_s": 12_000.0}, Counts(3, 1)),
        ({"p_backlog_tokens": 60_000.0}, Counts(6, 1)),
        ({"d_running": 60.0, "d_waiting": 60.0}, Counts(1, 3)),
        ({"d_free_pages": 0.0}, Counts(1, 2)),
        ({"d_free_pages": 100.0, "d_quarantined_pages": 700.0}, Counts(1, 2)),
        ({"d_token_ms": 90.0}, Counts(1, 2)),
        # One request alone: a further worker would not make its tokens faster.
        ({"d_token_ms": 90.0, "d_running": 1.0}, Counts(1, 1)),
        ({"p_ttft_ms": 9000.0, "p_queue_ms": 8000.0}, Counts(2, 1)),
        # Late, but not because of a queue at prefill.
        ({"p_ttft_ms": 9000.0, "p_queue_ms": 10.0}, Counts(1, 1)),
    ],
)
def test_slo_mode_grows_the_role_that_is_short(changes: dict[str, float], target: Counts) -> None:
    assert once("", signals(**changes), Counts(1, 1)).target == target


def test_late_answers_ask_for_no_more_while_workers_still_start() -> None:
    late = signals(p_ttft_ms=9000.0, p_queue_ms=8000.0)
    assert once("", late, Counts(2, 1)).target.prefill == 1, "the load alone needs one"
    assert once("", signals(p_ttft_ms=9000.0, p_queue_ms=8000.0, p_ready=2), Counts(2, 1)).target.prefill == 3


def test_utilisation_mode_ignores_the_latencies() -> None:
    seen = signals(p_ttft_ms=9000.0, p_queue_ms=8000.0, d_token_ms=500.0)
    assert once("mode: utilisation", seen, Counts(1, 1)).target == Counts(1, 1)
    assert once("mode: utilisation\nutilisation: {prefill: 0.25}", seen, Counts(1, 1)).target == Counts(2, 1)


def test_work_that_cannot_be_seen_keeps_workers_and_hinders_none() -> None:
    idle = {"d_running": 0.0, "d_unseen": 1.0, "p_arriving_tokens_per_s": 0.0, "p_unseen": 2.0}
    held = once("to_zero: {enabled: true, idle_ms: 1000}", signals(arrivals=0.0, **idle), Counts(2, 3), Memory((), 0.0))
    assert (held.target, held.clamped) == (Counts(2, 3), Counts(1, 1))
    assert "decode does not shrink: 1 worker does not answer" in held.reasons
    assert "prefill does not shrink: 2 workers do not answer" in held.reasons
    assert once("", signals(d_running=120.0, d_unseen=1.0), Counts(1, 2)).target == Counts(1, 3)
    assert once("", signals(d_running=0.0), Counts(1, 3)).target == Counts(1, 1)


BAD = [None, math.nan, math.inf, -math.inf, -1.0, 1e300]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["backlog_tokens", "arriving_tokens_per_s", "worker_tokens_per_s", "queue_ms"])
def test_prefill_holds_on_numbers_that_are_none(name: str, value: float | None) -> None:
    seen = signals(**{f"p_{name}": value}, d_running=120.0)
    decision = once("", seen, Counts(4, 1))
    assert decision.target == Counts(4, 3), "the other role goes on"
    assert any("prefill holds" in reason and name in reason for reason in decision.reasons)


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["running", "waiting", "worker_slots", "pages", "free_pages", "quarantined_pages"])
def test_decode_holds_on_numbers_that_are_none(name: str, value: float | None) -> None:
    decision = once("", signals(**{f"d_{name}": value}, p_arriving_tokens_per_s=12_000.0), Counts(1, 5))
    assert decision.target == Counts(3, 5)
    assert any("decode holds" in reason and name in reason for reason in decision.reasons)


@pytest.mark.parametrize("at_ms", [NOW_MS - 31_000, NOW_MS + 31_000, math.nan, math.inf])
def test_old_and_future_metrics_hold(at_ms: float) -> None:
    seen = signals(p_at_ms=at_ms, d_at_ms=at_ms, p_arriving_tokens_per_s=50_000.0, d_running=500.0)
    decision = once("", seen, Counts(2, 2))
    assert decision.held
    assert len([r for r in decision.reasons if "holds" in r]) == 2


def test_growth_must_be_wished_for_the_whole_delay() -> None:
    policy = policy_from("up: {delay_ms: 10000}")
    memory, targets = Memory(), []
    for second, arriving in enumerate([12_000.0] * 5 + [3000.0] + [12_000.0] * 12):
        now = NOW_MS + second * 1000
        seen = signals(now, p_arriving_tokens_per_s=arriving)
        memory, decision = decide(policy, memory, seen, Counts(1, 1), now)
        targets.append(decision.target.prefill)
    assert targets[:16] == [1] * 16, "the dip began the delay anew"
    assert targets[16] == 3


def test_shrinking_takes_the_most_that_was_wished_during_the_delay() -> None:
    policy = policy_from("down: {delay_ms: 10000, step: 9}")
    memory, current, seen_counts = Memory(), Counts(6, 1), []
    for second in range(25):
        now = NOW_MS + second * 1000
        seen = signals(now, p_arriving_tokens_per_s=12_000.0 if second == 5 else 3000.0)
        memory, decision = decide(policy, memory, seen, current, now)
        current = decision.target
        seen_counts.append(current.prefill)
    assert seen_counts[9] == 6
    assert seen_counts[10] == 3
    assert seen_counts[14] == 3
    assert seen_counts[16] == 1


def test_flapping_changes_nothing() -> None:
    policy = policy_from("up: {delay_ms: 10000}\ndown: {delay_ms: 10000}")
    memory, current, changes = Memory(), Counts(2, 1), 0
    for second in range(600):
        now = NOW_MS + second * 1000
        seen = signals(now, p_arriving_tokens_per_s=12_000.0 if second % 10 < 5 else 1000.0)
        memory, decision = decide(policy, memory, seen, current, now)
        changes += not decision.held
        current = decision.target
    assert changes == 0


def test_a_clock_that_jumps_begins_the_delays_again() -> None:
    policy = policy_from("up: {delay_ms: 10000}")
    memory, _ = decide(policy, Memory(), signals(p_arriving_tokens_per_s=12_000.0), Counts(1, 1), NOW_MS)
    for now in (NOW_MS - 3_600_000, NOW_MS + 3_600_000):
        seen = signals(now, p_arriving_tokens_per_s=12_000.0)
        _, decision = decide(policy, memory, seen, Counts(1, 1), now)
        assert decision.held
        assert any("delays begin again" in reason for reason in decision.reasons)


def test_one_step_is_limited() -> None:
    policy = policy_from("up: {delay_ms: 0, step: 2}\ndown: {delay_ms: 0, step: 1}\nprefill: {high: 50}")
    busy = signals(p_arriving_tokens_per_s=120_000.0)
    assert decide(policy, Memory(), busy, Counts(3, 1), NOW_MS)[1].target.prefill == 5
    assert decide(policy, Memory(), signals(), Counts(9, 1), NOW_MS)[1].target.prefill == 8


def test_budget_leaves_each_role_the_same_share_of_its_wish() -> None:
    busy = signals(p_arriving_tokens_per_s=26_000.0, d_running=120.0)
    decision = once("gpus: {budget: 48}", busy, Counts(1, 1))
    assert decision.raw == Counts(7, 3)
    assert decision.target == Counts(4, 2)
    assert any("budget of 48 GPUs" in reason for reason in decision.reasons)


def test_a_speed_of_almost_nothing_asks_for_the_most() -> None:
    assert once("", signals(p_worker_tokens_per_s=5e-324), Counts(1, 1)).target == Counts(8, 1)


def test_a_role_at_its_most_does_not_stop_the_other() -> None:
    busy = signals(p_arriving_tokens_per_s=90_000.0, d_running=120.0)
    assert once("prefill: {high: 2}", busy, Counts(2, 1)).target == Counts(2, 3)


def test_ratio_raises_the_smaller_role_and_bounds_come_first() -> None:
    busy = signals(p_arriving_tokens_per_s=26_000.0)
    assert once("ratio: {high: 2.0}", busy, Counts(1, 1)).target == Counts(7, 4)
    assert once("ratio: {high: 2.0}\ndecode: {high: 2}", busy, Counts(1, 1)).target == Counts(4, 2)
    assert once("ratio: {low: 1.0}", signals(d_running=200.0), Counts(1, 1)).target == Counts(5, 5)


def test_the_budget_holds_while_one_role_waits_for_its_delay() -> None:
    policy = policy_from("gpus: {budget: 32}\nup: {delay_ms: 0, step: 9}\ndown: {delay_ms: 600000}")
    decision = decide(policy, Memory(), signals(p_arriving_tokens_per_s=12_000.0), Counts(1, 3), NOW_MS)[1]
    assert decision.clamped == Counts(3, 1)
    assert decision.target == Counts(1, 3)
    assert any("waits for the other role" in reason for reason in decision.reasons)


ZERO = "to_zero: {enabled: true, idle_ms: 60000}\nprefill: {low: 0}\ndecode: {low: 0}\n"


def idle_signals(now_ms: float) -> Signals:
    return signals(now_ms, arrivals=0.0, p_arriving_tokens_per_s=0.0, d_running=0.0, d_free_pages=1000.0)


def test_to_zero_after_a_long_silence_and_back_at_once() -> None:
    policy = policy_from(QUICK + ZERO)
    memory, current = Memory(), Counts(1, 1)
    for second in range(0, 90, 10):
        now = NOW_MS + second * 1000
        memory, decision = decide(policy, memory, idle_signals(now), current, now)
        current = decision.target
        assert current == (Counts(0, 0) if second >= 60 else Counts(1, 1))
    now = NOW_MS + 90_000
    seen = signals(now, arrivals=1.0, p_ready=0, p_backlog_tokens=500.0, d_ready=0, d_running=0.0, d_waiting=1.0)
    _, decision = decide(policy, memory, seen, current, now)
    assert decision.target == Counts(1, 1)
    assert any("no delay" in reason for reason in decision.reasons)


def test_never_to_zero_while_the_metrics_are_away() -> None:
    policy = policy_from(QUICK + ZERO)
    memory, current = Memory(), Counts(1, 1)
    for second in range(0, 300, 10):
        now = NOW_MS + second * 1000
        seen = replace(idle_signals(now), decode=replace(idle_signals(now).decode, running=None))
        memory, decision = decide(policy, memory, seen, current, now)
        assert decision.held


numbers = st.one_of(
    st.none(),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0]),
    st.floats(min_value=0, max_value=1e9, allow_nan=False),
)
policies = st.builds(
    lambda low_p, more_p, low_d, more_d, budget, ratio, mode: (
        f"mode: {mode}\nprefill: {{low: {low_p}, high: {low_p + more_p}}}\n"
        f"decode: {{low: {low_d}, high: {low_d + more_d}}}\n"
        f"gpus: {{budget: {(low_p + low_d) * 8 + budget}}}\nratio: {{high: {ratio}}}\n"
        "up: {delay_ms: 0, step: 50}\ndown: {delay_ms: 0, step: 50}"
    ),
    st.integers(1, 5), st.integers(0, 20), st.integers(1, 5), st.integers(0, 20), st.integers(0, 200),
    st.sampled_from([0, 6, 10.5]), st.sampled_from(["slo", "utilisation"]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    text=policies,
    values=st.lists(numbers, min_size=12, max_size=12),
    times=st.lists(st.sampled_from([0.0, 1.0, 1000.0, 40_000.0, -5000.0, math.nan]), min_size=4, max_size=4),
)
def test_whatever_is_measured_the_target_is_within_bounds_and_budget(
    text: str, values: list[float | None], times: list[float]
) -> None:
    policy = policy_from(text)
    memory, current, now = Memory(), Counts(policy.prefill.low, policy.decode.low), NOW_MS
    for age in times:
        now += 0 if math.isnan(age) else age
        seen = Signals(
            PrefillSignals(now - age, 1, *values[:5]),  # type: ignore[arg-type]  # a broken meter tells anything
            DecodeSignals(now, 1, *values[5:12]),  # type: ignore[arg-type]
            values[0],
        )
        memory, decision = decide(policy, memory, seen, current, now)
        current = decision.target
        assert policy.prefill.low <= current.prefill <= policy.prefill.high
        assert policy.decode.low <= current.decode <= policy.decode.high
        assert gpus_of(policy, current) <= policy.gpus.budget
        assert decision.reasons
