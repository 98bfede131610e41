"""Files that may change while they are in use: when to read them again."""

from __future__ import annotations

import os

# Of a file that is not there.
_ABSENT = (0, 0, 0)


class WatchedFiles:
    """Knows files by time, identity and size, so that one that was put in another's place counts too. What to do where
    they cannot be read anew is for who reads them."""

    def __init__(self, *paths: str) -> None:
        """Empty paths are files that nobody named."""
        self._paths = paths
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether one changed, came or went since the last call; the first time, since this was made."""
        # Looked at before whoever asks reads: a change in between is told next time.
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        facts = os.stat(path) if path else None
    except (OSError, ValueError):  # ValueError: a path with a NUL
        facts = None
    return (facts.st_mtime_ns, facts.st_ino, facts.st_size) if facts else _ABSENT
