"""The rule of the soak: what may not grow, and how it is seen to grow. Pure.

Of a series of samples the first tenth is warm-up. The median of the last tenth must not exceed the median of the second
tenth by more than the series' allowance: a share of it, and a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

MIN_SAMPLES = 10


@dataclass(frozen=True)
class Allowance:
    """Growth that is no leak. `limit`: the table has a limit of its own, and only that is held; None where it has
    none."""

    share: float = 0.0
    number: float = 0.0
    limit: int | None = None


@dataclass(frozen=True)
class Judged:
    """One series. `slope`: growth in 1,000 requests, by least squares over the samples after the warm-up."""

    name: str
    first: float  # median of the second tenth
    last: float  # median of the last tenth
    most: float
    slope: float
    flat: bool
    allowed: float  # the highest `last` that is flat


def judge_series(name: str, requests: Sequence[int], values: Sequence[float], allowance: Allowance) -> Judged:
    """`requests[i]`: how many had been answered when `values[i]` was taken. Fewer than MIN_SAMPLES: never flat."""
    tenth = max(1, len(values) // 10)
    early, late = values[tenth : 2 * tenth] or values[:1], values[-tenth:]
    first, last = median(early), median(late)
    allowed = first * (1 + allowance.share) + allowance.number if allowance.limit is None else float(allowance.limit)
    flat = len(values) >= MIN_SAMPLES and last <= allowed
    slope = slope_of(requests[tenth:], values[tenth:]) * 1000
    return Judged(name, round(first, 3), round(last, 3), max(values), round(slope, 4), flat, round(allowed, 3))


def slope_of(xs: Sequence[float], ys: Sequence[float]) -> float:
    """By least squares; 0 for fewer than two points."""
    if len(xs) < 2:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def judge_all(
    requests: Sequence[int],
    series: Mapping[str, Sequence[float]],
    allowances: Mapping[str, Allowance],
    default: Allowance,
) -> tuple[Judged, ...]:
    """Every series by its own allowance or the default one; those that are not flat come first."""
    judged = [judge_series(name, requests, values, allowances.get(name, default)) for name, values in series.items()]
    return tuple(sorted(judged, key=lambda j: (j.flat, j.name)))
