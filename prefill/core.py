"""Prefill's decisions: who is computed next, which pages are sealed and promised, when they are given back.

Pure: time is an argument, ids come from an injected source, and the guard is a book kept in memory. The step loop
(prefill/engine.py) and the simulator drive the same object:

    submit → plan → (the shell computes the plan) → apply → events → release / cancel / expire
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from kvstore.descriptor import PageDescriptor
from kvstore.errors import (
    GenlockError,
    InvalidInput,
    LifecycleError,
    NoCapacity,
    PageFault,
    PagePinned,
    StalePage,
    Unavailable,
)
from kvstore.guard import Guard, Published
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.keys import PrefixKeyer, token_pages
from kvstore.leases import LeaseTable
from kvstore.lifecycle import CACHE_OWNER
from kvstore.prefix_index import Content, PrefixIndex
from kvstore.step import PageRun, PlanRow, StepPlan
from model.ticket import Ticket
from wire.elapsed import elapsed_ms

T = TypeVar("T")


@dataclass(frozen=True)
class PrefillLimits:
    chunk_tokens: int = 256  # most prompt tokens of one step
    max_running: int = 8  # most sequences of one step
    max_waiting: int = 32
    max_leases: int = 256
    lease_ms: int = 15_000
    context_tokens: int = 8192


@dataclass(frozen=True)
class PageSealed:
    """A page that decode may pull now."""

    request_no: int
    desc: PageDescriptor


@dataclass(frozen=True)
class HandoffCompleted(Generic[T]):
    """All pages are sealed; `first` is what the step's sampler made of the last logits."""

    request_no: int
    page_count: int
    first: T
    queue_ms: int
    prefill_ms: int


@dataclass(frozen=True)
class HandoffFailed:
    request_no: int
    error: GenlockError


Event = PageSealed | HandoffCompleted[T] | HandoffFailed


class LeasePhase(StrEnum):
    QUEUED = "queued"
    PREFILL = "prefill"
    COMPLETED = "completed"  # all pages are promised; decode is to pull them


@dataclass(frozen=True)
class LeaseFacts:
    """One live lease, for operators: no token, no key, no page's name."""

    handoff_id: bytes
    ticket_id: bytes
    phase: LeasePhase
    pages: int  # promised so far
    prompt_pages: int
    age_ms: int
    left_ms: int  # 0: over; a prompt that waits or is computed keeps its lease all the same
    renewals: int


@dataclass
class PrefillSequence:
    """One prompt being prefilled or waiting to be pulled. `pages[i]` holds positions i * page_tokens and on."""

    request_no: int
    handoff_id: bytes
    ticket: Ticket
    keys: tuple[bytes, ...]
    tokens: tuple[bytes, ...]  # the ids of each page, beside its key
    submitted_ms: int
    started_ms: int = -1
    pages: PageRun = field(default_factory=lambda: PageRun(()))
    done_tokens: int = 0  # positions whose KV is in pages
    sealed: int = 0  # pages sealed or taken from the cache; all of these carry a share and a lease of ours
    cached_tokens: int = 0
    completed: bool = False
    content: Content | None = None  # of the last page that is sealed and full
    private: list[PageRef] = field(default_factory=list)  # sealed pages that the cache did not take


