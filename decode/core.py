"""Decode's decisions: who gets pages, who runs, who is preempted, who ends. Pure, like prefill's core.

    submit → admit (reserves pages, starts handoffs) → joined / handoff_failed → plan → apply → outcomes
    preempted → admit (asks for a prefill worker) → assigned / refused → admit as above

The handoff itself (decode/handoff.py) runs beside this object; it only needs the slots reserved here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from kvstore.errors import (
    DeadlineExceeded,
    GenlockError,
    InvalidInput,
    LifecycleError,
    NoCapacity,
    StalePage,
    Unavailable,
)
from kvstore.guard import Guard, Published
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.keys import PrefixKeyer
from kvstore.receipt import ExpectedPages
from kvstore.step import PageRun, PlanRow, StepPlan
from model.ticket import FinishReason, Ticket, finish_reason
from wire.elapsed import elapsed_ms


class HasToken(Protocol):
    @property
    def token_id(self) -> int: ...


T = TypeVar("T", bound=HasToken)


@dataclass(frozen=True)
class DecodeLimits:
    max_running: int = 8
    max_waiting: int = 32
    max_preemptions: int = 4
    context_tokens: int = 8192
    # A preempted request waits so long for a prefill worker, and keeps its place in the line for the first part of it:
    # others must not pay for a question that nobody answers.
    assign_ms: int = 5_000
    hold_ms: int = 250


@dataclass(frozen=True)
class StartHandoff:
    """Pages are reserved: call prefill with `ticket` and pull into `local`."""

    request_no: int
    ticket: Ticket
    expected: ExpectedPages
    local: tuple[PageRef, ...]
    queue_ms: int


@dataclass(frozen=True)
class PrefillWanted:
    """There are pages for a preempted request: whoever routes is to name a prefill worker, since the one that it had
    may be gone. Answered by `assigned` or `refused` under the same attempt."""

    request_no: int
    attempt: int


@dataclass(frozen=True)
class Emitted(Generic[T]):
    """One token that passed every check."""

    request_no: int
    token: T


@dataclass(frozen=True)
class Finished:
    request_no: int
    reason: FinishReason
    completion_tokens: int
    preemptions: int


@dataclass(frozen=True)
class Failed:
    request_no: int
    error: GenlockError


@dataclass(frozen=True)
class Preempted:
    """The request gave its pages back and waits to be computed again from its tokens."""

    request_no: int


Outcome = Emitted[T] | Finished | Failed | Preempted


@dataclass
class DecodeRequest:
    request_no: int
    ticket: Ticket  # of the present attempt
    queued_ms: int  # when it began to wait for pages, last
    deadline_ms: int
    tokens: list[int]  # prompt, then answer; the last one's KV may not be written yet
    pages: PageRun = field(default_factory=lambda: PageRun(()))
    keys: tuple[bytes, ...] = ()
    joined: bool = False
    preemptions: int = 0
    routed: bool = True  # somebody has named the prefill worker of the present attempt
    asked_ms: int | None = None  # when that was asked for

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.ticket.prompt_tokens


class DecodeCore(Generic[T]):
    """State of one decode worker. `T` is a sampled token."""

    def __init__(
        self,
        guard: Guard,
        keyer: PrefixKeyer,
        limits: DecodeLimits,
        eos_token_ids: Collection[int],
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._guard = guard
        self._keyer = keyer
        self._limits = limits
        self._eos = frozenset(eos_token_ids)
        self._random_bytes = random_bytes
        self._waiting: OrderedDict[int, DecodeRequest] = OrderedDict()
        self._requests: OrderedDict[int, DecodeRequest] = OrderedDict()  # with pages: in handoff or running
        self._next_request = 0
        self._next_step = 0

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._requests)

    def request(self, request_no: int) -> DecodeRequest | None:
        return self._requests.get(request_no) or self._waiting.get(request_no)

    # --- events -------------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket, now_ms: int, deadline_ms: int) -> int:
        """Queues a request and returns its number. Raises InvalidInput or NoCapacity before any page is taken."""
        tokens = len(ticket.token_ids)
        if tokens < 1:
            raise InvalidInput("empty_prompt", "the prompt has no tokens", field="prompt")
        if tokens + ticket.sampling.max_tokens > self._limits.context_tokens:
            raise InvalidInput(
                "context_exceeded",
                f"{tokens} prompt tokens and max_tokens {ticket.sampling.max_tokens} exceed the context of "
                f"{self._limits.context_tokens}",
                field="sampling_params.max_tokens",
            )
        if self._guard.layout.pages_for(tokens + 1) > self._guard.slots:
            raise NoCapacity("prompt_over_pool", f"the prompt needs more pages than the pool's {self._guard.slots}")
        if len(self._waiting) >= self._limits.max_waiting:
            raise NoCapacity("decode_queue_full", f"{self._limits.max_waiting} requests already wait for decode")
        self._next_request += 1
        self._waiting[self._next_request] = DecodeRequest(
            self._next_request, ticket, now_ms, deadline_ms, list(ticket.token_ids)
        )
        return self._next_request

    def admit(self, now_ms: int) -> list[StartHandoff | PrefillWanted]:
        """Reserves pages for waiting requests, oldest first, before any compute is spent. A preempted one asks for its
        prefill worker first."""
        found: list[StartHandoff | PrefillWanted] = []
        for req in list(self._waiting.values()):
            needed = self._guard.layout.pages_for(len(req.tokens))
            # One page of headroom for a running neighbour: do not admit what must be preempted at once.
            if (
                len(self._requests) >= self._limits.max_running
                or self._guard.free_pages < needed + (1 if self._requests else 0)
            ):  # fmt: skip
                break
            if req.routed:
                found.append(self._start(req, needed, now_ms))
                continue
            if req.asked_ms is None:
                req.asked_ms = now_ms
                found.append(PrefillWanted(req.request_no, req.preemptions))
            if now_ms - req.asked_ms < self._limits.hold_ms:
                break
        return found

    def assigned(self, request_no: int, attempt: int) -> bool:
        """A prefill worker was named for a preempted request. False where nobody waits for that (any more)."""
        req = self._asking(request_no, attempt)
        if req is not None:
            req.routed = True
        return req is not None

    def refused(self, request_no: int, attempt: int, error: GenlockError) -> list[Outcome[T]]:
        """There is no prefill worker for a preempted request; ignored where nobody waits for that."""
        return [] if self._asking(request_no, attempt) is None else self.fail(request_no, error)

    def joined(self, request_no: int, first: T, now_ms: int) -> list[Outcome[T]]:
        """A handoff is complete and verified, or its first token ends the answer: publishes the first token."""
        req = self._requests.get(request_no)
        if req is None or req.joined:
            return []
        req.joined = True
        return self._emit(req, first)

    def fail(self, request_no: int, error: GenlockError) -> list[Outcome[T]]:
        """Ends one request with a typed error. Unknown numbers are ignored: somebody else ended it."""
        req = self.request(request_no)
        if req is None:
            return []
        self._end(req)
        return [Failed(request_no, error)]

    def expire(self, now_ms: int) -> list[Outcome[T]]:
        """Ends requests whose deadline has passed, wherever they are."""
        late = [r for r in (*self._waiting.values(), *self._requests.values()) if now_ms >= r.deadline_ms]
        error = DeadlineExceeded("deadline_exceeded", "the request's deadline passed")
        outcomes = [outcome for req in late for outcome in self.fail(req.request_no, error)]
        limit_ms = self._limits.assign_ms
        for req in list(self._waiting.values()):
            if not req.routed and req.asked_ms is not None and now_ms - req.asked_ms >= limit_ms:
                outcomes += self.fail(req.request_no, not_assigned(limit_ms))
        return outcomes

    def plan(self, now_ms: int) -> tuple[StepPlan | None, list[Outcome[T]]]:
        """One token for each joined request. Where the pool is dry the youngest gives its pages back."""
        outcomes: list[Outcome[T]] = []
        rows: list[PlanRow] = []
        for req in list(self._requests.values()):
            if not req.joined or req.request_no not in self._requests:
                continue
            if not self._grow(req, now_ms, outcomes):
                continue
            position = len(req.tokens) - 1
            rows.append(PlanRow(req.request_no, (req.tokens[-1],), position, req.pages))
        if not rows:
            return None, outcomes
        self._next_step += 1
        return StepPlan(self._next_step, tuple(rows)), outcomes

    def apply(self, plan: StepPlan, published: Sequence[Published[T]], now_ms: int) -> list[Outcome[T]]:
        """Takes a computed step: tokens of healthy rows, typed errors of the others."""
        outcomes: list[Outcome[T]] = []
        for row, result in zip(plan.rows, published, strict=True):
            req = self._requests.get(row.request_no)
            if req is None:  # cancelled while it was computed
                continue
            try:
                if result.error is not None:
                    raise result.error
                assert result.output is not None, "every decode row wants logits"
                self._seal_full(req, row)
                outcomes.extend(self._emit(req, result.output))
            except GenlockError as error:
                outcomes.extend(self.fail(req.request_no, error))
        return outcomes

    # --- inside -------------------------------------------------------------------------------------------------

    def _asking(self, request_no: int, attempt: int) -> DecodeRequest | None:
        req = self._waiting.get(request_no)
        asks = req is not None and not req.routed and req.asked_ms is not None and req.preemptions == attempt
        return req if asks else None

    def _start(self, req: DecodeRequest, pages: int, now_ms: int) -> StartHandoff:
        page_tokens = self._guard.layout.page_tokens
        req.keys = self._keyer.chain(req.ticket.tenant, req.tokens, page_tokens)
        local = self._guard.allocate(req.request_no, pages)
        req.pages = PageRun(local)
        del self._waiting[req.request_no]
        self._requests[req.request_no] = req
        expected = ExpectedPages(len(req.tokens), page_tokens, req.keys)
        return StartHandoff(req.request_no, req.ticket, expected, local, elapsed_ms(req.queued_ms, now_ms))

    def _emit(self, req: DecodeRequest, token: T) -> list[Outcome[T]]:
        req.tokens.append(token.token_id)
        outcomes: list[Outcome[T]] = [Emitted(req.request_no, token)]
        reason = finish_reason(token.token_id, req.generated, req.ticket.sampling, self._eos)
        if reason is not None:
            self._end(req)
            outcomes.append(Finished(req.request_no, reason, req.generated, req.preemptions))
        return outcomes

    def _grow(self, req: DecodeRequest, now_ms: int, outcomes: list[Outcome[T]]) -> bool:
        """Makes sure that the last token's position has a page. False if the request had to stop for now."""
        while self._guard.layout.pages_for(len(req.tokens)) > len(req.pages.refs):
            try:
                req.pages = req.pages.extended(self._guard.allocate(req.request_no, 1))
            except NoCapacity:
                # The youngest: never one that this step has planned already, since those are older than `req`.
                victim = next(reversed([r for r in self._requests.values() if r.joined]))
                self._preempt(victim, now_ms, outcomes)
                if victim is req:
                    return False
        return True

    def _preempt(self, req: DecodeRequest, now_ms: int, outcomes: list[Outcome[T]]) -> None:
        """Gives the pages back; the request is computed again, as a new attempt with a new id, from its tokens."""
        alone = len(self._requests) == 1
        self._end(req)
        if alone or req.preemptions >= self._limits.max_preemptions:
            error = NoCapacity("pool_exhausted", "the page pool is too small for this request and its neighbours")
            outcomes.append(Failed(req.request_no, error))
            return
        req.preemptions += 1
        req.joined = False
        req.routed, req.asked_ms = False, None
        req.queued_ms = now_ms
        req.ticket = replace(
            req.ticket,
            ticket_id=self._random_bytes(16),
            token_ids=tuple(req.tokens),
            generated_tokens=req.generated,
        )
        self._waiting[req.request_no] = req
        self._waiting.move_to_end(req.request_no, last=False)
        outcomes.append(Preempted(req.request_no))

    def _seal_full(self, req: DecodeRequest, row: PlanRow) -> None:
        """Closes the page that this step filled: nobody may write it again."""
        layout = self._guard.layout
        if row.context_len % layout.page_tokens:
            return
        index = row.context_len // layout.page_tokens - 1
        root = self._keyer.root(req.ticket.tenant)
        first = index * layout.page_tokens
        previous = req.keys[index - 1] if index else root
        key = self._keyer.extend(root, previous, req.tokens[first : first + layout.page_tokens])
        req.keys = (*req.keys[:index], key)
        ref = req.pages.refs[index]
        header = PageHeader(ref.tag, layout.fingerprint, first, layout.page_tokens, key)
        self._guard.seal(ref, req.request_no, header, index)

    def _end(self, req: DecodeRequest) -> None:
        self._waiting.pop(req.request_no, None)
        self._requests.pop(req.request_no, None)
        self._retire(req.pages.refs, req.request_no)
        req.pages = PageRun(())

    def _retire(self, refs: Iterable[PageRef], owner: int) -> None:
        """Gives pages back (into quarantine while a transfer may write them); a page that moved on is not ours."""
        for ref in refs:
            try:
                self._guard.retire((ref,), owner)
            except (StalePage, LifecycleError):
                self._guard.count("retire_refused")


def not_assigned(limit_ms: int) -> Unavailable:
    return Unavailable(
        "prefill_not_assigned",
        f"the gateway named no prefill worker within {limit_ms} ms to compute a preempted request again",
    )
