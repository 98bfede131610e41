"""One decision of the autoscaler: (policy, memory, signals, current counts, now) -> (memory, decision). Pure.

Four stages, each kept in the decision: what the signals alone ask for (raw), what bounds, budget and ratio leave of it
(clamped), what has been asked for long enough (delayed), and what one step may do of that (target). Missing, not finite
or old signals hold a role where it is. Windows instead of timers: growth takes the least that was wished during the
whole up-delay, shrinking the most that was wished during the whole down-delay, so flapping signals change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from cluster.autoscale.policy import Bounds, Mode, Policy
from cluster.autoscale.signals import DecodeSignals, PrefillSignals, Signals, fault, flat
from cluster.roles import MAX_WORKERS

# Wishes that are kept. Where a window has more, memory does not reach back far enough and the fleet does not change.
MAX_WISHES = 4096


@dataclass(frozen=True)
class Counts:
    prefill: int
    decode: int


@dataclass(frozen=True)
class Wish:
    at_ms: float
    counts: Counts


@dataclass(frozen=True)
class Memory:
    """What a decision leaves for the next one."""

    wishes: tuple[Wish, ...] = ()
    # When the last request was seen; None: not yet.
    busy_ms: float | None = None
    last_ms: float = -math.inf


@dataclass(frozen=True)
class Decision:
    at_ms: float
    inputs: Mapping[str, float]
    before: Counts
    raw: Counts
    clamped: Counts
    delayed: Counts
    target: Counts
    reasons: tuple[str, ...]

    @property
    def held(self) -> bool:
        return self.target == self.before


@dataclass
class _Notes:
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)


def decide(policy: Policy, memory: Memory, signals: Signals, current: Counts, now_ms: float) -> tuple[Memory, Decision]:
    """`current`: the counts that are asked for now, workers that still start included. The target is always within the
    bounds of the policy, or `current` where that is outside and nothing may be said about it."""
    notes = _Notes()
    memory = _after_jump(memory, now_ms, policy.stale_ms, notes)
    usable_p = _usable("prefill", signals.prefill, policy, now_ms, notes)
    usable_d = _usable("decode", signals.decode, policy, now_ms, notes)
    raw_p = _prefill(policy, signals.prefill, current, notes) if usable_p else current.prefill
    raw_d = _decode(policy, signals.decode, current, notes) if usable_d else current.decode
    memory, idle = _idle(policy, memory, signals, usable_p and usable_d, now_ms)
    raw = Counts(raw_p, raw_d)
    clamped = _clamp(policy, raw, current, idle, notes)
    wishes = _kept(memory.wishes, Wish(now_ms, clamped), max(policy.up.delay_ms, policy.down.delay_ms))
    delayed = _delayed(policy, wishes, current, now_ms, notes, wake=_wakes(current, clamped))
    target = _stepped(policy, delayed, current, notes, wake=_wakes(current, clamped), idle=idle)
    # A role whose signals cannot be used stays, whatever the other one's budget or ratio would like.
    target = Counts(
        target.prefill if usable_p or idle else current.prefill, target.decode if usable_d or idle else current.decode
    )
    target = _with_unseen(signals, target, current, notes)
    target = _fits(policy, target, current, notes)
    if target == current and not notes.lines:
        notes.add("enough")
    decision = Decision(
        now_ms, MappingProxyType(dict(flat(signals))), current, raw, clamped, delayed, target, tuple(notes.lines)
    )
    return replace(memory, wishes=wishes, last_ms=now_ms), decision


def _after_jump(memory: Memory, now_ms: float, max_gap_ms: float, notes: _Notes) -> Memory:
    """A clock that went back, or a time without decisions, makes the kept wishes meaningless."""
    gap_ms = now_ms - memory.last_ms
    if gap_ms < 0:
        notes.add(f"the clock went back by {-gap_ms / 1000:.1f} s: delays begin again")
    elif gap_ms > max_gap_ms and memory.wishes:
        notes.add(f"no decision for {gap_ms / 1000:.0f} s: delays begin again")
    else:
        return memory
    return Memory(busy_ms=None if memory.busy_ms is None else now_ms)


def _usable(name: str, role: PrefillSignals | DecodeSignals, policy: Policy, now_ms: float, notes: _Notes) -> bool:
    wrong = fault(role, now_ms, policy.stale_ms)
    if wrong:
        notes.add(f"{name} holds: {wrong}")
    return not wrong


def _with_unseen(signals: Signals, target: Counts, current: Counts, notes: _Notes) -> Counts:
    """What cannot be seen may be work: no reason to have fewer workers, and none against more."""

    def role(name: str, unseen: float, want: int, have: int) -> int:
        if not unseen or want >= have:
            return want
        notes.add(f"{name} does not shrink: {unseen:.0f} worker{'s do' if unseen > 1 else ' does'} not answer")
        return have

    return Counts(
        role("prefill", signals.prefill.unseen, target.prefill, current.prefill),
        role("decode", signals.decode.unseen, target.decode, current.decode),
    )


def _ceil(value: float) -> int:
    # 3.0000000001 workers are 3. A speed of almost nothing would ask for more than there are numbers.
    return math.ceil(min(value, MAX_WORKERS) - 1e-6)


# --- what the signals ask for -----------------------------------------------------------------------------------------


def _prefill(policy: Policy, signals: PrefillSignals, current: Counts, notes: _Notes) -> int:
    backlog, arriving = signals.backlog_tokens or 0.0, signals.arriving_tokens_per_s or 0.0
    speed = signals.worker_tokens_per_s or 0.0
    if speed <= 0:
        # Nothing was ever measured: all that can be said is whether there is work.
        return max(current.prefill, 1) if backlog + arriving > 0 else current.prefill
    steady = arriving / (speed * policy.utilisation.prefill)
    if policy.mode is Mode.UTILISATION:
        # The backlog counts as work of one look-back window of a second.
        wanted = _ceil(max(steady, backlog / speed if backlog > arriving else 0.0))
        notes.add(f"prefill: {arriving:.0f} tokens/s arrive, one worker does {speed:.0f}: {wanted}")
        return wanted
    # A backlog beyond what is computed in time anyway is worked off in the time that growth takes: more workers than
    # that would come too late for it.
    late_tokens = max(0.0, backlog - arriving * policy.slo.ttft_ms / 1000)
    drain = late_tokens / (speed * max(policy.slo.ttft_ms, policy.up.delay_ms) / 1000)
    wanted = _ceil(steady + drain)
    late = signals.ttft_ms is not None and signals.ttft_ms > policy.slo.ttft_ms
    # Only a queue at prefill is mended by prefill workers, and not before those that still start are there.
    if late and (signals.queue_ms or 0.0) > policy.slo.ttft_ms / 4 and (signals.ready or 0) >= current.prefill:
        wanted = max(wanted, current.prefill + 1)
    notes.add(
        f"prefill: {arriving:.0f} tokens/s arrive, {backlog:.0f} wait, one worker does {speed:.0f}/s: {wanted}"
        + (f"; first token after {signals.ttft_ms:.0f} ms, target {policy.slo.ttft_ms:.0f}" if late else "")
    )
    return wanted


def _decode(policy: Policy, signals: DecodeSignals, current: Counts, notes: _Notes) -> int:
    ready = signals.ready or 0
    requests = (signals.running or 0.0) + (signals.waiting or 0.0)
    slots = signals.worker_slots or 0.0
    if slots <= 0 or ready == 0:
        return max(current.decode, 1) if requests > 0 else current.decode
    by_slots = requests / (slots * policy.utilisation.decode)
    pages, free = signals.pages or 0.0, signals.free_pages or 0.0
    by_pages = 0.0
    if pages > 0:
        # Quarantined pages are gone for now: they count as used.
        by_pages = ready * (1 - min(1.0, free / pages)) / policy.utilisation.pages
    wanted = max(by_slots, by_pages)
    why = f"decode: {requests:.0f} requests in {ready} x {slots:.0f} slots"
    if policy.mode is Mode.SLO and signals.token_ms is not None and (signals.running or 0.0) > 0:
        # A batch half as large takes at best half as long: a cautious straight line. Where workers run less than two
        # requests each, the time is the model's own and no further worker mends it.
        if signals.token_ms <= policy.slo.token_ms:
            wanted = max(wanted, ready * signals.token_ms / policy.slo.token_ms * min(1.0, by_slots / ready))
        elif (signals.running or 0.0) >= 2 * ready:
            wanted = max(wanted, ready * min(2.0, signals.token_ms / policy.slo.token_ms), ready + 1)
            why += f", {signals.token_ms:.1f} ms a token, target {policy.slo.token_ms:.1f}"
    count = _ceil(wanted)
    quarantined = signals.quarantined_pages or 0.0
    notes.add(why + (f", {quarantined:.0f} pages in quarantine" if quarantined else "") + f": {count}")
    return count


def _idle(policy: Policy, memory: Memory, signals: Signals, usable: bool, now_ms: float) -> tuple[Memory, bool]:
    """Whether the fleet may go to zero. What cannot be seen counts as busy."""
    arrivals = signals.arrivals
    quiet = (
        usable
        and arrivals == 0
        and not signals.prefill.backlog_tokens
        and not signals.decode.running
        and not signals.decode.waiting
        and not signals.prefill.unseen
        and not signals.decode.unseen
    )
    if not quiet or memory.busy_ms is None:
        return replace(memory, busy_ms=now_ms), False
    return memory, policy.to_zero.enabled and now_ms - memory.busy_ms >= policy.to_zero.idle_ms


# --- bounds, budget, ratio --------------------------------------------------------------------------------------------


def _clamp(policy: Policy, raw: Counts, current: Counts, idle: bool, notes: _Notes) -> Counts:
    if idle:
        low = Counts(policy.prefill.low, policy.decode.low)
        notes.add(f"no request for {policy.to_zero.idle_ms / 1000:.0f} s: down to {low.prefill}P + {low.decode}D")
        return low
    if policy.to_zero.enabled and raw == current == Counts(0, 0):
        return raw
    counts = Counts(_within(policy.prefill, raw.prefill), _within(policy.decode, raw.decode))
    if counts != raw:
        notes.add(f"bounds: {raw.prefill}P + {raw.decode}D becomes {counts.prefill}P + {counts.decode}D")
    ratio = _in_ratio(policy, counts)
    if ratio != counts:
        notes.add(f"ratio: {counts.prefill}P + {counts.decode}D becomes {ratio.prefill}P + {ratio.decode}D")
    budget = _in_budget(policy, ratio)
    if budget != ratio:
        notes.add(
            f"budget of {policy.gpus.budget} GPUs: {ratio.prefill}P + {ratio.decode}D becomes "
            f"{budget.prefill}P + {budget.decode}D"
        )
    return budget


def _within(bounds: Bounds, count: int) -> int:
    # Zero is reached by idleness only; a fleet that runs has one of each.
    return max(1, bounds.low, min(bounds.high, count))


def _in_ratio(policy: Policy, counts: Counts) -> Counts:
    """Raises the smaller role within its bounds; where that is not enough, lowers the larger one."""
    prefill, decode = counts.prefill, counts.decode
    low, high = policy.ratio.low, policy.ratio.high
    if low and prefill < low * decode:
        prefill = min(policy.prefill.high, _ceil(low * decode))
        decode = max(1, policy.decode.low, min(decode, math.floor(prefill / low + 1e-6)))
    if high and prefill > high * decode:
        decode = min(policy.decode.high, _ceil(prefill / high))
        prefill = max(1, policy.prefill.low, min(prefill, math.floor(high * decode + 1e-6)))
    return Counts(prefill, decode)


def gpus_of(policy: Policy, counts: Counts) -> int:
    return counts.prefill * policy.gpus.per_prefill + counts.decode * policy.gpus.per_decode


def _in_budget(policy: Policy, counts: Counts) -> Counts:
    """Takes workers one by one, from the role that keeps the larger share of its wish, until the budget holds."""
    budget = policy.gpus.budget
    if not budget:
        return counts
    prefill, decode = counts.prefill, counts.decode
    low_p, low_d = max(1, policy.prefill.low), max(1, policy.decode.low)
    while gpus_of(policy, Counts(prefill, decode)) > budget and (prefill > low_p or decode > low_d):
        # What would be left of each wish after a worker is taken; on a tie prefill gives.
        left_p = (prefill - 1) / counts.prefill if prefill > low_p else -1.0
        left_d = (decode - 1) / counts.decode if decode > low_d else -1.0
        if left_p >= left_d:
            prefill -= 1
        else:
            decode -= 1
    return _lowered_to_ratio(policy, Counts(prefill, decode))


def _lowered_to_ratio(policy: Policy, counts: Counts) -> Counts:
    """Lowers the larger role to the ratio, never below its least."""
    prefill, decode = counts.prefill, counts.decode
    if policy.ratio.high:
        prefill = min(prefill, max(1, policy.prefill.low, math.floor(policy.ratio.high * decode + 1e-6)))
    if policy.ratio.low:
        decode = min(decode, max(1, policy.decode.low, math.floor(prefill / policy.ratio.low + 1e-6)))
    return Counts(prefill, decode)


# --- delays and steps -------------------------------------------------------------------------------------------------


def _kept(wishes: tuple[Wish, ...], newest: Wish, window_ms: float) -> tuple[Wish, ...]:
    """The wishes of the window, and the last one before it: what was wished when the window began."""
    start = newest.at_ms - window_ms
    older = [wish for wish in wishes if wish.at_ms <= start]
    inside = [wish for wish in wishes if wish.at_ms > start]
    kept = (*older[-1:], *inside)
    if kept and kept[-1].counts == newest.counts and len(kept) > 1 and kept[-2].counts == newest.counts:
        kept = kept[:-1]  # a wish that goes on is told by its first and its last
    return (*kept, newest)[-MAX_WISHES:]


def _window(wishes: tuple[Wish, ...], now_ms: float, delay_ms: float) -> tuple[Wish, ...] | None:
    """Wishes in force during the last `delay_ms`; None when the memory does not reach back so far."""
    start = now_ms - delay_ms
    if not wishes or wishes[0].at_ms > start:
        return None
    before = [wish for wish in wishes if wish.at_ms <= start]
    return (before[-1], *(wish for wish in wishes if wish.at_ms > start))


def _wakes(current: Counts, clamped: Counts) -> bool:
    """From zero, nobody is served meanwhile: no delay."""
    return min(current.prefill, current.decode) == 0 and min(clamped.prefill, clamped.decode) > 0


def _delayed(
    policy: Policy, wishes: tuple[Wish, ...], current: Counts, now_ms: float, notes: _Notes, *, wake: bool
) -> Counts:
    newest = wishes[-1].counts
    if wake:
        notes.add("woken from zero: no delay")
        return newest
    up = _window(wishes, now_ms, policy.up.delay_ms)
    down = _window(wishes, now_ms, policy.down.delay_ms)

    def role(name: str, want: int, have: int) -> int:
        # One direction at a time: a role that wants to grow does not look at its past wishes to shrink.
        if want > have:
            least = have if up is None else min(getattr(wish.counts, name) for wish in up)
            if least <= have:
                notes.add(f"{name}: up to {want} must be wished for {policy.up.delay_ms / 1000:.0f} s")
            return max(have, least)
        if want < have:
            most = have if down is None else max(getattr(wish.counts, name) for wish in down)
            if most >= have:
                notes.add(f"{name}: down to {want} must be wished for {policy.down.delay_ms / 1000:.0f} s")
            return min(have, most)
        return have

    return Counts(role("prefill", newest.prefill, current.prefill), role("decode", newest.decode, current.decode))


def _stepped(policy: Policy, wanted: Counts, current: Counts, notes: _Notes, *, wake: bool, idle: bool) -> Counts:
    if wake or (idle and wanted != current):
        return wanted

    def role(name: str, want: int, have: int) -> int:
        got = max(have - policy.down.step, min(have + policy.up.step, want))
        if got != want:
            notes.add(f"{name}: one step goes from {have} to {got}, not to {want}")
        return got

    return Counts(role("prefill", wanted.prefill, current.prefill), role("decode", wanted.decode, current.decode))


def _fits(policy: Policy, target: Counts, current: Counts, notes: _Notes) -> Counts:
    """Delays and holds move the roles apart from each other: what would grow past the budget does not grow."""
    budget = policy.gpus.budget
    if not budget or gpus_of(policy, target) <= budget:
        return target
    held = Counts(min(target.prefill, current.prefill), min(target.decode, current.decode))
    grown = (Counts(target.prefill, held.decode), Counts(held.prefill, target.decode), held)
    fitting = next((counts for counts in grown if gpus_of(policy, counts) <= budget), held)
    if fitting != target:
        notes.add(f"budget of {budget} GPUs: waits for the other role to shrink")
    return fitting
