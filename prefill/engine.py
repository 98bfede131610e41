"""Prefill's step loop: applies what the core decides. One thread owns core and model.

submit ─► waiting ─plan─► chunk ─► runner (guard, model) ─apply─► events ─► sink of each request
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import GenlockError, NotFound
from kvstore.guard import Guard
from model.grammar import AnswerMatcher, Grammars
from model.runner import StepRunner
from model.sampler import SampledToken, SampleRow
from model.ticket import Ticket
from prefill.core import Event, HandoffCompleted, HandoffFailed, LeaseFacts, PrefillCore, PrefillSequence
from wire.admission import Admission
from wire.causes import Causes
from wire.elapsed import elapsed_ms
from wire.load import LoadTally
from wire.matchers import matcher_for
from wire.step_loop import StepLoop
from wire.tally import StepTally

Sink = Callable[[Event[SampledToken]], None]


@dataclass(frozen=True)
class PrefillHooks:
    """Fault injection; production leaves them empty. `on_event` may change, drop or multiply what is sent."""

    on_event: Callable[[PrefillSequence, Event[SampledToken]], list[Event[SampledToken]]] | None = None
    before_plan: Callable[[], bool] | None = None  # False: do not compute now


@dataclass(frozen=True)
class PrefillFacts:
    """A snapshot for status; made on the step thread's objects without locks, so it is approximate while busy."""

    waiting: int
    running: int
    leases: int
    cached_pages: int
    steps: int
    tokens: int
    outcomes: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0  # of completed handoffs
    cached_tokens: int = 0  # of these, the ones that the prefix cache had


class PrefillEngine:
    def __init__(
        self,
        core: PrefillCore[SampledToken],
        runner: StepRunner,
        guard: Guard,
        eos_token_ids: tuple[int, ...],
        clock: Callable[[], int],
        hooks: PrefillHooks | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars`: for answers that keep to a schema; None refuses them."""
        self.core = core
        self.guard = guard
        self.admission = Admission("prefill", clock)
        self._runner = runner
        self._eos = eos_token_ids
        self._clock = clock
        self._hooks = hooks or PrefillHooks()
        self._sinks: dict[int, Sink] = {}
        self._grammars = grammars
        self._matchers: dict[int, AnswerMatcher] = {}
        self._steps = 0
        self._tokens = 0
        self._outcomes: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self.tally = StepTally()
        self.load = LoadTally()
        self.refused = Causes()
        self.loop = StepLoop("prefill-steps", self._turn, clock)

    async def submit(self, ticket: Ticket, sink: Sink) -> PrefillSequence:
        """Queues a prompt; events reach `sink` from the step thread. Raises what `PrefillCore.submit` and
        `matcher_for` raise."""
        self.admission.require()
        now_ms = self._clock()  # the wait for the chunk under way is queueing too
        matcher = await matcher_for(ticket, self._grammars)
        return await self.loop.call(
            lambda: self._submit(ticket, sink, now_ms, matcher), lambda seq: self._cancel(seq.request_no)
        )

    def cancel(self, request_no: int) -> None:
        """Ends a request whose caller is gone. Safe from any thread and at any time."""
        self.loop.post_quietly(lambda: self._cancel(request_no))

    def renew(self, handoff_id: bytes) -> None:
        self.loop.post_quietly(lambda: self._known(lambda: self.core.renew(handoff_id, self._clock())))

    async def release(self, handoff_id: bytes, *, suspect: bool) -> None:
        """Raises NotFound for a handoff that is unknown, released before, or expired."""

        def work() -> None:
            try:
                request_no = self.core.release(handoff_id, suspect=suspect)
            except NotFound as error:
                self.refused.add(error.reason)
                raise
            self._forget(request_no)
            self._outcomes["suspect" if suspect else "ok"] += 1

        await self.loop.call(work)

    async def end_all(self, error: GenlockError) -> None:
        """Ends everything that still runs with a typed error: this worker stops. Raises Unavailable when stopped."""

        def work() -> None:
            for request_no in list(self._sinks):
                self.core.cancel(request_no)
                self._send(HandoffFailed(request_no, error))

        await self.loop.call(work)

    def facts(self) -> PrefillFacts:
        core = self.core
        return PrefillFacts(
            core.waiting, core.running, len(core.leases), core.cached_pages, self._steps, self._tokens,
            dict(self._outcomes), self._prompt_tokens, self._cached_tokens,
        )  # fmt: skip

    def oldest_leases(self, limit: int) -> tuple[LeaseFacts, ...]:
        """At most so many, the oldest first. Like `facts`, and it does not wait for a step: a loop that stands still
        is when somebody asks."""
        return self.core.oldest_leases(limit, self._clock())

    # --- on the step thread -------------------------------------------------------------------------------------

    def _submit(self, ticket: Ticket, sink: Sink, now_ms: int, matcher: AnswerMatcher | None) -> PrefillSequence:
        seq = self.core.submit(ticket, now_ms)
        self._sinks[seq.request_no] = sink
        if matcher is not None:
            self._matchers[seq.request_no] = matcher
        self.load.arrived(len(ticket.token_ids))
        return seq

    def _cancel(self, request_no: int) -> None:
        if self.core.cancel(request_no):
            self._outcomes["cancelled"] += 1
        self._forget(request_no)

    def _forget(self, request_no: int) -> None:
        self._sinks.pop(request_no, None)
        self._matchers.pop(request_no, None)

    def _known(self, work: Callable[[], None]) -> None:
        try:
            work()
        except NotFound as error:
            self.refused.add(error.reason)

    def _turn(self) -> bool:
        now = self._clock()
        for failed in self.core.expire(now):
            self._send(failed)
        if self._hooks.before_plan is not None and not self._hooks.before_plan():
            return False
        plan, events = self.core.plan(now)
        for event in events:
            self._send(event)
        if plan is None:
            return False
        sampling = {
            row.request_no: self._sample_row(row.request_no, row.context_len) for row in plan.rows if row.wants_logits
        }
        begun_ms = self._clock()
        published = self._runner.run(plan, sampling)
        self.load.step(len(plan.rows), plan.tokens, elapsed_ms(begun_ms, self._clock()))
        self._steps += 1
        self._tokens += plan.tokens
        self.tally.add(len(plan.rows), plan.tokens)
        for event in self.core.apply(plan, published, self._clock()):
            self._send(event)
        return True

    def _sample_row(self, request_no: int, position: int) -> SampleRow:
        seq = self.core.sequence(request_no)
        assert seq is not None, "a planned row has a sequence"
        ticket = seq.ticket
        matcher = self._matchers.pop(request_no, None)  # the only token that is sampled here
        return SampleRow(ticket.sampling, position, ticket.generated_tokens, self._eos, ticket.token_ids, matcher)

    def _send(self, event: Event[SampledToken]) -> None:
        if isinstance(event, HandoffFailed):
            self._outcomes[event.error.reason] += 1
        seq = self.core.sequence(event.request_no)
        if seq is not None and isinstance(event, HandoffCompleted):
            self.load.waited(event.queue_ms)
            self._prompt_tokens += len(seq.ticket.token_ids)
            self._cached_tokens += seq.cached_tokens
        events = [event]
        if self._hooks.on_event is not None and seq is not None:
            events = self._hooks.on_event(seq, event)
        sink = self._sinks.get(event.request_no)
        if sink is not None:
            for item in events:
                sink(item)
        if isinstance(event, HandoffFailed):
            self._forget(event.request_no)
