"""Histograms of plain integers: cheap enough for every step, read when somebody scrapes. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKEN_BOUNDS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class TallyReading:
    """`counts` has one more entry than `bounds`: values above the last bound. Not cumulative."""

    bounds: tuple[int, ...]
    counts: tuple[int, ...]
    total: int

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> tuple[tuple[str, int], ...]:
        """Buckets as Prometheus has them: `(upper bound, values up to it)`, the last one `+Inf`."""
        out: list[tuple[str, int]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            out.append((bound, seen))
        return tuple(out)


class Tally:
    """One thread adds; any thread reads. A reading may be one value behind in its total."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0

    def add(self, value: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> TallyReading:
        return TallyReading(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True)
class StepReading:
    """What a step loop has computed so far."""

    rows: TallyReading
    tokens: TallyReading


class StepTally:
    """Rows and tokens of each step."""

    __slots__ = ("_rows", "_tokens")

    def __init__(self) -> None:
        self._rows = Tally(BATCH_BOUNDS)
        self._tokens = Tally(TOKEN_BOUNDS)

    def add(self, rows: int, tokens: int) -> None:
        self._rows.add(rows)
        self._tokens.add(tokens)

    def read(self) -> StepReading:
        return StepReading(self._rows.read(), self._tokens.read())
