"""All slots of one pool, and the only place where a page is freed. Pure: no clock, no memory, no locks.

Every call names pages by ref; a ref whose tag has moved is a StalePage and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import InvalidInput, LifecycleError, NoCapacity, StalePage
from kvstore.ids import PageRef, Tag
from kvstore.lifecycle import CACHE_OWNER, Slot, SlotEvent, SlotState, apply_event

MAX_SLOTS = 1 << 24


@dataclass(frozen=True)
class PoolCounts:
    """free + open + sealed + quarantined == slots, always."""

    free: int
    open: int
    sealed: int
    quarantined: int

    @property
    def total(self) -> int:
        return self.free + self.open + self.sealed + self.quarantined


class PageAllocator:
    """The book of a pool. `on_tag(page_id, tag)` is told of every tag change before the slot can be used again, and
    `on_free(page_id)` of every slot that becomes free (the guard scrubs it), before it can be handed out."""

    def __init__(
        self,
        slots: int,
        incarnation: int,
        on_tag: Callable[[int, Tag], None] = lambda page_id, tag: None,
        on_free: Callable[[int], None] = lambda page_id: None,
        checks: Checks = ALL_CHECKS,
    ) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise InvalidInput("bad_pool", f"pool.slots must be 1 to {MAX_SLOTS}", field="pool.slots")
        self.incarnation = incarnation
        self.checks = checks
        self._slots = [Slot() for _ in range(slots)]
        self._free = list(range(slots - 1, -1, -1))
        self._counts = dict.fromkeys(SlotState, 0) | {SlotState.FREE: slots}
        self._on_tag = on_tag
        self._on_free = on_free

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def counts(self) -> PoolCounts:
        c = self._counts
        return PoolCounts(c[SlotState.FREE], c[SlotState.OPEN], c[SlotState.SEALED], c[SlotState.QUARANTINED])

    def slot(self, page_id: int) -> Slot:
        """The state of one slot, for checkers and reports."""
        return self._slots[page_id]

    def live_tag(self, page_id: int) -> Tag:
        return Tag(self.incarnation, self._slots[page_id].generation)

    def is_live(self, ref: PageRef) -> bool:
        """True if the ref names what the slot holds now."""
        return 0 <= ref.page_id < len(self._slots) and ref.tag == self.live_tag(ref.page_id)

    def allocate(self, owner: int, count: int) -> tuple[PageRef, ...]:
        """Takes `count` pages for `owner` or none. Raises NoCapacity('no_pages')."""
        if count > len(self._free):
            raise NoCapacity("no_pages", f"{count} pages are needed and {len(self._free)} are free")
        return tuple(self._ref(self._apply(self._free[-1], SlotEvent.ALLOCATE, owner)) for _ in range(count))

    def seal(self, ref: PageRef, owner: int, *, keep_in_cache: bool = False) -> None:
        """OPEN to SEALED; `keep_in_cache` gives the page to the prefix index. Raises StalePage, LifecycleError."""
        self._require_owner(ref, owner)
        self._apply(ref.page_id, SlotEvent.SEAL)
        if keep_in_cache:
            self._slots[ref.page_id] = self._slots[ref.page_id]._replace(owner=CACHE_OWNER)

    def retire(self, refs: Iterable[PageRef], owner: int) -> None:
        """Frees the owner's pages (into quarantine while an engine may touch them). Raises PagePinned, StalePage."""
        for ref in refs:
            self._require_owner(ref, owner)
            self._apply(ref.page_id, SlotEvent.RETIRE)

    def condemn(self, ref: PageRef) -> bool:
        """Takes a page away from everybody at once: its tag moves, so that each reader fails. False if already gone."""
        if not self.is_live(ref):
            return False
        self._apply(ref.page_id, SlotEvent.CONDEMN)
        return True

    def share(self, refs: Sequence[PageRef]) -> None:
        self._all_or_nothing(refs, SlotEvent.SHARE)

    def lease(self, refs: Sequence[PageRef]) -> None:
        self._all_or_nothing(refs, SlotEvent.LEASE)

    def hold(self, refs: Sequence[PageRef]) -> None:
        """An engine may write to these pages from now on."""
        self._all_or_nothing(refs, SlotEvent.HOLD)

    def unshare(self, refs: Iterable[PageRef]) -> None:
        self._end(refs, SlotEvent.UNSHARE)

    def release(self, refs: Iterable[PageRef]) -> None:
        self._end(refs, SlotEvent.RELEASE)

    def prove(self, refs: Iterable[PageRef]) -> None:
        """An engine has proved that it will not touch these pages any more. The only way out of quarantine."""
        self._end(refs, SlotEvent.PROVE)

    def _end(self, refs: Iterable[PageRef], event: SlotEvent) -> None:
        """Ends a count that was taken under this ref; the page itself may meanwhile be in quarantine."""
        for ref in refs:
            slot = self._slots[ref.page_id]
            same_life = slot.generation == ref.tag.generation or (
                slot.state is SlotState.QUARANTINED and slot.generation == ref.tag.generation + 1
            )
            if ref.tag.incarnation != self.incarnation or not (same_life or not self.checks.tag_bump):
                raise StalePage("stale_ref", f"page {ref.page_id} has moved on since this {event} was due")
            self._apply(ref.page_id, event)

    def _all_or_nothing(self, refs: Sequence[PageRef], event: SlotEvent) -> None:
        for ref in refs:
            self._require_live(ref)
            apply_event(self._slots[ref.page_id], event, checks=self.checks)
        for ref in refs:
            self._apply(ref.page_id, event)

    def _require_live(self, ref: PageRef) -> None:
        if not self.is_live(ref):
            raise StalePage("stale_ref", f"page {ref.page_id} has moved on")

    def _require_owner(self, ref: PageRef, owner: int) -> None:
        if 0 <= ref.page_id < len(self._slots) and self._slots[ref.page_id].state is SlotState.FREE:
            raise LifecycleError("double_free", f"page {ref.page_id} is free already")
        self._require_live(ref)
        if self._slots[ref.page_id].owner != owner:
            raise LifecycleError("not_owner", f"page {ref.page_id} belongs to somebody else")

    def _ref(self, page_id: int) -> PageRef:
        return PageRef(page_id, self.live_tag(page_id))

    def _apply(self, page_id: int, event: SlotEvent, owner: int = 0) -> int:
        before = self._slots[page_id]
        after = apply_event(before, event, owner, self.checks)
        if before.state is SlotState.FREE:
            self._free.pop()
        self._slots[page_id] = after
        if after.state is not before.state:
            self._counts[before.state] -= 1
            self._counts[after.state] += 1
        if after.generation != before.generation:
            self._on_tag(page_id, Tag(self.incarnation, after.generation))
        if after.state is SlotState.FREE:
            self._on_free(page_id)
            self._free.append(page_id)
        return page_id
