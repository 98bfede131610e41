"""The way of one request through the gateway, the same for every door.

1 identity   the tenant, from the credential
2 admission  every field, then the prompt's tokens
3 route      a decode and a prefill worker for each answer; where all are full, a wait for them
4 stream     n calls to decode, their messages as they come
5 outcome    counted once, whatever happened
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.gateway.admission import Draft, check_request, choice_seed, fit_sampling
from cluster.gateway.choice import Choice, ChoiceSpec
from cluster.gateway.ends import Asked
from cluster.gateway.identity import Caller, user
from cluster.gateway.placement import Placed, Placement, take
from cluster.gateway.running import RequestFacts, Running
from cluster.gateway.state import GatewayState
from cluster.gateway.steering import Steering, steering
from cluster.router import route_elsewhere, route_many
from cluster.settings import ApiConfig
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.errors import Cancelled, DeadlineExceeded, GenlockError, NoCapacity, Unavailable
from model.sampling import SamplingParams
from wire.errors import surprise
from wire.tracing import Trail, current_request

MAX_BUFFERED_MESSAGES = 64

prompt_log = logging.getLogger("genlock.prompts")


class Call(Protocol):
    """One request at a door, gRPC's or HTTP's."""

    @property
    def label(self) -> str:
        """The caller's own name for the request; Abort finds it by this."""
        ...

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the authenticator reads."""
        ...

    def remaining_s(self) -> float | None:
        """Time until the caller's deadline; None when the caller named none. Raises InvalidInput the first time."""
        ...

    async def request(self, tenant: str) -> pb.GenerateRequest:
        """Asked for once, when the caller is known, of `tenant`, and counted. Raises GenlockError."""
        ...

    def write(self, message: pb.GenerateResponse) -> Awaitable[None]:
        """Waits while the client does not read."""
        ...


@dataclass(frozen=True)
class Admitted:
    """A request that may go to workers."""

    draft: Draft
    tenant: str
    steering: Steering
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    trail: Trail
    facts: RequestFacts

    @property
    def most_tokens(self) -> int:
        return len(self.token_ids) + self.sampling.max_tokens


