"""Decode's step loop: applies what the core decides. One thread owns core and model; handoffs run on the event loop.

submit ─► waiting ─admit─► handoff (pull.py) ─joined─► running ─plan/runner/apply─► tokens ─► sink of each request
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from decode.core import DecodeCore, Emitted, Failed, Finished, Outcome, Preempted, PrefillWanted, StartHandoff
from decode.peers import PeerTable, PeerVerdict
from decode.pull import HandoffResult, Handoffs
from kvstore.errors import Cancelled, GenlockError, Unavailable
from kvstore.guard import Guard
from kvstore.receive import PageReceiver
from kvstore.step import StepPlan
from model.grammar import AnswerMatcher, Grammars
from model.runner import StepRunner
from model.sampler import SampledToken, SampleRow
from model.ticket import Ticket, finish_reason
from wire.admission import Admission
from wire.causes import Causes
from wire.elapsed import elapsed_ms
from wire.errors import surprise
from wire.load import LoadTally
from wire.matchers import matcher_for
from wire.step_loop import StepLoop
from wire.tally import StepTally
from wire.tracing import Trail, current_request, no_trail


@dataclass
class RequestFacts:
    """What happened to one request so far."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    cached_tokens: int = 0
    pages_received: int = 0
    read_checks: int = 0
    write_checks: int = 0


@dataclass(frozen=True)
class Ended:
    """The last thing that a sink hears of a request that finished well."""

    finished: Finished
    facts: RequestFacts


@dataclass(frozen=True)
class Started:
    """The handoff is complete; told once, before the first token."""

    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    transfer_ms: float


# A sink that hears PrefillWanted has `assign` or `refuse` called.
Sink = Callable[["SampledToken | Started | PrefillWanted | Ended | GenlockError"], None]


@dataclass
class _Live:
    ticket: Ticket
    endpoint: str
    worker: str
    sink: Sink
    trail: Trail
    matcher: AnswerMatcher | None
    facts: RequestFacts = field(default_factory=RequestFacts)
    handoff: concurrent.futures.Future[None] | None = None  # of the present attempt


@dataclass(frozen=True)
class DecodeHooks:
    """Fault injection; production leaves it empty. Runs on the step thread before each plan."""

    before_plan: Callable[[], bool] | None = None  # False: do not compute now


@dataclass(frozen=True)
class DecodeFacts:
    """A snapshot for status, approximate while busy."""

    waiting: int
    running: int
    steps: int
    tokens: int
    unproved_transfers: int
    outcomes: dict[str, int] = field(default_factory=dict)


class DecodeEngine:
    def __init__(
        self,
        core: DecodeCore[SampledToken],
        runner: StepRunner,
        guard: Guard,
        receiver: PageReceiver,
        handoffs: Handoffs,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], int],
        hooks: DecodeHooks | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: for answers that keep to a schema; None refuses them."""
        self.core = core
        self.guard = guard
        self.admission = Admission("decode", clock)
        self._runner = runner
        self._receiver = receiver
        self._handoffs = handoffs
        self._eos = eos_token_ids
        self._clock = clock
        self._hooks = hooks or DecodeHooks()
        self._grammars = grammars
        self._live: dict[int, _Live] = {}
        self._aio: asyncio.AbstractEventLoop | None = None
        self._steps = 0
        self._tokens = 0
        self._outcomes = Causes()
        self.tally = StepTally()
        self.load = LoadTally()
        self.refused = Causes()
        self.loop = StepLoop("decode-steps", self._turn, clock)

    def start(self, aio: asyncio.AbstractEventLoop) -> None:
        """Starts the step thread; handoffs will run on `aio`."""
        self._aio = aio
        self.loop.start()

    async def submit(
        self, ticket: Ticket, endpoint: str, worker: str, deadline_ms: int, sink: Sink, trail: Trail | None = None
    ) -> int:
        """Queues a request; `sink` is called from the step thread. Raises what `DecodeCore.submit` and
        `matcher_for` raise."""
        trail = trail or no_trail()
        self.admission.require()
        matcher = await matcher_for(ticket, self._grammars)

        def work() -> int:
            request_no = self.core.submit(ticket, self._clock(), deadline_ms)
            self._live[request_no] = _Live(ticket, endpoint, worker, sink, trail, matcher)
            self.load.arrived(len(ticket.token_ids))
            trail.enter("queue")
            return request_no

        return await self.loop.call(work, self._cancel)

    def cancel(self, request_no: int) -> None:
        """The caller is gone. Safe from any thread and at any time; ended requests are ignored."""
        self.loop.post_quietly(lambda: self._cancel(request_no))

    def assign(self, request_no: int, attempt: int, endpoint: str, worker: str) -> None:
        """The answer to PrefillWanted: who computes a preempted request again. Safe from any thread and at any time; an
        answer that nobody waits for is ignored."""

        def work() -> None:
            if self.core.assigned(request_no, attempt):
                live = self._live[request_no]
                live.endpoint, live.worker = endpoint, worker

        self.loop.post_quietly(work)

    def refuse(self, request_no: int, attempt: int, error: GenlockError) -> None:
        """The other answer to PrefillWanted: nobody can; the request ends with `error`."""
        self.loop.post_quietly(lambda: self._deliver(self.core.refused(request_no, attempt, error)))

    @property
    def peers(self) -> PeerTable:
        return self._handoffs.peers

    async def check_peer(self, endpoint: str, worker: str) -> PeerVerdict:
        """Whether pages of this prefill worker arrive as they were sealed; asks and proves where that is not known."""
        return await self._handoffs.check_peer(endpoint, worker)

    async def end_all(self, error: GenlockError) -> None:
        """Ends every request with a typed error: this worker stops. Raises Unavailable when stopped."""

        def work() -> None:
            for request_no in list(self._live):
                self._deliver(self.core.fail(request_no, error))

        await self.loop.call(work)

    def owed(self) -> dict[str, int]:
        """Requests that still need a handoff, by prefill worker; preempted ones as soon as another is named for them. A
        snapshot from any thread."""
        owed: Counter[str] = Counter()
        for request_no, live in list(self._live.items()):
            request = self.core.request(request_no)
            if request is not None and not request.joined and request.routed:
                owed[live.worker] += 1
        return dict(owed)

    def facts(self) -> DecodeFacts:
        core = self.core
        return DecodeFacts(
            core.waiting, core.running, self._steps, self._tokens, self._receiver.unproved_transfers,
            self._outcomes.read(),
        )  # fmt: skip

    # --- on the step thread -------------------------------------------------------------------------------------

    def _cancel(self, request_no: int) -> None:
        self._deliver(self.core.fail(request_no, Cancelled("cancelled", "the caller went away")))

    def _turn(self) -> bool:
        now = self._clock()
        if self._receiver.unproved_transfers:
            self._receiver.sweep()
        self._deliver(self.core.expire(now))
        for found in self.core.admit(now):
            if isinstance(found, StartHandoff):
                self._start_handoff(found)
            else:
                self._live[found.request_no].sink(found)
        if self._hooks.before_plan is not None and not self._hooks.before_plan():
            return False
        plan, outcomes = self.core.plan(now)
        self._deliver(outcomes)
        if plan is None:
            return bool(outcomes)
        begun_ms = self._clock()
        published = self._runner.run(plan, {row.request_no: self._sample_row(row.request_no) for row in plan.rows})
        self._steps += 1
        self.tally.add(len(plan.rows), plan.tokens)
        self.load.step(len(plan.rows), plan.tokens, elapsed_ms(begun_ms, self._clock()))
        self._count(plan)
        self._deliver(self.core.apply(plan, published, self._clock()))
        return True

    def _count(self, plan: StepPlan) -> None:
        checks_a_page = self.guard.layout.layers + 2  # entry, once in each layer's kernel, exit
        for row in plan.rows:
            live = self._live.get(row.request_no)
            if live is not None:
                live.facts.read_checks += len(row.pages.refs) * checks_a_page
                live.facts.write_checks += len(row.token_ids)

    def _sample_row(self, request_no: int) -> SampleRow:
        req = self.core.request(request_no)
        assert req is not None, "a planned row has a request"
        matcher = self._live[request_no].matcher
        return SampleRow(req.ticket.sampling, len(req.tokens), req.generated, self._eos, req.tokens, matcher)

    def _deliver(self, outcomes: list[Outcome[SampledToken]]) -> None:
        for outcome in outcomes:
            live = self._live.get(outcome.request_no)
            if live is None:
                continue
            if isinstance(outcome, Emitted):
                self._tokens += 1
                live.sink(outcome.token)
            elif isinstance(outcome, Preempted):
                self._outcomes.add("preempted")
                live.trail.enter("queue")
            else:
                self._finish(outcome, live)

    def _finish(self, outcome: Finished | Failed, live: _Live) -> None:
        del self._live[outcome.request_no]
        if live.handoff is not None:
            live.handoff.cancel()  # also one whose coroutine has not begun; no effect on one that is over
        if isinstance(outcome, Finished):
            self._outcomes.add("ok")
            live.trail.end(tokens=outcome.completion_tokens)
            live.sink(Ended(outcome, live.facts))
        else:
            self._outcomes.add(outcome.error.reason)
            live.trail.end(outcome.error.reason)
            live.sink(outcome.error)

    def _start_handoff(self, start: StartHandoff) -> None:
        live = self._live[start.request_no]
        live.facts.queue_ms += start.queue_ms
        live.trail.enter("handoff", peer=live.worker)
        assert self._aio is not None, "started"
        live.handoff = asyncio.run_coroutine_threadsafe(self._handoff(start, live), self._aio)

    # --- on the event loop ----------------------------------------------------------------------------------------

    async def _handoff(self, start: StartHandoff, live: _Live) -> None:
        ticket = start.ticket
        current_request.set(live.trail.request_id)

        def ends_answer(token: SampledToken) -> bool:
            return finish_reason(token.token_id, ticket.generated_tokens + 1, ticket.sampling, self._eos) is not None

        delivered = False

        def deliver(result: HandoffResult) -> None:
            nonlocal delivered
            delivered = True
            self.loop.post_quietly(lambda: self._joined(start, result))

        error: GenlockError
        try:
            await self._handoffs.run(start, live.endpoint, live.worker, ends_answer, deliver, live.trail)
            return
        except asyncio.CancelledError:
            # Mostly the end of the request, which is known then; else the call was closed under us.
            error = Unavailable("handoff_closed", "this worker closed the handoff's call")
        except Exception as unexpected:
            error = surprise(unexpected, "handoff")
        if not delivered:
            self.loop.post_quietly(lambda: self._deliver(self.core.fail(start.request_no, error)))

    def _joined(self, start: StartHandoff, result: HandoffResult) -> None:
        live = self._live.get(start.request_no)
        if live is None:
            return
        live.handoff = None  # its release goes on by itself; the request's end must not cut it short
        live.trail.enter("decode", pages=result.pages, cached_tokens=result.cached_tokens)
        facts = live.facts
        facts.queue_ms += result.prefill_queue_ms
        facts.prefill_ms += result.prefill_ms
        facts.transfer_ms += result.transfer_ms
        if not start.ticket.generated_tokens:  # a later attempt may find its own answer in the cache
            facts.cached_tokens = result.cached_tokens
            self.load.first_token(facts.queue_ms + facts.prefill_ms + facts.transfer_ms)
            live.sink(Started(facts.cached_tokens, facts.queue_ms, facts.prefill_ms, facts.transfer_ms))
        facts.pages_received += result.pages if result.verified else 0
        self._deliver(self.core.joined(start.request_no, result.first, self._clock()))
