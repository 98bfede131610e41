"""Prefill's gRPC face: one call is one handoff. The caller's leaving ends it, whatever state it is in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import Cancelled, GenlockError, InvalidInput, NotFound
from model.base import ModelInfo
from model.sampler import SampledToken
from prefill.core import Event, HandoffCompleted, HandoffFailed, LeaseFacts, PageSealed, PrefillSequence
from prefill.engine import PrefillEngine
from wire.convert import descriptor_to_proto, export_to_proto, served_ticket, token_to_proto
from wire.errors import abort_with, surprise
from wire.replies import Replies
from wire.tracing import NO_TRACER, Tracer, Trail, incoming

FIRST_COMMAND_S = 5.0
# Enough to tell ids apart, too little to name a handoff with.
SHOWN_ID_BYTES = 4


class PrefillService(worker_pb2_grpc.PrefillServiceServicer):
    """Serves handoffs of one engine. `context` is grpc.aio's servicer context."""

    def __init__(self, engine: PrefillEngine, info: ModelInfo, tracer: Tracer = NO_TRACER, worker: str = "") -> None:
        self._engine = engine
        self._info = info
        self._tracer = tracer
        self._worker = worker
        self._requests: dict[bytes, str] = {}  # the gateways' ids of requests, by handoff

    def leases(self, limit: int) -> worker_pb2.WorkerLeases:
        """At most so many live leases, the oldest first."""
        kept = self._engine.oldest_leases(limit)
        total = max(len(kept), len(self._engine.core.leases))
        return worker_pb2.WorkerLeases(leases=[self._lease(facts) for facts in kept], total=total)

    async def GetPool(self, request: worker_pb2.GetPoolRequest, context: Any) -> worker_pb2.GetPoolResponse:
        return worker_pb2.GetPoolResponse(pool=export_to_proto(self._engine.guard.export))

    async def Prefill(  # type: ignore[override] # grpc.aio also takes coroutines that write to the context
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommand], context: Any
    ) -> None:
        trail = incoming(self._tracer, "prefill", context.invocation_metadata() or (), self._worker)
        try:
            await self._prefill(request_iterator, context, trail)
            trail.end()
        except GenlockError as error:
            trail.end(error.reason)
            await abort_with(context, error)
        except asyncio.CancelledError:
            trail.end("cancelled")
            raise
        except Exception as unexpected:
            internal = surprise(unexpected, "prefill")
            trail.end(internal.reason)
            await abort_with(context, internal)

    async def _prefill(self, commands: AsyncIterator[worker_pb2.PrefillCommand], context: Any, trail: Trail) -> None:
        ticket = served_ticket(await self._first(commands), self._info)
        loop = asyncio.get_running_loop()
        # Bounded by what one handoff says: its pages and its end.
        events: asyncio.Queue[Event[SampledToken] | GenlockError | None] = asyncio.Queue()

        def sink(event: Event[SampledToken]) -> None:  # on the step thread
            # A closed loop has no caller left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        trail.set(prompt_tokens=len(ticket.token_ids))
        trail.enter("queue")
        seq = await self._engine.submit(ticket, sink)
        self._requests[seq.handoff_id] = trail.request_id
        reader = asyncio.create_task(self._read_commands(commands, seq, events))
        replies = Replies(context)
        try:
            await replies.write(self._accepted(seq))
            while (event := await events.get()) is not None:
                if isinstance(event, GenlockError):
                    raise event
                if isinstance(event, HandoffFailed):
                    raise event.error
                _follow(trail, seq, event)
                await replies.write(self._event(seq, event))
            await replies.write(
                worker_pb2.HandoffEvent(handoff_id=seq.handoff_id, released=worker_pb2.HandoffReleased())
            )
        finally:
            reader.cancel()
            del self._requests[seq.handoff_id]
            self._engine.cancel(seq.request_no)  # nothing is left to cancel after a release

    async def _first(self, commands: AsyncIterator[worker_pb2.PrefillCommand]) -> worker_pb2.Ticket:
        try:
            async with asyncio.timeout(FIRST_COMMAND_S):
                first = await anext(commands)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidInput("no_ticket", "the first command must be a ticket", field="ticket") from None
        if first.WhichOneof("command") != "ticket":
            self._engine.refused.add("no_ticket")
            raise InvalidInput("no_ticket", "the first command must be a ticket", field="ticket")
        return first.ticket

    async def _read_commands(
        self,
        commands: AsyncIterator[worker_pb2.PrefillCommand],
        seq: PrefillSequence,
        events: asyncio.Queue[Event[SampledToken] | GenlockError | None],
    ) -> None:
        """Carries out renewals and the release; None ends the call well, an error ends it badly."""
        try:
            async for command in commands:
                kind = command.WhichOneof("command")
                if kind == "renew":
                    self._require_own(command.renew.handoff_id, seq)
                    self._engine.renew(seq.handoff_id)
                elif kind == "release":
                    self._require_own(command.release.handoff_id, seq)
                    await self._engine.release(seq.handoff_id, suspect=command.release.suspect)
                    events.put_nowait(None)
                    return
                else:
                    self._engine.refused.add("second_ticket")
                    raise InvalidInput("second_ticket", "one call carries one ticket", field="ticket")
            if not seq.completed:
                return  # half-closed: it cannot renew, so the lease's own deadline ends it
        except GenlockError as error:
            events.put_nowait(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            events.put_nowait(Cancelled("caller_gone", "the caller's side of the call broke"))

    def _require_own(self, handoff_id: bytes, seq: PrefillSequence) -> None:
        if handoff_id != seq.handoff_id:
            self._engine.refused.add("unknown_handoff")
            raise NotFound("unknown_handoff", "this call has no such handoff")

    def _lease(self, facts: LeaseFacts) -> worker_pb2.Lease:
        return worker_pb2.Lease(
            worker_id=self._worker,
            handoff=facts.handoff_id[:SHOWN_ID_BYTES].hex(),
            ticket=facts.ticket_id[:SHOWN_ID_BYTES].hex(),
            request=self._requests.get(facts.handoff_id, ""),
            phase=facts.phase.value,
            pages=facts.pages,
            prompt_pages=facts.prompt_pages,
            age_ms=facts.age_ms,
            left_ms=facts.left_ms,
            renewals=facts.renewals,
        )

    def _accepted(self, seq: PrefillSequence) -> worker_pb2.HandoffEvent:
        return worker_pb2.HandoffEvent(
            handoff_id=seq.handoff_id,
            accepted=worker_pb2.HandoffAccepted(
                pool=export_to_proto(self._engine.guard.export),
                ticket_id=seq.ticket.ticket_id,
                lease_ms=self._engine.core.leases.lease_ms,
            ),
        )

    def _event(
        self, seq: PrefillSequence, event: PageSealed | HandoffCompleted[SampledToken]
    ) -> worker_pb2.HandoffEvent:
        if isinstance(event, PageSealed):
            return worker_pb2.HandoffEvent(handoff_id=seq.handoff_id, page=descriptor_to_proto(event.desc))
        return worker_pb2.HandoffEvent(
            handoff_id=seq.handoff_id,
            completed=worker_pb2.HandoffCompleted(
                page_count=event.page_count,
                first_token=token_to_proto(event.first),
                queue_ms=event.queue_ms,
                prefill_ms=event.prefill_ms,
                cached_tokens=seq.cached_tokens,
            ),
        )


def _follow(trail: Trail, seq: PrefillSequence, event: PageSealed | HandoffCompleted[SampledToken]) -> None:
    """Prefill's phases: in the queue, computing, then leased to decode. How long it computed is known at its end."""
    if isinstance(event, HandoffCompleted):
        trail.enter("prefill", ago_ms=event.prefill_ms)
        trail.enter("lease", pages=event.page_count, cached_tokens=seq.cached_tokens)
