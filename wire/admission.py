"""Whether a worker takes requests: open, draining with a door for late ones, closed. Set and read from any thread.

A drain begins before everybody knows of it: requests that were routed by then, and handoffs that decode workers have
been promised, still come. They are taken until the door closes.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import Unavailable


class Admission:
    """`clock()` gives milliseconds. `who` names the worker in the refusal."""

    def __init__(self, who: str, clock: Callable[[], int]) -> None:
        self._who = who
        self._clock = clock
        self._closes_ms: int | None = None

    @property
    def draining(self) -> bool:
        """New requests should go elsewhere; late ones may still be taken."""
        return self._closes_ms is not None

    @property
    def closed(self) -> bool:
        closes_ms = self._closes_ms
        return closes_ms is not None and self._clock() >= closes_ms

    def drain(self, open_ms: int = 0) -> None:
        """Late requests are taken for `open_ms` more. Asked again: the earlier close counts."""
        closes_ms = self._clock() + max(0, open_ms)
        self._closes_ms = closes_ms if self._closes_ms is None else min(self._closes_ms, closes_ms)

    def require(self) -> None:
        """Raises Unavailable (`draining`) once the door is closed."""
        if self.closed:
            raise Unavailable("draining", f"this {self._who} worker is draining")
