"""Two requests on one guard, about to get their next token: what the guard's tests begin with."""

from __future__ import annotations

import pytest

from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.layout import PageLayout
from kvstore.step import StepPlan
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from tests.support.kv_world import (
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    Moments,
    T,
    history,
    make_guard,
    next_token,
    run_step,
)

MINE, THEIRS = [10, 11, 12, 13, 14], [70, 71, 72, 73, 74]


def guard_of(slots: int = 8, *, scrub: bool = True, layout: PageLayout = LAYOUT) -> Guard:
    return make_guard(MemoryEngine(MemoryFabric(), "pool"), 22, layout, slots, scrub=scrub)


class Batch:
    """Two requests of five tokens, about to get their sixth."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.mine, self.theirs = history(guard, OWNER, MINE), history(guard, NEIGHBOUR, THEIRS)
        self.plan = StepPlan(
            1, (next_token(OWNER, MINE, 15, self.mine), next_token(NEIGHBOUR, THEIRS, 75, self.theirs))
        )

    def run(self, moments: Moments | None = None) -> tuple[object, object]:
        """(answer or reason) of both."""
        published = run_step(self.guard, self.plan, moments)
        return tuple(p.error.reason if p.error else p.output for p in (published[OWNER], published[NEIGHBOUR]))  # type: ignore[return-value]


RIGHT = (pytest.approx(12.5), pytest.approx(72.5))


def header_for(guard: Guard, ref: PageRef, index: int = 0, rows: int = T) -> PageHeader:
    return PageHeader(ref.tag, guard.layout.fingerprint, index * T, rows, bytes(range(32)))
