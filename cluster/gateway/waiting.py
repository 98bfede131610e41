"""The waiting room's shell: futures beside the pure room of `queueing.py`, on one event loop and without tasks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from cluster.gateway.queueing import Priority, Room, joined, left, served, turn
from kvstore.errors import NoCapacity

T = TypeVar("T")


@dataclass
class _Waiter(Generic[T]):
    attempt: Callable[[], T]
    through: asyncio.Future[None]
    result: T | None = None
    error: Exception | None = None


class WaitingRoom:
    """Whoever frees a place calls `look`; the request whose turn it is then takes it there and then, so that nobody who
    comes in between can have it."""

    def __init__(self, limit: int, retry_after_ms: int) -> None:
        self._room = Room(limit)
        self._retry_after_ms = retry_after_ms
        self._waiters: dict[int, _Waiter[object]] = {}
        self._numbers = itertools.count()
        self._looking = False
        self._refusal = NoCapacity("decode_full")

    def __len__(self) -> int:
        return len(self._room)

    async def place(self, attempt: Callable[[], T], tenant: str, priority: Priority, wait_ms: int) -> T:
        """What `attempt` returns, once it succeeds and it is this request's turn.

        `attempt` takes its places when it returns and takes nothing when it raises; it gives them back by means of its
        own, also when this is cancelled after it has returned. Raises what `attempt` raises; NoCapacity only after
        `wait_ms`, or at once when that is 0 or the room is full.
        """
        if not len(self._room):
            try:
                return attempt()
            except NoCapacity as refusal:
                if wait_ms <= 0:
                    raise
                self._refusal = refusal
        number = next(self._numbers)
        self._room = joined(self._room, number, tenant, priority, retry_after_ms=self._retry_after_ms)
        waiter: _Waiter[T] = _Waiter(attempt, asyncio.get_running_loop().create_future())
        self._waiters[number] = cast("_Waiter[object]", waiter)
        try:
            self.look()
            # Unlike a timeout around an await, this cannot end a request that has its places already.
            await asyncio.wait((waiter.through,), timeout=wait_ms / 1000)
        finally:
            del self._waiters[number]
            self._room = left(self._room, number)
            # It may have stood before one that needs less.
            self.look()
        if not waiter.through.done():
            raise self._too_long(wait_ms)
        if waiter.error is not None:
            raise waiter.error
        return cast("T", waiter.result)

    def look(self) -> None:
        """Somebody gave a place back, or the fleet is another: serves those whose turn it is while there is room."""
        if self._looking or not len(self._room):
            return
        self._looking = True
        try:
            while (number := turn(self._room)) is not None:
                waiter = self._waiters[number]
                try:
                    waiter.result = waiter.attempt()
                except NoCapacity as refusal:
                    self._refusal = refusal
                    return
                except Exception as error:
                    # Its own failure: the next one's turn.
                    waiter.error = error
                    self._room = left(self._room, number)
                else:
                    self._room = served(self._room)
                waiter.through.set_result(None)
        finally:
            self._looking = False

    def _too_long(self, wait_ms: int) -> NoCapacity:
        last = self._refusal
        return NoCapacity(
            last.reason, f"{last.message}; waited {wait_ms} ms for a place", retry_after_ms=self._retry_after_ms
        )
