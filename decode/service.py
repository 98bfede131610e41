"""Decode's gRPC face: the requests of one gateway share a call. A caller's leaving cancels its request, whatever state
it is in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from decode.core import PrefillWanted
from decode.engine import DecodeEngine, Ended, Sink, Started
from decode.peers import PeerVerdict
from genlock.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, InvalidInput, Unavailable
from model.base import ModelInfo
from model.sampler import SampledToken
from wire.convert import finish_to_proto, served_ticket
from wire.errors import abort_with, from_status, surprise
from wire.session import Handle, Session, Tell
from wire.tracing import NO_TRACER, Tracer, Trail, incoming

MAX_DEADLINE_MS = 24 * 3600 * 1000
END_S = 2.0


def proof_to_proto(verdict: PeerVerdict) -> worker_pb2.PeerProof:
    return worker_pb2.PeerProof(
        worker_id=verdict.worker,
        incarnation=verdict.incarnation,
        passed=verdict.passed,
        reason=verdict.reason,
        detail=verdict.detail,
    )


class DecodeService(worker_pb2_grpc.DecodeServiceServicer):
    """Serves requests of one engine. `context` is grpc.aio's servicer context."""

    def __init__(
        self,
        engine: DecodeEngine,
        info: ModelInfo,
        clock: Callable[[], int],
        tracer: Tracer = NO_TRACER,
        worker: str = "",
    ) -> None:
        self._engine = engine
        self._info = info
        self._clock = clock
        self._tracer = tracer
        self._worker = worker
        self._sessions: dict[Session, asyncio.Task[Any] | None] = {}

    async def Session(  # type: ignore[override] # grpc.aio also takes coroutines that write to the context
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Any
    ) -> None:
        session = Session(self._start, context, refused=self._engine.refused)
        self._sessions[session] = asyncio.current_task()
        try:
            await session.run(commands)
        except asyncio.CancelledError:
            raise
        except Exception as unexpected:
            await abort_with(context, surprise(unexpected, "a session"))
        finally:
            del self._sessions[session]

    async def CheckPeer(self, request: worker_pb2.CheckPeerRequest, context: Any) -> worker_pb2.CheckPeerResponse:
        try:
            if not request.prefill_endpoint or not request.prefill_worker:
                raise InvalidInput("prefill_not_named", "name the prefill worker to check", field="prefill_endpoint")
            verdict = await self._engine.check_peer(request.prefill_endpoint, request.prefill_worker)
        except GenlockError as error:
            await abort_with(context, error)
        except asyncio.CancelledError:
            raise
        except Exception as unexpected:
            await abort_with(context, surprise(unexpected, "check_peer"))
        return worker_pb2.CheckPeerResponse(proof=proof_to_proto(verdict))

    def finish(self) -> None:
        """The worker stops: each session ends as soon as it has no open request."""
        for session in list(self._sessions):
            session.finish()

    async def ended(self) -> None:
        """The server has stopped: what its sessions still do to end is done, within a limit."""
        tasks = [task for task in self._sessions.values() if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
        await asyncio.sleep(0)  # grpc's own task looks at how each ended

    async def _start(self, request: worker_pb2.DecodeRequest, tell: Tell) -> Handle:
        trail = incoming(self._tracer, "decode", request.trail.items(), self._worker)
        try:
            return await self._submit(request, tell, trail)
        except GenlockError as error:
            trail.end(error.reason)
            raise
        except asyncio.CancelledError:
            trail.end("cancelled")
            raise

    async def _submit(self, request: worker_pb2.DecodeRequest, tell: Tell, trail: Trail) -> Handle:
        ticket = served_ticket(request.ticket, self._info)
        trail.set(prompt_tokens=ticket.prompt_tokens)
        if not request.prefill_endpoint or not request.prefill_worker:
            raise InvalidInput("prefill_not_named", "the router named no prefill worker", field="prefill_endpoint")
        if request.left_ms < 0:
            raise InvalidInput("bad_deadline", "left_ms must not be negative", field="left_ms")
        left_ms = min(request.left_ms or MAX_DEADLINE_MS, MAX_DEADLINE_MS)

        request_no = await self._engine.submit(
            ticket, request.prefill_endpoint, request.prefill_worker, self._clock() + left_ms, self._sink(tell), trail
        )
        return Handle(partial(self._engine.cancel, request_no), partial(self._assign, request_no))

    def _assign(self, request_no: int, assigned: worker_pb2.PrefillAssigned) -> None:
        if assigned.prefill_endpoint and assigned.prefill_worker:
            self._engine.assign(request_no, assigned.attempt, assigned.prefill_endpoint, assigned.prefill_worker)
            return
        error = from_status(assigned.refused) if assigned.HasField("refused") else None
        nobody = Unavailable("prefill_not_assigned", "the gateway named no prefill worker and no reason")
        self._engine.refuse(request_no, assigned.attempt, error or nobody)

    def _sink(self, tell: Tell) -> Sink:
        def sink(event: SampledToken | Started | PrefillWanted | Ended | GenlockError) -> None:  # on the step thread
            if isinstance(event, Started):
                tell(worker_pb2.DecodeStarted(**asdict(event)))
            elif isinstance(event, PrefillWanted):
                tell(worker_pb2.PrefillWanted(attempt=event.attempt))
            else:
                tell(self._finished(event) if isinstance(event, Ended) else event)

        return sink

    def _finished(self, ended: Ended) -> worker_pb2.DecodeFinished:
        facts = ended.facts
        return worker_pb2.DecodeFinished(
            finish_reason=finish_to_proto(ended.finished.reason),
            completion_tokens=ended.finished.completion_tokens,
            cached_tokens=facts.cached_tokens,
            queue_ms=facts.queue_ms,
            prefill_ms=facts.prefill_ms,
            transfer_ms=facts.transfer_ms,
            preemptions=ended.finished.preemptions,
            verification=inference_pb2.Verification(
                pages_received=facts.pages_received,
                bytes_received=facts.pages_received * self._engine.guard.layout.slot_bytes,
                read_checks=facts.read_checks,
                write_checks=facts.write_checks,
            ),
        )
