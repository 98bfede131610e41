"""Decode's gRPC face: one call is one request. The caller's leaving cancels it, whatever state it is in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from decode.engine import DecodeEngine, Ended
from decode.peers import PeerVerdict
from genlock.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, InvalidInput
from model.base import ModelInfo
from model.sampler import SampledToken
from wire.convert import finish_to_proto, served_ticket, token_to_proto
from wire.errors import abort_with, surprise
from wire.replies import Replies
from wire.tracing import NO_TRACER, Tracer, Trail, incoming

MAX_DEADLINE_MS = 24 * 3600 * 1000


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

    async def Decode(  # type: ignore[override] # grpc.aio also takes coroutines that write to the context
        self, request: worker_pb2.DecodeRequest, context: Any
    ) -> None:
        trail = incoming(self._tracer, "decode", context.invocation_metadata() or (), self._worker)
        try:
            await self._decode(request, context, trail)
        except GenlockError as error:
            trail.end(error.reason)
            await abort_with(context, error)
        except asyncio.CancelledError:
            raise
        except Exception as unexpected:
            internal = surprise(unexpected, "decode")
            trail.end(internal.reason)
            await abort_with(context, internal)

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

    async def _decode(self, request: worker_pb2.DecodeRequest, context: Any, trail: Trail) -> None:
        ticket = served_ticket(request.ticket, self._info)
        trail.set(prompt_tokens=ticket.prompt_tokens)
        if not request.prefill_endpoint or not request.prefill_worker:
            raise InvalidInput("prefill_not_named", "the router named no prefill worker", field="prefill_endpoint")
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[SampledToken | Ended | GenlockError] = asyncio.Queue()

        def sink(event: SampledToken | Ended | GenlockError) -> None:  # on the step thread
            with contextlib.suppress(RuntimeError):  # a closed loop has no caller left to tell
                loop.call_soon_threadsafe(events.put_nowait, event)

        remaining = context.time_remaining()
        left_ms = MAX_DEADLINE_MS if remaining is None else min(int(remaining * 1000), MAX_DEADLINE_MS)
        request_no = await self._engine.submit(
            ticket, request.prefill_endpoint, request.prefill_worker, self._clock() + left_ms, sink, trail
        )
        try:
            await self._stream(events, context)
        finally:
            self._engine.cancel(request_no)  # nothing is left to cancel after the end

    async def _stream(self, events: asyncio.Queue[SampledToken | Ended | GenlockError], context: Any) -> None:
        """Sends what has gathered since the last message as one message."""
        replies = Replies(context)
        while True:
            gathered = [await events.get()]
            while not events.empty():
                gathered.append(events.get_nowait())
            tokens = [token_to_proto(e) for e in gathered if isinstance(e, SampledToken)]
            if tokens:
                await replies.write(worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(tokens=tokens)))
            last = gathered[-1]
            if isinstance(last, GenlockError):
                raise last
            if isinstance(last, Ended):
                await replies.write(worker_pb2.DecodeEvent(finished=self._finished(last)))
                return

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
