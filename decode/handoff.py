"""One handoff as decode sees it: which events are allowed, which pages are still owed. Pure.

    CALLED ─accepted→ ACCEPTED ─completed→ COMPLETED      any ─error→ FAILED; end states absorb

Every event must carry the accepted handoff id. Pages are named, never counted: exactly the set 0..n-1 must arrive, and
a duplicate does not stand in for a missing one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.descriptor import PageDescriptor
from kvstore.errors import GenlockError, StalePage, Unavailable
from kvstore.ids import PageRef
from kvstore.layout import PageLayout, layout_from_canonical, require_same_layout
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder
from kvstore.transfer.base import PoolExport

T = TypeVar("T")


class HandoffState(StrEnum):
    CALLED = "called"
    ACCEPTED = "accepted"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class Accepted:
    handoff_id: bytes
    ticket_id: bytes
    export: PoolExport
    lease_ms: int


@dataclass(frozen=True)
class PagePromised:
    handoff_id: bytes
    desc: PageDescriptor


@dataclass(frozen=True)
class Completed(Generic[T]):
    handoff_id: bytes
    page_count: int
    first: T
    queue_ms: float
    prefill_ms: float
    cached_tokens: int = 0


HandoffEvent = Accepted | PagePromised | Completed[T]


class HandoffReceiver(Generic[T]):
    """State of one attempt. `local` are the reserved slots, one for each prompt page in order."""

    def __init__(
        self,
        ticket_id: bytes,
        layout: PageLayout,
        expected: ExpectedPages,
        local: tuple[PageRef, ...],
        checks: Checks = ALL_CHECKS,
    ) -> None:
        if len(local) != expected.count:
            raise ValueError("one local slot for each expected page")
        self.state = HandoffState.CALLED
        self.expected = expected
        self.accepted: Accepted | None = None
        self.completed: Completed[T] | None = None
        self._ticket_id = ticket_id
        self._layout = layout
        self._local = local
        self._checks = checks
        self._promised: set[int] = set()
        self._verified: set[int] = set()

    @property
    def ready(self) -> bool:
        """True when prefill has completed and every promised page was verified."""
        if self.state is not HandoffState.COMPLETED:
            return False
        if not self._checks.exact_set:
            return len(self._verified) == len(self._promised)
        return len(self._verified) == self.expected.count

    def on_event(self, event: HandoffEvent[T]) -> PageOrder | None:
        """Takes one event; returns a page to pull. StalePage, LayoutMismatch, Unavailable: it is FAILED then."""
        if self.state is HandoffState.FAILED:
            raise Unavailable("handoff_over", "this handoff has failed already")
        try:
            if isinstance(event, Accepted):
                self._accept(event)
                return None
            self._require_id(event.handoff_id)
            if isinstance(event, PagePromised):
                return self._promise(event.desc)
            self._complete(event)
            return None
        except GenlockError:
            self.state = HandoffState.FAILED
            raise

    def verified(self, orders: tuple[PageOrder, ...]) -> None:
        """These pages passed every receipt check and lie in their slots."""
        self._verified.update(o.desc.logical_index for o in orders)

    def on_end(self, error: GenlockError | None) -> None:
        """The stream ended. Raises the error, or Unavailable when it ended before everything was promised."""
        if self.state is HandoffState.COMPLETED:
            return
        if not self._checks.stream_end:
            self.state = HandoffState.COMPLETED
            return
        self.state = HandoffState.FAILED
        raise error or Unavailable("handoff_cut", "prefill's stream ended before the handoff was complete")

    def _accept(self, event: Accepted) -> None:
        if self.state is not HandoffState.CALLED:
            raise StalePage("handoff_again", "a second handoff was accepted on one call")
        if self._checks.handoff_id and event.ticket_id != self._ticket_id:
            raise StalePage("foreign_ticket", "prefill accepted another ticket than ours")
        if self._checks.layout:
            require_same_layout(self._layout, layout_from_canonical(event.export.layout))
        self.accepted = event
        self.state = HandoffState.ACCEPTED

    def _require_id(self, handoff_id: bytes) -> None:
        if self.accepted is None:
            raise StalePage("handoff_not_accepted", "pages were promised before the handoff was accepted")
        if self._checks.handoff_id and handoff_id != self.accepted.handoff_id:
            raise StalePage("unknown_handoff", "an event carries a handoff id that was not accepted")

    def _promise(self, desc: PageDescriptor) -> PageOrder | None:
        index = desc.logical_index
        if self.state is HandoffState.COMPLETED:
            raise StalePage("page_after_end", "a page was promised after the handoff was complete")
        if not 0 <= index < self.expected.count:
            raise StalePage("page_not_expected", f"the prompt has no page {index}")
        if index in self._promised:
            if self._checks.exact_set:
                raise StalePage("duplicate_page", f"page {index} was promised twice")
            return None
        self._promised.add(index)
        return PageOrder(desc, self._local[index])

    def _complete(self, event: Completed[T]) -> None:
        if self.state is HandoffState.COMPLETED:
            raise StalePage("handoff_again", "the handoff was completed twice")
        counted = event.page_count == self.expected.count
        if self._checks.exact_set and not (counted and len(self._promised) == self.expected.count):
            missing = sorted(set(range(self.expected.count)) - self._promised)
            raise StalePage(
                "pages_missing", f"prefill completed {event.page_count} pages; missing: {missing[:8] or 'none'}"
            )
        self.completed = event
        self.state = HandoffState.COMPLETED
