"""All slots of one pool, and the only place where a page is freed. Pure: no clock, no memory, no locks.

Every call names pages by ref; a ref whose tag has moved is a StalePage and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import InvalidInput, LifecycleError, NoCapacity, StalePage
from kvstore.ids import INCARNATION_BITS, PageRef, Tag
from kvstore.lifecycle import CACHE_OWNER, NOBODY, Slot, SlotEvent, SlotState, apply_event

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
        spares: int = 0,
    ) -> None:
        """`spares` slots come after the pool's `slots`: `allocate` never gives them out and no count includes them."""
        if not 1 <= slots <= MAX_SLOTS:
            raise InvalidInput("bad_pool", f"pool.slots must be 1 to {MAX_SLOTS}", field="pool.slots")
        if not 1 <= incarnation < 1 << INCARNATION_BITS:
            raise InvalidInput("bad_incarnation", "an incarnation is 1 to 2^63 - 1", field="pool.incarnation")
        self.incarnation = incarnation
        self.checks = checks
        self._slots = [Slot() for _ in range(slots + spares)]
        self._pool_slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._counts = dict.fromkeys(SlotState, 0) | {SlotState.FREE: slots}
        self._on_tag = on_tag
        self._on_free = on_free

    def __len__(self) -> int:
        return self._pool_slots

    @property
    def free_spares(self) -> int:
        return sum(slot.state is SlotState.FREE for slot in self._slots[self._pool_slots :])

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def counts(self) -> PoolCounts:
        c = self._counts
        return PoolCounts(c[SlotState.FREE], c[SlotState.OPEN], c[SlotState.SEALED], c[SlotState.QUARANTINED])

    def slot(self, page_id: int) -> Slot:
        """The state of one slot, for checkers and reports. Raises InvalidInput for a page outside the pool."""
        if not 0 <= page_id < len(self._slots):
            raise InvalidInput("page_out_of_range", f"page {page_id} is outside this pool", field="page_id")
        return self._slots[page_id]

    def live_tag(self, page_id: int) -> Tag:
        return Tag(self.incarnation, self.slot(page_id).generation)

    def is_live(self, ref: PageRef) -> bool:
        """True if the ref names what the slot holds now. Nothing names a slot that nobody owns."""
        return (
            0 <= ref.page_id < len(self._slots)
            and ref.tag.generation % 2 == 1
            and ref.tag == (self.incarnation, self._slots[ref.page_id].generation)
        )

    def allocate(self, owner: int, count: int) -> tuple[PageRef, ...]:
        """Takes `count` pages for `owner` or none. Raises NoCapacity('no_pages'), InvalidInput (owner, count)."""
        if owner == NOBODY or count < 0:
            field = "count" if count < 0 else "owner"
            raise InvalidInput("bad_allocation", "pages need an owner and a count of at least 0", field=field)
        if count > len(self._free):
            raise NoCapacity("no_pages", f"{count} pages are needed and {len(self._free)} are free")
        return tuple(self._ref(self._apply(self._free[-1], SlotEvent.ALLOCATE, owner)) for _ in range(count))

    def allocate_spare(self, owner: int) -> PageRef:
        """A spare slot, however full the pool is. Raises NoCapacity('no_spares')."""
        for page_id in range(self._pool_slots, len(self._slots)):
            if self._slots[page_id].state is SlotState.FREE:
                return self._ref(self._apply(page_id, SlotEvent.ALLOCATE, owner))
        raise NoCapacity("no_spares", f"all {len(self._slots) - self._pool_slots} spare pages are in use")

    def seal(self, ref: PageRef, owner: int, *, keep_in_cache: bool = False) -> None:
        """OPEN to SEALED; `keep_in_cache` gives the page to the prefix index. Raises StalePage, LifecycleError."""
        self._require_owner(ref, self._known(ref), owner)
        self._apply(ref.page_id, SlotEvent.SEAL)
        if keep_in_cache:
            self._slots[ref.page_id] = self._slots[ref.page_id]._replace(owner=CACHE_OWNER)

    def seal_many(self, refs: Sequence[PageRef]) -> None:
        """`seal` for pages that `require_open` has just passed."""
        slots, counted = self._slots, 0
        for ref in refs:
            slots[ref.page_id] = slots[ref.page_id].sealed()
            counted += ref.page_id < self._pool_slots
        self._counts[SlotState.OPEN] -= counted
        self._counts[SlotState.SEALED] += counted

    def require_open(self, refs: Sequence[PageRef], owner: int) -> None:
        """Raises StalePage or LifecycleError unless all are `owner`'s own open pages."""
        for ref in refs:
            slot = self._known(ref)
            self._require_owner(ref, slot, owner)
            if slot.state is not SlotState.OPEN:
                raise LifecycleError("not_open", f"page {ref.page_id} is {slot.state}")

    def claim_one(self, ref: PageRef, owner: int) -> bool:
        """`claim` of one page, for the rows of a decode step. False, and nothing has changed, where `claim` may raise:
        it says why."""
        slot = self._slots[ref.page_id] if 0 <= ref.page_id < len(self._slots) else Slot()
        free = slot.owner == owner and slot.state is SlotState.OPEN and not slot.holds
        if not free or ref.tag != (self.incarnation, slot.generation):
            return False
        self._slots[ref.page_id] = slot.held(1)
        return True

    def claim(self, refs: Sequence[PageRef], owner: int) -> None:
        """Takes a hold on pages that are about to be written: `owner`'s own open pages that nobody else may write.

        All or none. Raises StalePage, LifecycleError ('not_open', 'not_owner', 'page_busy'). `unclaim` ends it.
        """
        taken = 0
        for ref in refs:
            if not self.claim_one(ref, owner):
                break
            taken += 1
        if taken < len(refs):
            self.unclaim(refs[:taken])
            self.require_open(refs, owner)
            raise LifecycleError("page_busy", "a page to be written may still be written by somebody else")

    def unclaim(self, refs: Iterable[PageRef]) -> None:
        """Ends holds that `claim` took; a page that was given back meanwhile leaves quarantine."""
        for ref in refs:
            slot = self._slots[ref.page_id]
            if slot.state is SlotState.OPEN and slot.holds and slot.generation == ref.tag.generation:
                self._slots[ref.page_id] = slot.held(-1)
            else:
                self.prove((ref,))

    def retire(self, refs: Iterable[PageRef], owner: int) -> None:
        """Frees the owner's pages, all or none (into quarantine while an engine may touch them).

        Raises PagePinned, StalePage, LifecycleError ('double_free', also for a page named twice; 'not_owner').
        """
        self._all_or_nothing(tuple(refs), SlotEvent.RETIRE, lambda ref, slot: self._require_retirable(ref, slot, owner))

    def condemn(self, ref: PageRef) -> bool:
        """Takes a page away from everybody at once: its tag moves, so that each reader fails. False if already gone."""
        if not self.is_live(ref) or self._slots[ref.page_id].state not in (SlotState.OPEN, SlotState.SEALED):
            return False
        self._apply(ref.page_id, SlotEvent.CONDEMN)
        return True

    def share(self, refs: Sequence[PageRef]) -> None:
        self._all_or_nothing(refs, SlotEvent.SHARE, self._require_live)

    def lease(self, refs: Sequence[PageRef]) -> None:
        self._all_or_nothing(refs, SlotEvent.LEASE, self._require_live)

    def hold(self, refs: Sequence[PageRef]) -> None:
        """An engine may write to these pages from now on."""
        self._all_or_nothing(refs, SlotEvent.HOLD, self._require_live)

    def unshare(self, refs: Iterable[PageRef]) -> None:
        self._all_or_nothing(self._still_due(refs, "shares"), SlotEvent.UNSHARE, self._require_same_life)

    def release(self, refs: Iterable[PageRef]) -> None:
        self._all_or_nothing(self._still_due(refs, "leases"), SlotEvent.RELEASE, self._require_same_life)

    def prove(self, refs: Iterable[PageRef]) -> None:
        """An engine has proved that it will not touch these pages any more. The only way out of quarantine."""
        refs = tuple(refs)
        if len({ref.page_id for ref in refs}) == len(refs) and all(map(self._held_and_live, refs)):
            for ref in refs:
                self._slots[ref.page_id] = self._slots[ref.page_id].held(-1)
            return
        self._all_or_nothing(self._still_due(refs, "holds"), SlotEvent.PROVE, self._require_same_life)

    def _held_and_live(self, ref: PageRef) -> bool:
        """True for nearly every page whose hold ends: nothing but the count changes."""
        slot = self._slots[ref.page_id] if 0 <= ref.page_id < len(self._slots) else Slot()
        return slot.owned and slot.holds > 0 and ref.tag == (self.incarnation, slot.generation)

    def _still_due(self, refs: Iterable[PageRef], count: str) -> tuple[PageRef, ...]:
        """All refs; without quarantine a counted page may have been freed and given away: nothing is left to end."""
        if self.checks.quarantine:
            return tuple(refs)
        return tuple(ref for ref in refs if getattr(self._known(ref), count) and self._same_life(ref, self._known(ref)))

    def _all_or_nothing(
        self, refs: Sequence[PageRef], event: SlotEvent, require: Callable[[PageRef, Slot], None]
    ) -> None:
        """Tries the event on copies of all slots first, in order, so that a page named twice is judged twice."""
        tried: dict[int, Slot] = {}
        for ref in refs:
            slot = tried.get(ref.page_id) or self._known(ref)
            require(ref, slot)
            tried[ref.page_id] = apply_event(slot, event, checks=self.checks)
        for page_id, after in tried.items():
            self._put(page_id, after)

    def _known(self, ref: PageRef) -> Slot:
        """The slot, whatever it holds now. A page outside the pool, negative ids too, is no page of this pool."""
        if not 0 <= ref.page_id < len(self._slots):
            raise StalePage("stale_ref", f"page {ref.page_id} is outside this pool")
        return self._slots[ref.page_id]

    def _require_live(self, ref: PageRef, slot: Slot) -> None:
        if ref.tag.generation % 2 == 0 or ref.tag != (self.incarnation, slot.generation):
            raise StalePage("stale_ref", f"page {ref.page_id} has moved on")

    def _require_same_life(self, ref: PageRef, slot: Slot) -> None:
        if not self._same_life(ref, slot):
            raise StalePage("stale_ref", f"page {ref.page_id} has moved on since this count was taken")

    def _same_life(self, ref: PageRef, slot: Slot) -> bool:
        """A count ends under the ref that it was taken under; the page itself may meanwhile be in quarantine."""
        since = slot.generation - ref.tag.generation
        same = since == 0 or (since == 1 and slot.state is SlotState.QUARANTINED) or not self.checks.tag_bump
        return same and ref.tag.incarnation == self.incarnation and ref.tag.generation % 2 == 1

    def _require_retirable(self, ref: PageRef, slot: Slot, owner: int) -> None:
        gone = slot.state in (SlotState.FREE, SlotState.QUARANTINED)
        if gone and ref.tag.incarnation == self.incarnation and ref.tag.generation <= slot.generation:
            raise LifecycleError("double_free", f"page {ref.page_id} was given back already")
        self._require_owner(ref, slot, owner)

    def _require_owner(self, ref: PageRef, slot: Slot, owner: int) -> None:
        self._require_live(ref, slot)
        if slot.owner != owner:
            raise LifecycleError("not_owner", f"page {ref.page_id} belongs to somebody else")

    def _ref(self, page_id: int) -> PageRef:
        return PageRef(page_id, self.live_tag(page_id))

    def _apply(self, page_id: int, event: SlotEvent, owner: int = 0) -> int:
        self._put(page_id, apply_event(self._slots[page_id], event, owner, self.checks))
        return page_id

    def _put(self, page_id: int, after: Slot) -> None:
        before = self._slots[page_id]
        in_pool = page_id < self._pool_slots
        if before.state is SlotState.FREE and in_pool:
            self._free.pop()
        self._slots[page_id] = after
        if after.state is not before.state and in_pool:
            self._counts[before.state] -= 1
            self._counts[after.state] += 1
        if after.generation != before.generation:
            self._on_tag(page_id, Tag(self.incarnation, after.generation))
        if after.state is SlotState.FREE:
            self._on_free(page_id)
            if in_pool:
                self._free.append(page_id)
