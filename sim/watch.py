"""The production guard and fabric with eyes on them: they count, check the book's laws and change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvstore.descriptor import PageDescriptor
from kvstore.errors import GenlockError
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.lifecycle import Slot, SlotEvent, SlotState
from kvstore.tables import U8
from kvstore.transfer.faults import Step
from kvstore.transfer.memory import MemoryFabric, MemoryTransfer
from sim.laws import Laws

T = TypeVar("T")
Cell = tuple[str, str, bool]  # slot state, event, whether it was allowed


class Tally:
    """What a run counted. `operations` are page operations: one for each page and each of allocate, seal, share,
    unshare, lease, release, hold, prove, retire, condemn (asked for and allowed), write (a page written by a step),
    read (a page read by a kernel), verify (a page judged on receipt, on entry or on exit)."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.cells: Counter[Cell] = Counter()
        self.reasons: Counter[str] = Counter()
        self.rejects: Counter[str] = Counter()  # causes by which a check refused something, once for each refusal
        self.met: Counter[str] = Counter()  # cells of sim/coverage.py, by name

    def meet(self, group: str, state: str, event: str) -> None:
        self.met[f"{group} {state} x {event}"] += 1


class WatchedGuard(Guard):
    """`laws` and `tally` are set before the first call. Counting and laws only; every answer is the guard's own."""

    laws: Laws
    tally: Tally
    busy: Callable[[int], bool]  # whether a copy or a step may still write the slot

    def watch(self, laws: Laws, tally: Tally, busy: Callable[[int], bool]) -> None:
        self.laws, self.tally, self.busy = laws, tally, busy
        self._last = [0] * self.slots  # highest generation under which each slot was handed out
        self.ledger: dict[PageRef, PageDescriptor] = {}  # every page that this life sealed

    def book_slot(self, page_id: int) -> Slot:
        return self._book.slot(page_id)

    def book_slots(self) -> Sequence[Slot]:
        return self._book._slots

    def bytes_of(self, page_id: int) -> U8:
        """What lies in a slot now, uint8 [slot_bytes]."""
        slot_U8: U8 = self._pool.slots_SU8[page_id]
        return slot_U8

    def conserves_pages(self) -> bool:
        """The counts add up to the pool, and the free list is as long as they say."""
        counts = self._book._counts
        return sum(counts.values()) == len(self._book) and counts[SlotState.FREE] == self._book.free_pages

    def note_into(self, note: Callable[[bytes], None]) -> None:
        """Tells every byte of the pool, for the trace."""
        note(self._pool.live_S2.tobytes())
        note(self._pool.slots_SU8.tobytes())

    def rot(self, page_id: int, byte: int, bit: int) -> None:
        """A bit of a page flips in memory."""
        self._pool.slots_SU8[page_id, byte] ^= 1 << bit

    def allocate(self, owner: int, count: int) -> tuple[PageRef, ...]:
        refs = super().allocate(owner, count)
        self._tell(SlotEvent.ALLOCATE, SlotState.FREE, len(refs))
        for ref in refs:
            generation = ref.tag.generation
            if generation <= self._last[ref.page_id]:
                self.laws.broken("tag_repeats", f"page {ref.page_id} generation {generation}")
            self._last[ref.page_id] = generation
            if self.busy(ref.page_id):
                self.laws.broken("handed_out_busy", f"page {ref.page_id}")
        return refs

    def seal(
        self, ref: PageRef, owner: int, header: PageHeader, logical_index: int, *, keep_in_cache: bool = False
    ) -> PageDescriptor:
        desc = self._seen(
            SlotEvent.SEAL, (ref,), lambda: super(WatchedGuard, self).seal(
                ref, owner, header, logical_index, keep_in_cache=keep_in_cache
            )
        )  # fmt: skip
        self.ledger[ref] = desc
        return desc

    def retire(self, refs: Iterable[PageRef], owner: int) -> None:
        due = tuple(refs)
        pinned = [
            r for r in due if 0 <= r.page_id < self.slots and self.is_live(r) and self.book_slot(r.page_id).pinned
        ]
        self._seen(SlotEvent.RETIRE, due, lambda: super(WatchedGuard, self).retire(due, owner))
        if pinned:
            self.laws.broken("pinned_page_retired", f"page {pinned[0].page_id}")

    def condemn(self, refs: Iterable[PageRef]) -> int:
        due = tuple(refs)
        passed = tuple(r for r in due if not self.is_live(r))
        for ref in passed:
            self.tally.cells[self.slot_state(ref.page_id), SlotEvent.CONDEMN, False] += 1
        live = tuple(r for r in due if r not in passed)
        return self._seen(SlotEvent.CONDEMN, live, lambda: super(WatchedGuard, self).condemn(due))

    def share(self, refs: Sequence[PageRef]) -> None:
        self._seen(SlotEvent.SHARE, tuple(refs), lambda: super(WatchedGuard, self).share(refs))

    def unshare(self, refs: Iterable[PageRef]) -> None:
        due = tuple(refs)
        self._seen(SlotEvent.UNSHARE, due, lambda: super(WatchedGuard, self).unshare(due))

    def lease(self, refs: Sequence[PageRef]) -> None:
        self._seen(SlotEvent.LEASE, tuple(refs), lambda: super(WatchedGuard, self).lease(refs))

    def release(self, refs: Iterable[PageRef]) -> None:
        due = tuple(refs)
        self._seen(SlotEvent.RELEASE, due, lambda: super(WatchedGuard, self).release(due))

    def hold(self, refs: Sequence[PageRef]) -> None:
        self._seen(SlotEvent.HOLD, tuple(refs), lambda: super(WatchedGuard, self).hold(refs))

    def prove(self, refs: Iterable[PageRef]) -> None:
        due = tuple(refs)
        self._seen(SlotEvent.PROVE, due, lambda: super(WatchedGuard, self).prove(due))

    def prepare_landing(self, refs: Sequence[PageRef], owner: int) -> None:
        self._seen(SlotEvent.HOLD, tuple(refs), lambda: super(WatchedGuard, self).prepare_landing(refs, owner))

    def adopt(self, pages: Sequence[tuple[PageRef, PageHeader]], owner: int) -> None:
        full = tuple(ref for ref, header in pages if header.valid_rows == self.layout.page_tokens)
        self._seen(SlotEvent.SEAL, full, lambda: super(WatchedGuard, self).adopt(pages, owner))

    def _seen(self, event: SlotEvent, refs: tuple[PageRef, ...], call: Callable[[], T]) -> T:
        slots = self._book._slots
        before = [slots[r.page_id] for r in refs if 0 <= r.page_id < len(slots)]
        try:
            result = call()
        except GenlockError as error:
            self.tally.reasons[error.reason] += 1
            self.tally.rejects[error.reason] += 1
            for slot in before:
                self.tally.cells[slot.state, event, False] += 1
            if before != [slots[r.page_id] for r in refs if 0 <= r.page_id < len(slots)]:
                self.laws.broken("refusal_changed_state", f"{event} was refused ({error.reason})")
            raise
        self.tally.operations[event] += len(refs)
        for slot in before:
            self.tally.cells[slot.state, event, True] += 1
        return result

    def _tell(self, event: SlotEvent, state: SlotState, count: int) -> None:
        self.tally.operations[event] += count
        if count:
            self.tally.cells[state, event, True] += count


