"""Runs seeds: one, or very many in several processes.

A page operation is one page and one of: allocate, seal, share, unshare, lease, release, hold, prove, retire, condemn
(asked for and allowed), write (written by a step), read (read by a kernel), verify (judged on receipt, on entry or on
exit of a step).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from kvstore.checks import ALL_CHECKS
from sim.coverage import rejects, unreached
from sim.faults import Faults, sample_faults
from sim.laws import LAWS, Violation
from sim.watch import Cell
from sim.world import Kit, World, make_kit

SEEDS_A_TASK = 20
MAX_KEPT_FAILURES = 100


@dataclass(frozen=True)
class RunResult:
    """One seed's run. `outcomes` are the causes by which requests ended, `ok` among them."""

    seed: int
    trace: str
    violations: list[Violation]
    events: int
    operations: Counter[str]
    injected: Counter[str]
    cells: Counter[Cell]
    rejects: Counter[str]
    met: Counter[str]
    outcomes: Counter[str]


@dataclass
class Report:
    """Sums over many seeds. `failures` keeps the first few (seed, violation)."""

    seeds: int = 0
    events: int = 0
    seconds: float = 0.0
    violations: int = 0
    first_failing_seed: int | None = None
    failures: list[tuple[int, Violation]] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    cells: Counter[Cell] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def page_operations(self) -> int:
        return self.operations.total()

    def add(self, result: RunResult) -> None:
        self.seeds += 1
        self.events += result.events
        for violation in result.violations:
            self._fail(result.seed, violation)
        self._count(result)

    def merge(self, other: Report) -> None:
        self.seeds += other.seeds
        self.events += other.events
        for seed, violation in other.failures:
            self._fail(seed, violation)
        self.violations += other.violations - len(other.failures)
        self._count(other)

    def unreached(self) -> list[str]:
        return unreached(self.cells, self.rejects, self.injected, self.met)

    def as_json(self) -> dict[str, object]:
        return {
            "seeds": self.seeds,
            "page_operations": self.page_operations,
            "violations": self.violations,
            "seconds": round(self.seconds, 3),
            "faults": dict(sorted(self.injected.items())),
            "unreached": self.unreached(),
            "rejects": rejects(self.rejects),
        }

    def _fail(self, seed: int, violation: Violation) -> None:
        self.violations += 1
        if self.first_failing_seed is None or seed < self.first_failing_seed:
            self.first_failing_seed = seed
        if len(self.failures) < MAX_KEPT_FAILURES:
            self.failures.append((seed, violation))

    def _count(self, other: RunResult | Report) -> None:
        self.operations.update(other.operations)
        self.injected.update(other.injected)
        self.cells.update(other.cells)
        self.rejects.update(other.rejects)
        self.met.update(other.met)
        self.outcomes.update(other.outcomes)


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
        tally.rejects, tally.met, world.facts(),
    )  # fmt: skip


def first_violation(
    without: Collection[str], seeds: range, *, laws: Collection[str] = tuple(LAWS), kit: Kit | None = None
) -> tuple[int, Violation] | None:
    """The control of some checks: (seeds until the first violation, the violation), or None if none appears."""
    kit = kit or make_kit()
    for count, seed in enumerate(seeds, 1):
        found = run(seed, without=without, laws=laws, kit=kit).violations
        if found:
            return count, found[0]
    return None


def swarm(
    seeds: range,
    *,
    jobs: int = 1,
    without: Collection[str] = (),
    laws: Collection[str] = tuple(LAWS),
    stop_at_first: bool = False,
    max_events: int | None = None,
    on_progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Plays all seeds in `jobs` processes. `max_events` ends the swarm once so many events were played."""
    report, start = Report(), time.monotonic()
    for part in _parts(seeds, jobs, tuple(without), tuple(laws)):
        report.merge(part)
        report.seconds = time.monotonic() - start
        on_progress(report)
        if (stop_at_first and report.violations) or (max_events is not None and report.events >= max_events):
            break
    return report


def play(seeds: range, without: tuple[str, ...], laws: tuple[str, ...]) -> Report:
    """Several seeds in this process."""
    kit, report = make_kit(), Report()
    for seed in seeds:
        report.add(run(seed, without=without, laws=laws, kit=kit))
    return report


def _parts(seeds: range, jobs: int, without: tuple[str, ...], laws: tuple[str, ...]) -> Iterator[Report]:
    """Reports in order of seeds; at most a few tasks wait, so that a swarm of any length has a flat memory."""
    tasks = (seeds[i : i + SEEDS_A_TASK] for i in range(0, len(seeds), SEEDS_A_TASK))
    if jobs == 1:
        yield from (play(task, without, laws) for task in tasks)
        return
    # A forked child would inherit locks of the compiled kernels' threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(play, task, without, laws) for _, task in zip(range(2 * jobs), tasks, strict=False)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting.extend(pool.submit(play, task, without, laws) for _, task in zip(range(1), tasks, strict=False))
        finally:
            pool.shutdown(cancel_futures=True)
