"""What the autoscaler looks at. Pure. A value that nobody measured is None, never a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class PrefillSignals:
    # Unix milliseconds of the oldest measurement in here.
    at_ms: float
    ready: int | None
    # Tokens of prompts that wait or are being computed, all workers together.
    backlog_tokens: float | None
    # Prompt tokens that came in a second, over the last window.
    arriving_tokens_per_s: float | None
    # What one worker computes in a second when it is busy.
    worker_tokens_per_s: float | None
    # How long requests of the last window waited before their prefill began.
    queue_ms: float | None
    # Measured from end to end; None when nothing finished in the window.
    ttft_ms: float | None = None
    # Workers that are not ready and do not answer: what they do cannot be seen.
    unseen: float = 0.0


@dataclass(frozen=True)
class DecodeSignals:
    at_ms: float
    ready: int | None
    running: float | None
    waiting: float | None
    # Requests that one worker may run at once.
    worker_slots: float | None
    pages: float | None
    # Free for new requests; quarantined pages are not.
    free_pages: float | None
    quarantined_pages: float | None
    # Time for each token after the first; None when nothing was generated in the window.
    token_ms: float | None = None
    # Workers that are not ready and do not answer: what they do cannot be seen.
    unseen: float = 0.0


@dataclass(frozen=True)
class Signals:
    prefill: PrefillSignals
    decode: DecodeSignals
    # Requests that came in the last window, and those that wait for a fleet to exist.
    arrivals: float | None = 0.0


# May be missing: nothing finished or nothing was generated lately.
_OPTIONAL = frozenset({"ttft_ms", "token_ms"})
# More than any real fleet has; such a number is a broken meter.
_LIMIT = 1e15


def fault(role: PrefillSignals | DecodeSignals, now_ms: float, stale_ms: float) -> str:
    """Why these signals cannot be used, naming the first bad one; empty when they can."""
    if not math.isfinite(role.at_ms):
        return "at_ms is not a number"
    age_ms = now_ms - role.at_ms
    if age_ms > stale_ms:
        return f"metrics are {age_ms / 1000:.0f} s old, at most {stale_ms / 1000:.0f} s are used"
    if age_ms < -stale_ms:
        return f"metrics are from {-age_ms / 1000:.0f} s in the future: the clock jumped"
    for spec in fields(role):
        value = getattr(role, spec.name)
        if value is None:
            if spec.name in _OPTIONAL:
                continue
            return f"{spec.name} is missing"
        if math.isnan(value):
            return f"{spec.name} is not a number"
        if math.isinf(value) or abs(value) > _LIMIT:
            return f"{spec.name} is infinite"
        if spec.name != "at_ms" and value < 0:
            return f"{spec.name} is negative"
    return ""


def flat(signals: Signals) -> Iterator[tuple[str, float]]:
    """All values that are there, by dotted name: what a decision keeps as its inputs."""
    for name, role in (("prefill", signals.prefill), ("decode", signals.decode)):
        for spec in fields(role):
            value = getattr(role, spec.name)
            if value is not None:
                yield f"{name}.{spec.name}", float(value)
    if signals.arrivals is not None:
        yield "arrivals", float(signals.arrivals)
