"""The handoff as decode carries it out: calls prefill, pulls pages while prefill still computes, verifies, releases.

One coroutine for each attempt; the rules are in handoff.py, the judgement of pages in kvstore/receive.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from decode.core import StartHandoff
from decode.handoff import Accepted, Completed, HandoffEvent, HandoffReceiver, PagePromised
from decode.peers import PeerTable, PeerVerdict
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, InvalidInput, PageFault, TransferError, TransferTimeout, Unavailable
from kvstore.guard import Guard
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import Peer, PoolExport
from model.sampler import SampledToken
from model.ticket import Ticket
from wire.calls import answer
from wire.convert import (
    count_from_proto,
    descriptor_from_proto,
    duration_from_proto,
    export_from_proto,
    first_token_from_proto,
    ticket_to_proto,
)
from wire.dial import Channels
from wire.elapsed import elapsed_ms
from wire.errors import from_rpc
from wire.tracing import NO_SPAN, OK, Span, Trail, no_trail

RELEASE_TIMEOUT_S = 2.0
POOL_TIMEOUT_S = 5.0  # a prefill worker tells of its pool at once


@dataclass(frozen=True)
class PullHooks:
    """Fault injection; production leaves them empty. Both run where the real thing would happen."""

    on_event: Callable[[StartHandoff, worker_pb2.HandoffEvent], list[worker_pb2.HandoffEvent]] | None = None
    before_pull: Callable[[StartHandoff, tuple[PageOrder, ...]], None] | None = None  # on the pull's thread


@dataclass(frozen=True)
class HandoffResult:
    """A verified handoff, or one whose first token ends the answer (then `verified` may be False)."""

    first: SampledToken
    cached_tokens: int
    prefill_queue_ms: float
    prefill_ms: float
    transfer_ms: float
    pages: int
    verified: bool


@dataclass
class Handoffs:
    """What all handoffs of a decode worker share."""

    guard: Guard
    receiver: PageReceiver
    peers: PeerTable
    executor: Executor
    clock: Callable[[], int]
    transfer_timeout_ms: int
    vocab_size: int
    hooks: PullHooks = field(default_factory=PullHooks)
    # Exchanges with new peers run here, so that one that hangs keeps no request's pull waiting. None: on `executor`.
    prover: Executor | None = None
    channels: Channels = field(default_factory=Channels)

    async def run(
        self,
        start: StartHandoff,
        endpoint: str,
        worker: str,
        ends_answer: Callable[[SampledToken], bool],
        deliver: Callable[[HandoffResult], None],
        trail: Trail | None = None,
    ) -> None:
        """One attempt. `deliver` gets a verified handoff at once; the lease is released after that, since prefill may
        be in the middle of a chunk. Raises the typed error that ends the request, never after `deliver`."""
        await _Attempt(self, start, endpoint, worker, ends_answer, trail or no_trail()).run(deliver)

    async def check_peer(self, endpoint: str, worker: str) -> PeerVerdict:
        """Asks a prefill worker for its pool and proves it, unless that is done for the pool's present life. Never
        raises for what the peer does: a pair that fails is an answer."""
        with self.peers.meeting(worker):
            return await self._check_peer(endpoint, worker)

    async def _check_peer(self, endpoint: str, worker: str) -> PeerVerdict:
        try:
            stub = await self.stub(endpoint)
            answered = await answer(stub.GetPool(worker_pb2.GetPoolRequest(), timeout=POOL_TIMEOUT_S))
            export = export_from_proto(answered.pool)
        except GenlockError as error:
            verdict = PeerVerdict(worker, 0, False, error.reason, error.message)
            self.peers.note(verdict)
            return verdict
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.prover or self.executor, self.peers.connect, worker, export)
        except GenlockError as error:
            return PeerVerdict(worker, export.incarnation, False, error.reason, error.message)
        return PeerVerdict(worker, export.incarnation, True)

    async def stub(self, endpoint: str) -> worker_pb2_grpc.PrefillServiceAsyncStub:
        """Over the one channel to `endpoint`."""
        return worker_pb2_grpc.PrefillServiceStub(await self.channels.get(endpoint))

    async def close(self) -> None:
        await self.channels.close()


class _Attempt:
    def __init__(
        self,
        shared: Handoffs,
        start: StartHandoff,
        endpoint: str,
        worker: str,
        ends_answer: Callable[[SampledToken], bool],
        trail: Trail,
    ) -> None:
        self._shared = shared
        self._trail = trail
        self._start = start
        self._endpoint = endpoint
        self._worker = worker
        self._ends_answer = ends_answer
        self._rules: HandoffReceiver[SampledToken] = HandoffReceiver(
            start.ticket.ticket_id, shared.guard.layout, start.expected, start.local, shared.guard.checks
        )
        self._orders: list[PageOrder] = []
        self._arrived = asyncio.Event()
        self._completion = asyncio.Event()
        self._completed_ms = 0
        self._over = False  # the answer has ended: no other batch is pulled
        self._peer: Peer | None = None

    async def run(self, deliver: Callable[[HandoffResult], None]) -> None:
        stub = await self._shared.stub(self._endpoint)
        call = stub.Prefill(metadata=self._trail.metadata())  # type: ignore[call-arg] # grpc.aio: written to as it goes
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._write(call, worker_pb2.PrefillCommand(ticket=ticket_to_proto(self._start.ticket)))
            reader, puller, renewer = tasks = [
                asyncio.create_task(work) for work in (self._read(call), self._pull(), self._renew(call))
            ]
            try:
                await self._wait(reader, puller)
                deliver(self._result())
            except PageFault:
                await self._release(call, reader, renewer, suspect=True)
                raise
            except InvalidInput as error:
                # What prefill said is not the caller's input.
                raise Unavailable("prefill_malformed", f"prefill's answer cannot be read: {error.message}") from error
            await self._settled(puller)
            await self._release(call, reader, renewer, suspect=False)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, reader: asyncio.Task[None], puller: asyncio.Task[None]) -> None:
        """Until every page is verified, or the first token ends the answer, or something fails."""
        completion = asyncio.create_task(self._completion.wait())
        try:
            pending: set[asyncio.Task[Any]] = {reader, puller, completion}
            while not puller.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                completed = self._rules.completed
                if completed is not None and self._ends_answer(completed.first):
                    return
        finally:
            completion.cancel()

    async def _settled(self, puller: asyncio.Task[None]) -> None:
        """Where the first token ended the answer, pages may still be on their way. Released under their pull, they
        would be refused as stale, and counted as a failed check where nothing failed."""
        self._over = True
        self._arrived.set()
        await asyncio.wait([puller], timeout=self._shared.transfer_timeout_ms / 1000)

    async def _write(self, call: Any, command: worker_pb2.PrefillCommand) -> None:
        try:
            await call.write(command)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._why(call) from None

    async def _why(self, call: Any) -> GenlockError:
        """The status that a broken call ended with."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await call.read()
        except grpc.aio.AioRpcError as error:
            return _peer_error(from_rpc(error))
        except (TimeoutError, asyncio.InvalidStateError):
            pass
        return Unavailable("prefill_unreachable", f"prefill worker {self._worker} broke the call")

    async def _read(self, call: Any) -> None:
        """Follows prefill's stream to its end, which comes after the release."""
        error: GenlockError | None = None
        try:
            async for raw in self._messages(call):
                event = _event(raw, self._start.ticket, self._shared.vocab_size)
                if event is None:
                    continue
                order = self._rules.on_event(event)
                if isinstance(event, Accepted):
                    await self._connect(event.export)
                elif order is not None:
                    self._orders.append(order)
                    self._arrived.set()
                if isinstance(event, Completed):
                    self._completed_ms = self._shared.clock()
                    self._completion.set()
                    self._arrived.set()
        except grpc.aio.AioRpcError as rpc_error:
            error = _peer_error(from_rpc(rpc_error))
        finally:
            self._arrived.set()
        self._rules.on_end(error)

    async def _messages(self, call: Any) -> AsyncIterator[worker_pb2.HandoffEvent]:
        hook = self._shared.hooks.on_event
        async for message in call:
            for item in [message] if hook is None else hook(self._start, message):
                yield item

    async def _connect(self, export: PoolExport) -> None:
        loop = asyncio.get_running_loop()
        self._peer = await loop.run_in_executor(self._shared.executor, self._shared.peers.connect, self._worker, export)

    async def _pull(self) -> None:
        """Pulls whatever has been promised, one batch at a time, until the handoff is ready."""
        loop = asyncio.get_running_loop()
        span, cause = cast(Span, NO_SPAN), "cancelled"
        try:
            while not self._rules.ready and not self._over:
                await self._arrived.wait()
                self._arrived.clear()
                batch, self._orders = tuple(self._orders), []
                if batch and not self._over:
                    if span is NO_SPAN:  # from the first pull on
                        span = self._trail.child("transfer", peer=self._worker)
                    await loop.run_in_executor(self._shared.executor, self._pull_batch, batch)
                    self._rules.verified(batch)
            cause = OK
        except GenlockError as error:
            cause = error.reason
            raise
        finally:
            span.end(cause)

    def _pull_batch(self, batch: tuple[PageOrder, ...]) -> None:
        shared = self._shared
        if shared.hooks.before_pull is not None:
            shared.hooks.before_pull(self._start, batch)
        assert self._peer is not None, "pages are only promised after the handoff was accepted"
        try:
            shared.receiver.pull(
                self._peer, batch, self._start.request_no, self._start.expected, shared.transfer_timeout_ms
            )
        except TransferTimeout:
            raise  # slow is not broken, and what is under way still uses the connection
        except TransferError:
            shared.peers.lost(self._peer)
            raise

    async def _renew(self, call: Any) -> None:
        """Keeps the lease alive while pages are still being computed or pulled."""
        while self._rules.accepted is None:
            await asyncio.sleep(0.05)
        accepted = self._rules.accepted
        while True:
            await asyncio.sleep(max(accepted.lease_ms, 30) / 3000)
            renew = worker_pb2.LeaseRenew(handoff_id=accepted.handoff_id)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(worker_pb2.PrefillCommand(renew=renew))

    async def _release(
        self, call: Any, reader: asyncio.Task[None], renewer: asyncio.Task[None], *, suspect: bool
    ) -> None:
        """Tells prefill that the pages are done with. If that cannot be told, the call's end says it."""
        accepted = self._rules.accepted
        if accepted is None:
            return
        release = worker_pb2.LeaseRelease(handoff_id=accepted.handoff_id, suspect=suspect)
        renewer.cancel()
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await asyncio.wait([renewer])  # two writes at a time are an error
                await call.write(worker_pb2.PrefillCommand(release=release))
                await call.done_writing()
                await asyncio.wait([reader])
                async for _ in call:  # where the reader gave up: a call that is cancelled first may lose the release
                    pass
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._shared.guard.count("release_lost")

    def _result(self) -> HandoffResult:
        completed = self._rules.completed
        if completed is None:
            if self._shared.guard.checks.stream_end:
                raise Unavailable("handoff_cut", "prefill's stream ended before the handoff was complete")
            completed = Completed(b"", 0, SampledToken(0), 0.0, 0.0)  # negative control: an end taken for completion
        return HandoffResult(
            first=completed.first,
            cached_tokens=completed.cached_tokens,
            prefill_queue_ms=completed.queue_ms,
            prefill_ms=completed.prefill_ms,
            transfer_ms=elapsed_ms(self._completed_ms or self._shared.clock(), self._shared.clock()),
            pages=self._start.expected.count,
            verified=self._rules.ready,
        )


