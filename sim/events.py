"""The event heap and the virtual clock of a simulated run. Nothing here knows real time."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from typing import Any


class Heap:
    """Events in order of (time, number). Every event and every noted fact goes into the trace hash."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.events = 0
        self._queue: list[tuple[int, int, str, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._trace = hashlib.blake2b(digest_size=16)

    def __len__(self) -> int:
        return len(self._queue)

    def after(self, delay_ms: int, name: str, call: Callable[..., None], *args: Any) -> None:
        """Runs `call(*args)` in `delay_ms` of virtual time."""
        self._number += 1
        heapq.heappush(self._queue, (self.now_ms + max(0, delay_ms), self._number, name, call, args))

    def run_next(self) -> str:
        """Moves the clock to the next event and runs it. Returns its name."""
        when, number, name, call, args = heapq.heappop(self._queue)
        self.now_ms = when
        self.events += 1
        self._trace.update(b"%d %d %s;" % (when, number, name.encode()))
        call(*args)
        return name

    def note(self, fact: str) -> None:
        self._trace.update(fact.encode())

    def note_bytes(self, raw: bytes) -> None:
        self._trace.update(raw)

    def trace(self) -> str:
        return self._trace.hexdigest()
