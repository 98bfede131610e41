"""What happened, counted by cause. Causes are words of the code, but a peer may tell one that it made up."""

from __future__ import annotations

import threading

MAX_CAUSES = 128
OTHER = "other"


class Causes:
    """Counts of at most MAX_CAUSES causes; what comes beyond them is `other`. From any thread."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, cause: str) -> None:
        with self._lock:
            if cause not in self._counts and len(self._counts) >= MAX_CAUSES:
                cause = OTHER
            self._counts[cause] = self._counts.get(cause, 0) + 1

    def read(self) -> dict[str, int]:
        """How many of each so far."""
        with self._lock:
            return dict(self._counts)
