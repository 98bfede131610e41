"""Commands of peers that name what is not there, counted by cause. They change nothing and end nobody else's call."""

from __future__ import annotations

import threading
from collections import Counter


class RefusedTally:
    """Counts from any thread. Causes are words of the code."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, cause: str) -> None:
        with self._lock:
            self._counts[cause] += 1

    def read(self) -> dict[str, int]:
        """How many of each cause so far."""
        with self._lock:
            return dict(self._counts)