class WatchedFabric(MemoryFabric):
    """Tells when the last byte of a copy has landed, or when it was given up, and which copy lands right now.

    `again_ms(transfer)` says how long after its end an engine sends a copy a second time; 0 for never.
    `wake(delay_ms)` asks to be pumped then.
    """

    def __init__(
        self,
        ended: Callable[[MemoryTransfer], None],
        again_ms: Callable[[MemoryTransfer], int],
        wake: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._wake = wake
        self._ended = ended
        self._again_ms = again_ms
        self._twice: dict[int, tuple[int, list[Step]]] = {}
        self.landing: MemoryTransfer | None = None

    def enlist(self, transfer: MemoryTransfer) -> None:
        super().enlist(transfer)
        again_ms = self._again_ms(transfer)
        if again_ms:
            self._twice[transfer.number] = again_ms, list(transfer._steps)

    def forget(self, transfer: MemoryTransfer) -> None:
        super().forget(transfer)
        self._ended(transfer)
        again_ms, steps = self._twice.pop(transfer.number, (0, []))
        if again_ms and self.landing is transfer:
            transfer._steps, transfer.due_ms = steps, self.now_ms + again_ms
            self._wake(again_ms)
            super().enlist(transfer)

    def _land(self, due: list[MemoryTransfer]) -> int:
        due.sort(key=lambda t: (t.due_ms, t.number))
        for transfer in due:
            self.landing = transfer
            transfer.land()
        self.landing = None
        return len(due)