class RequestPath:
    """Runs requests of all doors of one gateway."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    async def run(self, call: Call) -> None:
        """Returns when every answer is written whole. Raises GenlockError, or CancelledError when the task that runs
        this was cancelled: then, before this is through, the calls to decode are cancelled."""
        state = self._state
        received_ms = state.sources.now_ms()
        server_id = state.sources.random_bytes(8).hex()
        current_request.set(server_id)
        span = state.tracer.begin("request", (), request_id=server_id)
        trail = Trail("gateway", server_id, span, level=logging.INFO)
        running: Running | None = None
        outcome: GenlockError | None = None
        try:
            trail.enter("admit")
            caller = user(state.authenticator.caller(call.metadata()))
            limit_ms = deadline_ms(state.config.api, call.remaining_s())
            running = self._enter(call, caller, RequestFacts(server_id, received_ms, received_ms + limit_ms))
            await self._bounded(call, caller, trail, running, limit_ms)
        except asyncio.CancelledError:
            remaining = call.remaining_s()
            late = remaining is not None and remaining <= 0
            outcome = DeadlineExceeded("deadline_exceeded") if late else Cancelled("cancelled")
            raise
        except Exception as exc:
            outcome = surprise(exc, "a request")
            if isinstance(outcome, Unavailable):
                state.look_again()
            raise outcome from None
        finally:
            now_ms = state.sources.now_ms()
            if running is not None:
                state.leave(running)
                state.ended_requests.add(running, outcome, now_ms)
            state.ended(outcome, now_ms - received_ms)
            trail.end("ok" if outcome is None else outcome.reason, total_ms=round(now_ms - received_ms))

    def _enter(self, call: Call, caller: Caller, facts: RequestFacts) -> Running:
        task = asyncio.current_task()
        assert task is not None
        return self._state.enter(caller, call.label, task, facts)

    async def _bounded(self, call: Call, caller: Caller, trail: Trail, running: Running, limit_ms: float) -> None:
        async with within(running, limit_ms):
            await self._run(call, caller, trail, running.facts)

    async def _run(self, call: Call, caller: Caller, trail: Trail, facts: RequestFacts) -> None:
        state = self._state
        request = await call.request(caller.tenant)
        draft = check_request(request, state.limits, state.config.api)
        placed = steering(request, call.metadata(), caller)
        if draft.sampling.json_schema:
            await state.schemas.check(caller.tenant, draft.sampling.json_schema)
        token_ids = tuple(await state.encoder.encode(draft.prompt, caller.tenant))
        sampling = fit_sampling(draft, len(token_ids), state.limits, state.config.api.default_max_tokens)
        if not draft.seed_given:
            sampling = replace(sampling, seed=int.from_bytes(state.sources.random_bytes(8), "little"))
        admitted = Admitted(draft, caller.tenant, placed, token_ids, sampling, trail, facts)
        trail.set(prompt_tokens=len(token_ids))
        self._log_text("prompt", lambda: b"".join(map(state.served.tokenizer.bytes_of, token_ids)))
        with ExitStack() as cleanup:
            choices = await self._open(admitted, cleanup)
            log_answers = state.config.log.prompts
            async with aclosing(merged(choices)) as messages:
                # Every message of every stream passes here: keep it short.
                async for message in messages:
                    if facts.progressed(message):
                        state.metrics.answered(message.finished)
                    if log_answers:
                        self._log_text("answer", message.text.encode)
                    await call.write(message)

    def _log_text(self, what: str, text: Callable[[], bytes]) -> None:
        """Prompts and answers are logged only where `log.prompts` says so."""
        if self._state.config.log.prompts:
            prompt_log.debug("%s: %s", what, text().decode("utf-8", "replace"))

    async def _open(self, admitted: Admitted, cleanup: ExitStack) -> list[Choice]:
        """Opens all streams; `cleanup` cancels them and gives the load back, at once and without waiting."""
        state = self._state
        admitted.trail.enter("route")
        steer = admitted.steering
        state.arrived += 1
        placed = await state.waiting.place(
            lambda: self._claim(admitted, cleanup), admitted.tenant, steer.priority, state.config.api.queue_ms
        )
        admitted.trail.enter("answer")
        first = placed[0].route
        admitted.facts.routed(first.decode.worker_id, first.prefill.worker_id, len(admitted.token_ids))
        choices = []
        for index, at in enumerate(placed):
            choice = self._open_choice(admitted, index, at, cleanup)
            cleanup.callback(choice.cancel)
            choices.append(choice)
        return choices

    def _claim(self, admitted: Admitted, cleanup: ExitStack) -> list[Placement]:
        """Workers for every answer, and their load taken. All or nothing."""
        state = self._state
        retry_after_ms = state.config.api.retry_after_ms
        try:
            routes = route_many(
                state.fleet.view(state.ledger.loads),
                admitted.most_tokens,
                admitted.draft.choices,
                retry_after_ms=retry_after_ms,
                affinity=admitted.steering.affinity,
            )
        except Unavailable as nobody:
            if not state.asleep:
                raise
            raise NoCapacity(
                "fleet_asleep",
                "the fleet has gone to zero, and this request wakes it: come again when workers have started, or let "
                "requests wait for them (api.queue_ms)",
                retry_after_ms=retry_after_ms,
            ) from nobody
        placed = []
        for index, chosen in enumerate(routes):
            at = take(state, admitted.facts, index, chosen, len(admitted.token_ids), admitted.most_tokens)
            cleanup.callback(at.release)
            placed.append(at)
        return placed

    def _open_choice(self, admitted: Admitted, index: int, at: Placement, cleanup: ExitStack) -> Choice:
        state, info = self._state, self._state.served.info
        spec = ChoiceSpec(
            request_id=admitted.draft.request_id,
            server_id=admitted.trail.request_id,
            index=index,
            stream=admitted.draft.stream,
            asked=Asked(
                replace(admitted.sampling, seed=choice_seed(admitted.sampling.seed, index)),
                len(admitted.token_ids),
                info.vocab_size,
                info.eos_token_ids,
            ),
        )
        return Choice(
            spec,
            self._send(admitted, spec, at),
            state.served.tokenizer,
            state.checks,
            state.sources.now_ms,
            admitted.facts.received_ms,
            lambda left: self._elsewhere(admitted, spec, left, cleanup),
        )

    def _elsewhere(self, admitted: Admitted, spec: ChoiceSpec, left: Placed, cleanup: ExitStack) -> Placed | None:
        """The same answer at another pair, after a worker of `left` that drains turned it away. None: there is none."""
        state, before = self._state, left.at.route
        left.at.release()
        state.look_again()
        try:
            chosen = route_elsewhere(
                state.fleet.view(state.ledger.loads),
                (before.decode.worker_id, before.prefill.worker_id),
                retry_after_ms=state.config.api.retry_after_ms,
                affinity=admitted.steering.affinity,
            )
        except GenlockError:
            return None
        at = take(state, admitted.facts, spec.index, chosen, spec.asked.prompt_tokens, admitted.most_tokens)
        cleanup.callback(at.release)
        if spec.index == 0:
            admitted.facts.routed(chosen.decode.worker_id, chosen.prefill.worker_id, spec.asked.prompt_tokens)
        state.metrics.turned_away()
        return self._send(admitted, spec, at)

    def _send(self, admitted: Admitted, spec: ChoiceSpec, at: Placement) -> Placed:
        """One attempt, with ids of its own."""
        state, info = self._state, self._state.served.info
        ticket = worker_pb2.Ticket(
            ticket_id=state.sources.random_bytes(16),
            tenant=admitted.tenant,
            token_ids=admitted.token_ids,
            sampling=sampling_message(spec.sampling),
            model_revision=info.revision,
            tokenizer_digest=state.served.tokenizer.digest,
        )
        request = worker_pb2.DecodeRequest(
            ticket=ticket,
            prefill_endpoint=at.route.prefill.endpoint,
            prefill_worker=at.route.prefill.worker_id,
            left_ms=max(1, round(admitted.facts.deadline_ms - state.sources.now_ms())),
            trail=dict(admitted.trail.metadata()),
        )
        return Placed(at, state.open_decode(at.route.decode.endpoint, request, at.seat.another))


@asynccontextmanager
async def within(running: Running, limit_ms: float) -> AsyncIterator[None]:
    """What is inside ends by its deadline. A stop from outside ends it with the error that the stopper gave."""
    try:
        async with asyncio.timeout(limit_ms / 1000):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("deadline_exceeded", f"the request took longer than {limit_ms:.0f} ms") from error
    except asyncio.CancelledError:
        if running.stopped_by is None:
            raise
        running.task.uncancel()
        raise running.stopped_by from None


def deadline_ms(api: ApiConfig, remaining_s: float | None) -> float:
    """How long a request may take."""
    if remaining_s is None:
        return float(api.default_deadline_ms)
    return min(max(remaining_s, 0.0) * 1000, float(api.max_deadline_ms))


def sampling_message(sampling: SamplingParams) -> worker_pb2.Sampling:
    """The sampling of a ticket. Stop strings stay in the gateway."""
    return worker_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        json_schema=sampling.json_schema,
    )


def merged(choices: Sequence[Choice]) -> AsyncGenerator[pb.GenerateResponse, None]:
    """All answers' messages as they come. The first failure ends all of them."""
    return choices[0].messages() if len(choices) == 1 else _merged(choices)


async def _merged(choices: Sequence[Choice]) -> AsyncGenerator[pb.GenerateResponse, None]:
    # Bounded: a client that reads slowly slows its own streams, and nothing piles up here.
    queue: asyncio.Queue[pb.GenerateResponse | Exception | None] = asyncio.Queue(MAX_BUFFERED_MESSAGES)

    async def pump(choice: Choice) -> None:
        try:
            async for message in choice.messages():
                await queue.put(message)
        except Exception as exc:
            await queue.put(exc)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(choice)) for choice in choices]
    try:
        left = len(pumps)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for choice in choices:
            choice.cancel()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
