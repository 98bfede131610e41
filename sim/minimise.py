"""Makes a failing seed small: drops faults, then requests, as long as the same law stays broken."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sim.faults import Faults, sample_faults
from sim.load import draw_shape, draw_wishes
from sim.runner import run
from sim.world import Kit


@dataclass(frozen=True)
class SmallCase:
    """The smallest failing case that was found."""

    seed: int
    law: str
    faults: Faults
    only: tuple[int, ...]
    without: tuple[str, ...]
    detail: str

    def as_test(self) -> str:
        """A test to paste into the pinned seeds."""
        armed = ", ".join(f"{name}={getattr(self.faults, name)}" for name in self.faults.armed)
        without = f", without={self.without!r}" if self.without else ""
        return (
            f"def test_seed_{self.seed}_{self.law}():\n"
            f"    # {self.detail}\n"
            f"    result = run({self.seed}, faults=Faults({armed}), only={self.only!r}{without})\n"
            f"    assert not result.violations, result.violations[0]\n"
        )


def minimise(seed: int, kit: Kit, *, without: Collection[str] = (), max_runs: int = 150) -> SmallCase | None:
    """Greedy, one thing at a time; None when the seed does not fail. Runs the seed at most `max_runs` times."""
    faults = sample_faults(seed)
    only = tuple(w.number for w in draw_wishes(seed, draw_shape(seed)))
    first = run(seed, kit=kit, without=without).violations
    if not first:
        return None
    law, detail, left = first[0].law, str(first[0]), max_runs

    def still_fails(fewer: Faults, numbers: tuple[int, ...]) -> bool:
        nonlocal detail, left
        if left <= 0:
            return False
        left -= 1
        found = run(seed, kit=kit, without=without, faults=fewer, only=numbers).violations
        if found and found[0].law == law:
            detail = str(found[0])
            return True
        return False

    for site in faults.armed:
        fewer = faults.without(site)
        if still_fails(fewer, only):
            faults = fewer
    for number in reversed(only):
        numbers = tuple(n for n in only if n != number)
        if numbers and still_fails(faults, numbers):
            only = numbers
    return SmallCase(seed, law, faults, only, tuple(without), detail)
