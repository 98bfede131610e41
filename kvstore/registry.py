"""Incarnations that this process knows: which life of a worker is the present one. Pure.

A name may come back, an incarnation never does: when a worker is seen with a new incarnation, its former one is
dead for good, and so is every descriptor that carries it.
"""

from __future__ import annotations

from kvstore.errors import InvalidInput, NoCapacity, StalePage
from kvstore.ids import INCARNATION_BITS

MAX_REMEMBERED = 65_536


class IncarnationRegistry:
    """Present incarnation by worker name, and the dead ones; of these the oldest are forgotten beyond
    MAX_REMEMBERED."""

    def __init__(self) -> None:
        self._present: dict[str, int] = {}
        self._dead: dict[int, None] = {}

    def present(self, worker: str) -> int | None:
        return self._present.get(worker)

    def is_dead(self, incarnation: int) -> bool:
        return incarnation in self._dead

    def see(self, worker: str, incarnation: int) -> int | None:
        """Notes a worker's incarnation. Returns the one that it replaces, if any.

        Raises StalePage for one that is dead or another worker's, InvalidInput, NoCapacity.
        """
        if not 1 <= incarnation < 1 << INCARNATION_BITS:
            raise InvalidInput("bad_incarnation", "an incarnation is 1 to 2^63 - 1", field="pool.incarnation")
        if incarnation in self._dead:
            raise StalePage("incarnation_dead", f"{worker} came back with an incarnation that has ended")
        former = self._present.get(worker)
        if former == incarnation:
            return None
        if incarnation in self._present.values():
            raise StalePage("incarnation_taken", f"{worker} names the incarnation of another worker that is present")
        if former is None and len(self._present) >= MAX_REMEMBERED:
            raise NoCapacity("too_many_workers", f"{MAX_REMEMBERED} workers are present already")
        self._present[worker] = incarnation
        if former is not None:
            self._bury(former)
        return former

    def leave(self, worker: str) -> None:
        """The worker is gone; its incarnation is dead."""
        former = self._present.pop(worker, None)
        if former is not None:
            self._bury(former)

    def _bury(self, incarnation: int) -> None:
        self._dead[incarnation] = None
        while len(self._dead) > MAX_REMEMBERED:
            self._dead.pop(next(iter(self._dead)))
