"""How often the controller looks, how long it waits, and the clocks that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Milliseconds. `feed_ttl_ms` 0: workers keep their own records; else this controller does, for so long."""

    reconcile_ms: int = 200
    poll_ms: int = 500
    poll_timeout_ms: int = 2_000
    feed_ttl_ms: int = 0
    # Between two looks at the nodes, where this controller owns them.
    room_ms: int = 10_000


@dataclass
class Clocks:
    now_ms: Callable[[], float]
    unix_ms: Callable[[], int]
