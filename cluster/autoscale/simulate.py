"""A policy on a trace, and the best fixed fleet of the same GPU-hours on the same trace. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.autoscale.decide import Counts, Decision, Memory, decide
from cluster.autoscale.fleet import ModelFleet, Served, Speeds
from cluster.autoscale.policy import Policy
from cluster.autoscale.signals import Signals
from cluster.autoscale.traces import Trace

STEP_S = 0.1
DECIDE_S = 5.0
# After the last request: time in which the rest must finish.
TAIL_S = 600.0


@dataclass(frozen=True)
class Outcome:
    """What clients saw and what it cost. Attainment: share of all requests within both targets; unfinished ones
    count as missed."""

    requests: int
    unfinished: int
    attainment: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    token_p50_ms: float
    token_p99_ms: float
    gpu_hours: float


@dataclass(frozen=True)
class Point:
    """One moment for a plot."""

    at_s: float
    target: Counts
    raw: Counts
    arriving_tokens_per_s: float
    running: float


@dataclass(frozen=True)
class Run:
    outcome: Outcome
    points: tuple[Point, ...]
    decisions: tuple[Decision, ...]
    served: tuple[Served, ...]
    changes: int


@dataclass(frozen=True)
class Comparison:
    scaled: Run
    fixed: Run
    fixed_counts: Counts


def run_policy(
    policy: Policy,
    trace: Trace,
    speeds: Speeds,
    start: Counts | None = None,
    progress: Callable[[float], None] = lambda _share: None,
) -> Run:
    """`start`: the counts at the beginning; by default the policy's least."""
    counts = start or Counts(max(1, policy.prefill.low), max(1, policy.decode.low))
    fleet = ModelFleet(speeds, counts)
    memory = Memory()
    decisions: list[Decision] = []
    points: list[Point] = []
    changes = 0

    def control(now_s: float) -> None:
        nonlocal memory, changes
        signals = _seen(fleet.signals(now_s), trace, now_s)
        memory, decision = decide(policy, memory, signals, fleet.wanted, now_s * 1000)
        decisions.append(decision)
        if decision.target != fleet.wanted:
            fleet.scale(decision.target, now_s)
            changes += 1
        points.append(
            Point(
                now_s,
                decision.target,
                decision.raw,
                decision.inputs.get("prefill.arriving_tokens_per_s", math.nan),
                decision.inputs.get("decode.running", math.nan),
            )
        )

    _drive(fleet, trace, control, progress)
    return Run(_outcome(policy, trace, fleet), tuple(points), tuple(decisions), tuple(fleet.served), changes)


def run_fixed(policy: Policy, trace: Trace, speeds: Speeds, counts: Counts) -> Run:
    fleet = ModelFleet(speeds, counts)
    _drive(fleet, trace, lambda _now_s: None, lambda _share: None)
    return Run(_outcome(policy, trace, fleet), (), (), tuple(fleet.served), 0)


def compare(
    policy: Policy, trace: Trace, speeds: Speeds, progress: Callable[[float], None] = lambda _share: None
) -> Comparison:
    """The policy against the best fixed split of the same GPU-hours over the trace, rounded to whole workers."""
    scaled = run_policy(policy, trace, speeds, progress=lambda share: progress(share / 2))
    hours = max(trace.seconds, 1.0) / 3600
    gpus = scaled.outcome.gpu_hours / hours
    splits = fixed_splits(policy, gpus)
    best: tuple[Run, Counts] | None = None
    for index, counts in enumerate(splits):
        run = run_fixed(policy, trace, speeds, counts)
        progress(0.5 + (index + 1) / len(splits) / 2)
        if best is None or run.outcome.attainment > best[0].outcome.attainment:
            best = run, counts
    assert best is not None
    return Comparison(scaled, *best)


def fixed_splits(policy: Policy, gpus: float) -> list[Counts]:
    """All splits that spend `gpus`, each rounded to the nearest whole worker."""
    per_p, per_d = max(1, policy.gpus.per_prefill), max(1, policy.gpus.per_decode)
    most = max(1, round((gpus - per_d) / per_p))
    return [Counts(prefill, max(1, round((gpus - prefill * per_p) / per_d))) for prefill in range(1, most + 1)]


def _drive(
    fleet: ModelFleet, trace: Trace, control: Callable[[float], None], progress: Callable[[float], None]
) -> None:
    end_s = trace.seconds + TAIL_S
    arrivals = iter(trace.arrivals)
    coming = next(arrivals, None)
    next_decision_s = 0.0
    tick = 0
    while (now_s := tick * STEP_S) <= end_s and (coming is not None or fleet.unfinished):
        while coming is not None and coming.at_s <= now_s:
            fleet.arrive(coming)
            coming = next(arrivals, None)
        fleet.advance(now_s, STEP_S)
        if now_s >= next_decision_s:
            control(now_s)
            progress(min(1.0, now_s / end_s))
            next_decision_s += DECIDE_S
        tick += 1
    progress(1.0)


def _seen(signals: Signals, trace: Trace, now_s: float) -> Signals:
    """During an outage a role's numbers are missing."""
    if not any(begin <= now_s < end for begin, end in trace.outages):
        return signals
    return Signals(
        replace(signals.prefill, backlog_tokens=None, arriving_tokens_per_s=math.nan),
        replace(signals.decode, running=None, free_pages=math.nan),
        None,
    )


def _outcome(policy: Policy, trace: Trace, fleet: ModelFleet) -> Outcome:
    served = fleet.served
    good = sum(one.ttft_ms <= policy.slo.ttft_ms and one.token_ms <= policy.slo.token_ms for one in served)
    first = sorted(one.ttft_ms for one in served)
    each = sorted(one.token_ms for one in served)
    prefill_s, decode_s = fleet.worker_s
    return Outcome(
        requests=len(trace.arrivals),
        unfinished=len(trace.arrivals) - len(served),
        attainment=good / len(trace.arrivals),
        ttft_p50_ms=_percentile(first, 0.5),
        ttft_p99_ms=_percentile(first, 0.99),
        token_p50_ms=_percentile(each, 0.5),
        token_p99_ms=_percentile(each, 0.99),
        gpu_hours=(prefill_s * max(1, policy.gpus.per_prefill) + decode_s * max(1, policy.gpus.per_decode)) / 3600,
    )


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan
