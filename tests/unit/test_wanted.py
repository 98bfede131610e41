"""What an operator was told stays wanted, whatever the registry loses and in whatever order its answers come."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, replace
from types import coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control import controller as shell
from cluster.control.api import Change
from cluster.control.controller import Controller
from cluster.control.times import Clocks
from cluster.control.wanted import lost, refill
from cluster.registry.records import Desired
from cluster.registry.rules import next_revision, revision_moved
from kvstore.errors import GenlockError
from tests.support.control_world import POLICY, TIMES, FakeFleet

START = Desired(5, 1, 2, controller_starts=1)
LOOK, TOLD, FLUSH = "look", "told", "flush"

DESIRED = st.builds(
    Desired, revision=st.integers(0, 9), prefill=st.integers(0, 3), decode=st.integers(0, 3),
    controller_starts=st.integers(0, 2), refills=st.integers(0, 3),
)  # fmt: skip


@given(DESIRED, DESIRED)
def test_a_refill_is_what_this_controller_knows_and_is_not_lost_itself(ours: Desired, stored: Desired):
    again = refill(ours, stored, 77)
    assert replace(again, refills=0, refilled_ms=0) == replace(ours, refills=0, refilled_ms=0)
    assert again.refills > max(ours.refills, stored.refills)
    kept = replace(again, revision=next_revision(stored.revision, stored.revision, again.revision))
    assert not lost(kept, kept)
    assert lost(kept, stored), "the refill counts, and not what was there before it"
    assert not lost(stored, stored)


# --- every order ---------------------------------------------------------------------------------------------------


@coroutine
def step() -> Generator[None, None, None]:
    """A place where anything else may happen."""
    yield


@dataclass
class Store:
    """A registry. Each call takes a while to reach it, and its answer a while to come back. `clock`: what revisions
    are above, as a server's."""

    kept: Desired
    clock: int = 0

    async def desired(self) -> Desired:
        await step()
        kept = self.kept
        await step()
        return kept

    async def replace_desired(self, wanted: Desired, expected: int) -> Desired:
        await step()
        failed = None
        if self.kept.revision != expected:
            failed = revision_moved(self.kept.revision, expected)
        else:
            revision = max(next_revision(self.kept.revision, expected, wanted.revision), self.clock)
            self.kept = replace(wanted, revision=revision)
        kept = self.kept
        await step()
        if failed is not None:
            raise failed
        return kept


class Run:
    """One order of a turn's look, a change and flushes of the store."""

    def __init__(self, clock: int) -> None:
        self.store = Store(START, clock)
        self.controller = Controller(
            POLICY, TIMES, self.store, FakeFleet(), FakeFleet(), Clocks(lambda: 1.0, lambda: 1), (1, 1)  # type: ignore[arg-type]
        )  # fmt: skip
        self.controller.state = replace(self.controller.state, desired=START)
        self.told: Desired | None = None
        self.open: dict[str, Coroutine[Any, Any, object]] = {LOOK: self._look(), TOLD: self._change()}

    async def _look(self) -> None:
        try:
            await self.controller._read_desired()
        except GenlockError:
            return  # as a turn does

    async def _change(self) -> None:
        self.told = await self.controller.change(lambda before: replace(before, decode=1), Change("ops"))

    def do(self, what: str) -> None:
        if what == FLUSH:
            self.store.kept = Desired()
            self.store.clock += bool(self.store.clock)
            return
        try:
            self.open[what].send(None)
        except StopIteration:
            del self.open[what]

    def right(self) -> bool:
        """Whether the fleet that the operator was told of is wanted, after one more look."""
        assert self.told is not None
        assert not self.open
        self.open[LOOK] = self._look()
        while self.open:
            self.do(LOOK)
        return (self.store.kept.decode, self.controller.state.desired.decode) == (1, 1)

    def close(self) -> None:
        for work in self.open.values():
            work.close()


def wrong(clock: int, flushes: int = 2, steps: int = 9) -> Iterator[tuple[str, ...]]:
    """The orders after which a change is undone, of all orders of so many steps with so many flushes at most; after
    these, whoever is at it first goes on."""
    ahead: list[tuple[str, ...]] = [()]
    while ahead:
        order, run = ahead.pop(), Run(clock)
        for what in order:
            run.do(what)
        while run.open:
            may = [*run.open]
            if order.count(FLUSH) < flushes:
                may.append(FLUSH)
            if len(order) < steps:
                ahead += [(*order, other) for other in may[1:]]
            run.do(may[0])
            order += (may[0],)
        if not run.right():
            yield order
        run.close()


@pytest.mark.parametrize("clock", [0, 1000], ids=["counted revisions", "a server's clock"])
def test_what_was_told_stays_wanted_in_every_order_of_a_look_a_change_and_flushes(clock: int):
    assert next(wrong(clock), None) is None


@pytest.mark.parametrize(
    "without",
    [
        lambda ours, stored: stored.revision < ours.revision,
        lambda ours, stored: stored.refills > ours.refills and stored.controller_starts <= ours.controller_starts,
    ],
    ids=["refills", "revisions"],
)
def test_control_without_one_half_of_the_rule_some_order_undoes_a_change(
    monkeypatch: pytest.MonkeyPatch, without: Callable[[Desired, Desired], bool]
):
    monkeypatch.setattr(shell, "lost", without)
    assert any(next(wrong(clock), None) for clock in (0, 1000))


def test_a_refill_of_an_earlier_life_does_not_count():
    """It had not heard of the later one when the store was flushed."""
    ours = Desired(40, 1, 1, controller_starts=2)
    assert lost(ours, Desired(900, 1, 4, controller_starts=1, refills=1))
    assert not lost(ours, Desired(900, 1, 4, controller_starts=3, refills=1)), "a later life decides itself"
    assert not lost(ours, Desired(41, 1, 4, controller_starts=2)), "a change whose answer was lost"
