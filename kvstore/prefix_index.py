"""Prefix keys to sealed pages. An entry holds a page ref: when the page has moved on, it is a miss, never data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from kvstore.ids import PageRef


class PrefixIndex:
    """Least recently used first. Pure; the caller pins what it uses and frees what it evicts."""

    def __init__(self, max_entries: int, is_live: Callable[[PageRef], bool]) -> None:
        self._max = max_entries
        self._is_live = is_live
        self._pages: OrderedDict[bytes, PageRef] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, keys: Sequence[bytes]) -> tuple[PageRef, ...]:
        """Pages of the longest cached prefix of `keys`; stale entries are dropped on the way."""
        found: list[PageRef] = []
        for key in keys:
            ref = self._pages.get(key)
            if ref is None:
                break
            if not self._is_live(ref):
                del self._pages[key]
                break
            found.append(ref)
        # A page is of no use without those before it: the first one shall be evicted last.
        for key in reversed(keys[: len(found)]):
            self._pages.move_to_end(key)
        return tuple(found)

    def wants(self, key: bytes) -> bool:
        """Whether `insert` would take a page for this key."""
        old = self._pages.get(key)
        return not self._is_live(old) if old is not None else self._max > 0 and self._has_room()

    def insert(self, key: bytes, ref: PageRef) -> bool:
        """Adds a sealed page. False, and nothing changed, if the key has a live page already or the index is full."""
        if not self.wants(key):
            return False
        self._pages[key] = ref
        self._pages.move_to_end(key)
        return True

    def _has_room(self) -> bool:
        """True if an entry can be added; stale ones at the old end make room."""
        while len(self._pages) >= self._max:
            key, ref = next(iter(self._pages.items()))
            if self._is_live(ref):
                return False
            del self._pages[key]
        return True

    def oldest(self) -> Iterator[tuple[bytes, PageRef]]:
        """Entries from the least recently used; the caller may remove while it holds its own list."""
        return iter(list(self._pages.items()))

    def remove(self, key: bytes, ref: PageRef) -> None:
        """Forgets this page. Where the key names another one by now, that one stays: it would be nobody's page."""
        if self._pages.get(key) == ref:
            del self._pages[key]