def _event(message: worker_pb2.HandoffEvent, ticket: Ticket, vocab_size: int) -> HandoffEvent[SampledToken] | None:
    """None for kinds that a later version may add, and for the farewell. Raises InvalidInput for what no prefill worker
    says."""
    kind = message.WhichOneof("event")
    if kind == "accepted":
        accepted = message.accepted
        return Accepted(message.handoff_id, accepted.ticket_id, export_from_proto(accepted.pool), accepted.lease_ms)
    if kind == "page":
        return PagePromised(message.handoff_id, descriptor_from_proto(message.page))
    if kind == "completed":
        done = message.completed
        first = first_token_from_proto(done.first_token, vocab_size, ticket.sampling.logprobs)
        cached = count_from_proto(done.cached_tokens, len(ticket.token_ids), "completed.cached_tokens")
        queue_ms = duration_from_proto(done.queue_ms, "completed.queue_ms")
        prefill_ms = duration_from_proto(done.prefill_ms, "completed.prefill_ms")
        return Completed(message.handoff_id, done.page_count, first, queue_ms, prefill_ms, cached)
    return None


def _peer_error(error: GenlockError) -> GenlockError:
    """How prefill's failure looks to decode's caller: its own typed error, but never 'your input' for our mistake."""
    if isinstance(error, InvalidInput):
        return Unavailable("prefill_refused", f"prefill refused the handoff: {error.message}", field=error.field)
    if error.reason in ("cancelled", "peer_unreachable", "peer_internal"):  # the last: a status that says nothing
        return Unavailable("prefill_gone", "the prefill worker went away before the handoff was complete")
    return error