class PrefillCore(Generic[T]):
    """State of one prefill worker. `T` is the sampler's output for a row."""

    def __init__(
        self,
        guard: Guard,
        keyer: PrefixKeyer,
        limits: PrefillLimits,
        random_bytes: Callable[[int], bytes],
        *,
        max_cached_pages: int | None = None,
    ) -> None:
        self._guard = guard
        self._keyer = keyer
        self._limits = limits
        self._random_bytes = random_bytes
        self.index = PrefixIndex(guard.slots if max_cached_pages is None else max_cached_pages, guard.is_live)
        self.leases = LeaseTable(limits.lease_ms, limits.max_leases)
        self._descs: dict[PageRef, PageDescriptor] = {}
        self._waiting: OrderedDict[int, PrefillSequence] = OrderedDict()
        self._running: OrderedDict[int, PrefillSequence] = OrderedDict()
        self._promised: dict[bytes, PrefillSequence] = {}
        self._next_request = 0
        self._next_step = 0

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def cached_pages(self) -> int:
        return len(self.index)

    def sequence(self, request_no: int) -> PrefillSequence | None:
        found = self._waiting.get(request_no) or self._running.get(request_no)
        return found or next((s for s in self._promised.values() if s.request_no == request_no), None)

    def oldest_leases(self, limit: int, now_ms: int) -> tuple[LeaseFacts, ...]:
        """At most so many, the oldest first. A snapshot from any thread."""
        found = ((lease, self._promised.get(lease.handoff_id)) for lease in self.leases.oldest(limit))
        return tuple(
            LeaseFacts(
                lease.handoff_id, seq.ticket.ticket_id, _phase(seq), len(lease.refs), len(seq.keys),
                elapsed_ms(lease.granted_ms, now_ms), max(0, lease.deadline_ms - now_ms), lease.renewals,
            )
            for lease, seq in found if seq is not None  # else it ended a moment ago
        )  # fmt: skip

    # --- events -------------------------------------------------------------------------------------------------

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that wait or are being computed. A snapshot from any thread."""
        known = (*list(self._waiting.values()), *list(self._running.values()))
        return sum(len(seq.ticket.token_ids) - seq.done_tokens for seq in known)

    def submit(self, ticket: Ticket, now_ms: int) -> PrefillSequence:
        """Queues a prompt. Raises InvalidInput or NoCapacity before any page is taken."""
        tokens, page_tokens = len(ticket.token_ids), self._guard.layout.page_tokens
        if tokens < 1:
            raise InvalidInput("empty_prompt", "the prompt has no tokens", field="prompt")
        if tokens > self._limits.context_tokens:
            raise InvalidInput("prompt_too_long", f"{tokens} tokens exceed the context", field="prompt")
        if self._guard.layout.pages_for(tokens) > self._guard.slots:
            raise NoCapacity("prompt_over_pool", f"the prompt needs more pages than the pool's {self._guard.slots}")
        if len(self._waiting) >= self._limits.max_waiting:
            raise NoCapacity("prefill_queue_full", f"{self._limits.max_waiting} prompts already wait for prefill")
        keys = self._keyer.chain(ticket.tenant, ticket.token_ids, page_tokens)
        handoff_id = self._random_bytes(16)
        self.leases.grant(handoff_id, now_ms)
        self._next_request += 1
        tokens_of = token_pages(ticket.token_ids, page_tokens)
        seq = PrefillSequence(self._next_request, handoff_id, ticket, keys, tokens_of, now_ms)
        self._waiting[seq.request_no] = seq
        self._promised[handoff_id] = seq
        return seq

    def plan(self, now_ms: int) -> tuple[StepPlan | None, list[Event[T]]]:
        """Admits and packs the next chunk: oldest first. Events are pages that came from the cache."""
        events: list[Event[T]] = []
        while self._waiting and len(self._running) < self._limits.max_running:
            seq = next(iter(self._waiting.values()))
            if not self._admit(seq, now_ms, events):
                break
        rows: list[PlanRow] = []
        budget = self._limits.chunk_tokens
        for seq in self._running.values():
            if budget <= 0:
                break
            ids = seq.ticket.token_ids
            take = min(budget, len(ids) - seq.done_tokens)
            end = seq.done_tokens + take
            rows.append(
                PlanRow(seq.request_no, ids[seq.done_tokens : end], seq.done_tokens, self._prefix(seq, end),
                        wants_logits=end == len(ids))
            )  # fmt: skip
            budget -= take
        if not rows:
            return None, events
        self._next_step += 1
        return StepPlan(self._next_step, tuple(rows)), events

    def apply(self, plan: StepPlan, published: Sequence[Published[T]], now_ms: int) -> list[Event[T]]:
        """Takes a computed step: seals what became full, completes what is done, ends what failed."""
        events: list[Event[T]] = []
        for row, result in zip(plan.rows, published, strict=True):
            seq = self._running.get(row.request_no)
            if seq is None:  # cancelled while it was computed
                continue
            if result.error is not None:
                events.append(self._fail(seq, result.error))
                continue
            try:
                seq.done_tokens = row.context_len
                self._seal_full(seq, now_ms, events)
                if seq.done_tokens == len(seq.ticket.token_ids):
                    self._complete(seq, result, now_ms, events)
            except GenlockError as error:
                events.append(self._fail(seq, error))
        return events

    def cancel(self, request_no: int) -> bool:
        """The caller is gone: the sequence ends and its pages go back. False if it was gone already."""
        seq = self.sequence(request_no)
        if seq is None:
            return False
        self._drop(seq, suspect=False)
        return True

    def renew(self, handoff_id: bytes, now_ms: int) -> None:
        """Raises NotFound for a handoff that is unknown, released or expired."""
        self.leases.renew(handoff_id, now_ms)

    def release(self, handoff_id: bytes, *, suspect: bool = False) -> int:
        """Decode has what it wants. `suspect`: a page failed its checks, so none of them is used again.

        Returns the request number. Raises NotFound.
        """
        seq = self._promised.get(handoff_id)
        if seq is None:
            self.leases.renew(handoff_id, 0)  # raises NotFound
            raise AssertionError("a lease without a sequence")
        self._drop(seq, suspect=suspect)
        return seq.request_no

    def expire(self, now_ms: int) -> list[HandoffFailed]:
        """Ends leases whose time is over. Sequences that still wait or compute keep theirs."""
        failed: list[HandoffFailed] = []
        for handoff_id in self.leases.expired(now_ms):
            seq = self._promised[handoff_id]
            if seq.completed:
                error = Unavailable("lease_expired", "the pages were not pulled before their lease ended")
                failed.append(self._fail(seq, error))
        return failed

    def evict_all(self) -> int:
        """Empties the prefix cache of pages that nobody uses. Returns how many were freed."""
        return self._evict(self._guard.slots + 1)

    # --- inside -------------------------------------------------------------------------------------------------

    def _admit(self, seq: PrefillSequence, now_ms: int, events: list[Event[T]]) -> bool:
        """Reserves every page of the prompt: cached ones are shared, the rest allocated. All or nothing."""
        ids, page_tokens = seq.ticket.token_ids, self._guard.layout.page_tokens
        # At least one token is computed, since the first token needs its logits.
        most = (len(ids) - 1) // page_tokens
        hits = self._intact(self.index.match(seq.keys[:most], seq.ticket.tenant, seq.tokens))
        self._guard.share(hits)
        needed = len(seq.keys) - len(hits)
        if self._guard.free_pages < needed:
            self._evict(needed)
        try:
            fresh = self._guard.allocate(seq.request_no, needed)
        except NoCapacity:
            self._guard.unshare(hits)
            return False
        self._guard.lease(hits)
        self.leases.add(seq.handoff_id, hits, now_ms)
        seq.pages = PageRun(hits + fresh)
        seq.sealed, seq.started_ms = len(hits), now_ms
        seq.content = self.index.content_of(seq.keys[len(hits) - 1]) if hits else None
        seq.done_tokens = seq.cached_tokens = len(hits) * page_tokens
        del self._waiting[seq.request_no]
        self._running[seq.request_no] = seq
        for i, ref in enumerate(hits):
            events.append(PageSealed(seq.request_no, self._at(self._descs[ref], i)))
        return True

    def _intact(self, refs: tuple[PageRef, ...]) -> tuple[PageRef, ...]:
        """The leading pages that still hold what was sealed; a page that rotted in memory is taken from everybody."""
        for i, ref in enumerate(refs):
            if not self._holds_what_was_sealed(ref):
                self._guard.count("cache_rotten")
                self._forget((ref,))
                self._guard.condemn((ref,))
                return refs[:i]
        return refs

    def _holds_what_was_sealed(self, ref: PageRef) -> bool:
        desc = self._descs.get(ref)
        try:
            return desc is not None and self._guard.describe(ref, desc.logical_index) == desc
        except (PageFault, LifecycleError):  # the rot is in the header itself, or the entry names a page that is open
            return False

    @staticmethod
    def _at(desc: PageDescriptor, logical_index: int) -> PageDescriptor:
        return desc if desc.logical_index == logical_index else PageDescriptor(
            desc.ref, logical_index, desc.first_position, desc.valid_rows, desc.byte_length,
            desc.layout_fingerprint, desc.prefix_key, desc.digest,
        )  # fmt: skip

    def _prefix(self, seq: PrefillSequence, end: int) -> PageRun:
        """The pages that cover positions 0..end-1."""
        pages = self._guard.layout.pages_for(end)
        return seq.pages if pages == len(seq.pages.refs) else PageRun(seq.pages.refs[:pages])

    def _seal_full(self, seq: PrefillSequence, now_ms: int, events: list[Event[T]]) -> None:
        page_tokens = self._guard.layout.page_tokens
        while (seq.sealed + 1) * page_tokens <= seq.done_tokens:
            self._seal(seq, page_tokens, now_ms, events)

    def _complete(self, seq: PrefillSequence, result: Published[T], now_ms: int, events: list[Event[T]]) -> None:
        rest = seq.done_tokens - seq.sealed * self._guard.layout.page_tokens
        if rest:
            self._seal(seq, rest, now_ms, events)
        seq.completed = True
        del self._running[seq.request_no]
        self._guard.unshare(seq.pages.refs)
        assert result.output is not None, "a completed row wanted logits"
        events.append(
            HandoffCompleted(
                seq.request_no, len(seq.keys), result.output, elapsed_ms(seq.submitted_ms, seq.started_ms),
                elapsed_ms(seq.started_ms, now_ms),
            )
        )  # fmt: skip

    def _seal(self, seq: PrefillSequence, valid_rows: int, now_ms: int, events: list[Event[T]]) -> None:
        """Seals the next page, pins it for the sequence and for the lease, offers it to the cache."""
        guard, index, layout = self._guard, seq.sealed, self._guard.layout
        ref, key = seq.pages.refs[index], seq.keys[index]
        keep = valid_rows == layout.page_tokens and self.index.wants(key)
        header = PageHeader(ref.tag, layout.fingerprint, index * layout.page_tokens, valid_rows, key)
        desc = guard.seal(ref, seq.request_no, header, index, keep_in_cache=keep)
        guard.share((ref,))
        guard.lease((ref,))
        seq.sealed += 1
        self.leases.add(seq.handoff_id, (ref,), now_ms)
        if valid_rows == layout.page_tokens:
            seq.content = Content(seq.ticket.tenant, seq.tokens[index], seq.content)
        if keep and seq.content is not None:
            self.index.insert(key, ref, seq.content)
            self._descs[ref] = desc
        else:
            seq.private.append(ref)
        events.append(PageSealed(seq.request_no, desc))

    def _fail(self, seq: PrefillSequence, error: GenlockError) -> HandoffFailed:
        """Pages are taken from their sharers only where a page is to blame: a kernel's surprise is the row's alone."""
        self._drop(seq, suspect=isinstance(error, (PageFault, LifecycleError)))
        return HandoffFailed(seq.request_no, error)

    def _drop(self, seq: PrefillSequence, *, suspect: bool) -> None:
        """Ends a sequence wherever it stands; every page that is only its own goes back."""
        guard = self._guard
        self._waiting.pop(seq.request_no, None)
        was_running = self._running.pop(seq.request_no, None) is not None
        self._promised.pop(seq.handoff_id, None)
        leased = self.leases.end(seq.handoff_id) if seq.handoff_id in self.leases else ()
        sealed = seq.pages.refs[: seq.sealed]
        if suspect:
            self._forget(sealed)
            guard.condemn(sealed)
        if was_running:
            guard.unshare(sealed)
        guard.release(leased)
        for ref in (*seq.private, *seq.pages.refs[seq.sealed :]):
            self._retire(ref, seq.request_no)

    def _retire(self, ref: PageRef, owner: int) -> None:
        """Gives a page back; one that was condemned or given away meanwhile is somebody else's to free."""
        try:
            self._guard.retire((ref,), owner)
        except (StalePage, LifecycleError):
            self._guard.count("retire_refused")

    def _forget(self, refs: Sequence[PageRef]) -> None:
        for ref in refs:
            desc = self._descs.pop(ref, None)
            if desc is not None:
                self.index.remove(desc.prefix_key, ref)

    def _evict(self, wanted_free: int) -> int:
        """Frees least recently used cache pages that nobody uses until `wanted_free` pages are free."""
        freed = 0
        for key, ref in self.index.oldest():
            if self._guard.free_pages >= wanted_free:
                break
            try:
                self._guard.retire((ref,), CACHE_OWNER)
            except PagePinned:
                continue
            except (StalePage, LifecycleError):
                pass
            self.index.remove(key, ref)
            self._descs.pop(ref, None)
            freed += 1
        return freed


def _phase(seq: PrefillSequence) -> LeasePhase:
    if seq.completed:
        return LeasePhase.COMPLETED
    return LeasePhase.QUEUED if seq.started_ms < 0 else LeasePhase.PREFILL
