"""Runs seeds: one, or very many in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvstore.checks import ALL_CHECKS
from sim.faults import Faults, sample_faults
from sim.laws import LAWS, Violation
from sim.watch import Cell
from sim.world import Kit, World, make_kit


@dataclass(frozen=True)
class RunResult:
    """One seed's run."""

    seed: int
    trace: str
    violations: list[Violation]
    events: int
    operations: Counter[str]
    injected: Counter[str]
    cells: Counter[Cell]
    reasons: Counter[str]
    outcomes: Counter[str] = field(default_factory=Counter)


def run(
    seed: int,
    *,
    without: Collection[str] = (),
    faults: Faults | None = None,
    only: Collection[int] | None = None,
    laws: Collection[str] = tuple(LAWS),
    kit: Kit | None = None,
) -> RunResult:
    """Plays one seed. `without` switches checks off, `only` keeps the named requests, `laws` are those that count."""
    world = World(
        seed,
        kit or make_kit(),
        sample_faults(seed) if faults is None else faults,
        ALL_CHECKS.without(*without),
        laws=frozenset(laws),
        only=only,
    )
    violations = world.run()
    tally = world.tally
    return RunResult(
        seed, world.heap.trace(), violations, world.heap.events, tally.operations, world.dice.injected, tally.cells,
        tally.reasons, world.facts(),
    )  # fmt: skip
