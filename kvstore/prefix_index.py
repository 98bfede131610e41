"""Prefix keys to sealed pages. An entry holds a page ref: when the page has moved on, it is a miss, never data.

A key is a hash, so an entry also holds what its page was computed from, and a lookup compares that: two prompts of one
key are a miss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.ids import PageRef


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """What a page's KV was computed from: its own token ids, as bytes, after those of the pages before it."""

    tenant: str
    tokens: bytes
    before: Content | None

    def is_same(self, other: Content | None) -> bool:
        """By value, over the whole prefix. Pages of one prompt share what was before them, where this ends early."""
        mine: Content | None = self
        while mine is not other:
            if mine is None or other is None or mine.tokens != other.tokens or mine.tenant != other.tenant:
                return False
            mine, other = mine.before, other.before
        return True


@dataclass(frozen=True, slots=True)
class _Entry:
    ref: PageRef
    content: Content


class PrefixIndex:
    """Least recently used first. Pure; the caller pins what it uses and frees what it evicts."""

    def __init__(self, max_entries: int, is_live: Callable[[PageRef], bool]) -> None:
        self._max = max_entries
        self._is_live = is_live
        self._pages: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def match(self, keys: Sequence[bytes], tenant: str, tokens: Sequence[bytes]) -> tuple[PageRef, ...]:
        """Pages of the longest cached prefix; stale entries are dropped on the way. `keys` and `tokens` are of the
        prompt's pages, in order: an entry whose page was computed from other tokens, or for another tenant, is a
        miss whatever its key."""
        found: list[PageRef] = []
        last: Content | None = None
        for key, own in zip(keys, tokens, strict=False):
            entry = self._pages.get(key)
            if entry is None:
                break
            if not self._is_live(entry.ref):
                del self._pages[key]
                break
            if not entry.content.is_same(Content(tenant, own, last)):
                break
            last = entry.content
            found.append(entry.ref)
        # A page is of no use without those before it: the first one shall be evicted last.
        for key in reversed(keys[: len(found)]):
            self._pages.move_to_end(key)
        return tuple(found)

    def content_of(self, key: bytes) -> Content | None:
        """What the page of this key was computed from."""
        entry = self._pages.get(key)
        return None if entry is None else entry.content

    def wants(self, key: bytes) -> bool:
        """Whether `insert` would take a page for this key."""
        old = self._pages.get(key)
        return not self._is_live(old.ref) if old is not None else self._max > 0 and self._has_room()

    def insert(self, key: bytes, ref: PageRef, content: Content) -> bool:
        """Adds a sealed page. False, and nothing changed, if the key has a live page already or the index is full."""
        if not self.wants(key):
            return False
        self._pages[key] = _Entry(ref, content)
        self._pages.move_to_end(key)
        return True

    def _has_room(self) -> bool:
        """True if an entry can be added; stale ones at the old end make room."""
        while len(self._pages) >= self._max:
            key, entry = next(iter(self._pages.items()))
            if self._is_live(entry.ref):
                return False
            del self._pages[key]
        return True

    def oldest(self) -> Iterator[tuple[bytes, PageRef]]:
        """Entries from the least recently used; the caller may remove while it holds its own list."""
        return iter([(key, entry.ref) for key, entry in self._pages.items()])

    def remove(self, key: bytes, ref: PageRef) -> None:
        """Forgets this page. Where the key names another one by now, that one stays: it would be nobody's page."""
        entry = self._pages.get(key)
        if entry is not None and entry.ref == ref:
            del self._pages[key]
