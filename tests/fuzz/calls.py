"""A live cluster under hostile calls: to decode, to prefill, to the gateway, and by a prefill worker to decode."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio

from cluster.gateway.sessions import DecodeSession
from cluster.launch.build import BuiltWorker
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.selftest.lab import load_subject
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvstore.errors import Cancelled, DeadlineExceeded, GenlockError, InvalidInput
from model.sampling import SamplingParams
from model.ticket import Ticket
from tests.fuzz.layer import Finding, reason_of
from tests.fuzz.mutate import mutated
from tests.support.decode_calls import Decoding, told
from tests.support.edge_lab import EdgeLab, Neighbour, require_served
from wire.convert import ticket_from_proto, ticket_to_proto
from wire.errors import from_rpc
from wire.options import open_channel

CALL_TIMEOUT_S = 30.0
SILENT_TIMEOUT_S = 2.0
LEASE_MS = 600
ANSWER_TOKENS = 6
PROMPTS = 12
KEPT_IDS = 64
Stream = AsyncIterator[Any]


class HostilePrefill(worker_pb2_grpc.PrefillServiceServicer):
    """Stands between decode and a real prefill worker and alters what that says. `plans`: a generator by ticket id."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self.plans: dict[bytes, Plan] = {}

    async def Prefill(self, request_iterator: Stream, context: Any) -> None:  # type: ignore[override] # grpc.aio
        first = await anext(request_iterator)
        plan = self.plans[first.ticket.ticket_id]
        call = worker_pb2_grpc.PrefillServiceStub(self._channel).Prefill()
        await call.write(first)
        pump = asyncio.create_task(self._pump(request_iterator, call))
        try:
            async for event in call:
                for altered in plan.of(event):
                    await context.write(altered)
                if plan.ends:
                    await self._end(plan.rng, context)
                    return
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
        finally:
            pump.cancel()
            call.cancel()

    async def _pump(self, commands: Stream, call: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            async for command in commands:
                await call.write(command)
            await call.done_writing()

    async def _end(self, rng: random.Random, context: Any) -> None:
        """A clean end where none may be, or an error with details that are junk."""
        if rng.random() < 0.5:
            return
        trailers = (("grpc-status-details-bin", rng.randbytes(rng.randrange(40))),)
        await context.abort(rng.choice(list(grpc.StatusCode)[1:]), "the peer's words", trailers)

    async def close(self) -> None:
        await self._channel.close(None)


@dataclass
class Plan:
    """What happens to the events of one handoff. `word`: the first token was touched, which is prefill's to say."""

    rng: random.Random
    seen: int = 0
    ends: bool = False
    word: bool = False
    held: list[worker_pb2.HandoffEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at = self.rng.randrange(8)
        self.way = self.rng.choice(("change", "change", "change", "drop", "twice", "late", "end", "again"))

    def of(self, event: worker_pb2.HandoffEvent) -> list[worker_pb2.HandoffEvent]:
        self.seen += 1
        if self.seen - 1 < self.at:
            self.held.append(event)
            return [event]
        if self.seen - 1 > self.at:
            late, self.held = (self.held, []) if self.way == "late" else ([], self.held)
            return [event, *late]
        if self.way == "change":
            return self._changed(event)
        if self.way in ("drop", "end"):
            self.ends = self.way == "end"
            return []
        if self.way == "late":
            self.held = [event]
            return []
        return [event, event] if self.way == "twice" or not self.held else [event, self.rng.choice(self.held)]

    def _changed(self, event: worker_pb2.HandoffEvent) -> list[worker_pb2.HandoffEvent]:
        altered = mutated(self.rng, event)
        if event.WhichOneof("event") == "completed" and self.rng.random() < 0.3:
            altered = type(event).FromString(event.SerializeToString())
            altered.completed.first_token.token_id = self.rng.choice(
                (-1, 256, 257, 258, 300, 5000, (1 << 31) - 1, -(1 << 31))
            )
        if altered is None:
            return []
        if event.WhichOneof("event") == "accepted" and altered.WhichOneof("event") == "accepted":
            # Another life under this name is the worker's own to claim, and would end all later cases.
            altered.accepted.pool.incarnation = event.accepted.pool.incarnation
        self.word = "completed" in (event.WhichOneof("event"), altered.WhichOneof("event"))
        return [altered]


@dataclass
class Live:
    """The cluster, a second prefill worker behind a hostile front, and what the cases share."""

    lab: EdgeLab
    second: BuiltWorker
    hostile: HostilePrefill
    hostile_endpoint: str
    decode: worker_pb2_grpc.DecodeServiceAsyncStub
    decoding: Decoding  # one session for all cases: a bad request must not end it
    prefill: worker_pb2_grpc.PrefillServiceAsyncStub
    workers: Sequence[worker_pb2_grpc.WorkerServiceAsyncStub]
    gateway: inference_pb2_grpc.InferenceServiceAsyncStub
    prompts: Sequence[tuple[int, ...]]
    before: dict[str, int] = field(default_factory=dict)
    old_ids: deque[bytes] = field(default_factory=lambda: deque(maxlen=KEPT_IDS))

    def ticket(self, rng: random.Random) -> Ticket:
        info = self.lab.subject.model.info
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return Ticket(
            rng.randbytes(16), "default", rng.choice(self.prompts), sampling, info.revision, info.tokenizer_digest
        )

    def require_right(self, message: worker_pb2.Ticket, tokens: Sequence[int], *, whole: bool) -> None:
        """Greedy answers are the oracle's; of a failed request, their beginning."""
        info = self.lab.subject.model.info
        ticket = ticket_from_proto(message, info.vocab_size)
        if ticket.sampling.temperature > 0 or not (tokens or whole):
            return
        whole = whole and not ticket.generated_tokens  # else a part of the answer was there before
        wanted = [t.token_id for t in self.lab.subject.oracle.answer(ticket.token_ids, ticket.sampling)]
        if list(tokens) != (wanted if whole else wanted[: len(tokens)]):
            raise Finding(f"wrong tokens {list(tokens)[:8]}, not {wanted[:8]}")


async def ended(call: Any, take: Callable[[Any], None]) -> GenlockError | None:
    """Reads a call to its end; its typed error. Raises Finding where it does not end by itself."""
    try:
        async for message in call:
            take(message)
    except grpc.aio.AioRpcError as rpc_error:
        error = from_rpc(rpc_error)
        if isinstance(error, DeadlineExceeded):
            raise Finding(f"hangs: {error.message}") from rpc_error
        # grpc's own words when the call ended while this side still wrote to it: the peer's status is lost then.
        return Cancelled("ended_meanwhile", error.message) if "Internal error from Core" in error.message else error
    return None


def short(sampling: Any) -> None:
    """Good requests stay small; bad ones stay as they are."""
    if sampling.max_tokens > ANSWER_TOKENS and sampling.max_tokens < 2000:
        sampling.max_tokens = ANSWER_TOKENS


async def decode_calls(live: Live, rng: random.Random) -> str:
    good = worker_pb2.DecodeRequest(
        ticket=ticket_to_proto(live.ticket(rng)), prefill_endpoint=live.lab.prefill.endpoint, prefill_worker="prefill-0"
    )
    message = mutated(rng, good)
    if message is None:
        return "unparsed"
    short(message.ticket.sampling)
    call = live.decoding.submit(message)
    if rng.random() < 0.1:
        return await left(call, rng)
    tokens, error = await told(call, CALL_TIMEOUT_S)
    if error is None:
        live.require_right(message.ticket, tokens, whole=True)
        return "ok"
    return reason_of(error)


async def left(call: Any, rng: random.Random) -> str:
    """The caller goes away at any moment."""
    await asyncio.sleep(rng.random() * 0.02)
    call.cancel()
    return "left"


async def prefill_commands(live: Live, rng: random.Random) -> str:
    """A ticket, perhaps, and then any commands with ids of this call, of others, of finished ones, of nobody."""
    call = live.prefill.Prefill(timeout=CALL_TIMEOUT_S)
    own: list[bytes] = []

    def command() -> worker_pb2.PrefillCommand:
        kind = rng.randrange(6)
        handoff_id = rng.choice(
            (*own, *list(live.old_ids)[:3], rng.randbytes(16), rng.randbytes(rng.randrange(40)), b"")
        )
        if kind == 0:
            return worker_pb2.PrefillCommand(ticket=ticket_to_proto(live.ticket(rng)))
        if kind in (1, 2):
            return worker_pb2.PrefillCommand(renew=worker_pb2.LeaseRenew(handoff_id=handoff_id))
        if kind in (3, 4):
            suspect = rng.random() < 0.3
            return worker_pb2.PrefillCommand(release=worker_pb2.LeaseRelease(handoff_id=handoff_id, suspect=suspect))
        return (
            mutated(rng, worker_pb2.PrefillCommand(ticket=ticket_to_proto(live.ticket(rng))))
            or worker_pb2.PrefillCommand()
        )

    async def write() -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            if rng.random() < 0.85:
                await call.write(worker_pb2.PrefillCommand(ticket=ticket_to_proto(live.ticket(rng))))
                await asyncio.sleep(rng.choice((0, 0, 0.002, 0.01, 0.05)))
            for _ in range(rng.randrange(5)):
                await call.write(command())
            if own and rng.random() < 0.8:
                await call.write(worker_pb2.PrefillCommand(release=worker_pb2.LeaseRelease(handoff_id=own[0])))
            if rng.random() < 0.9:
                await call.done_writing()

    writer = asyncio.create_task(write())
    try:
        if rng.random() < 0.15:
            return await left(call, rng)
        error = await ended(call, lambda event: own.append(event.handoff_id) if not own else None)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        call.cancel()
    live.old_ids.extend(own)
    return "ok" if error is None else reason_of(error)


async def handoffs(live: Live, rng: random.Random) -> str:
    ticket = live.ticket(rng)
    message = worker_pb2.DecodeRequest(
        ticket=ticket_to_proto(ticket), prefill_endpoint=live.hostile_endpoint, prefill_worker="prefill-1"
    )
    plan = live.hostile.plans[ticket.ticket_id] = Plan(rng)
    # A peer that lives and says nothing keeps a request until its deadline, like one that computes for long.
    message.left_ms = int(SILENT_TIMEOUT_S * 1000)
    try:
        tokens, error = await told(live.decoding.submit(message), CALL_TIMEOUT_S + SILENT_TIMEOUT_S)
    finally:
        del live.hostile.plans[ticket.ticket_id]
    vocabulary = live.lab.subject.model.info.vocab_size
    if not all(0 <= token < vocabulary for token in tokens):
        raise Finding(f"tokens outside the vocabulary: {tokens}")
    if not plan.word:
        live.require_right(message.ticket, tokens, whole=error is None)
    if isinstance(error, InvalidInput):
        raise Finding(f"the caller is blamed for what prefill said: {error.reason}")
    outcome = "ok" if error is None else reason_of(error)
    return f"{outcome} (prefill's word)" if plan.word and error is None else outcome


async def generate(live: Live, rng: random.Random) -> str:
    good = pb.GenerateRequest(
        request_id="fuzz", tokens=pb.TokenPrompt(token_ids=rng.choice(live.prompts)), stream=rng.random() < 0.5,
        sampling_params=pb.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, n=1, ignore_eos=True),
    )  # fmt: skip
    if rng.random() < 0.3:
        good.chat.messages.add(role="user", content="a question")
    message = mutated(rng, good)
    if message is None:
        return "unparsed"
    if not message.sampling_params.HasField("max_tokens"):
        message.sampling_params.max_tokens = ANSWER_TOKENS
    short(message.sampling_params)
    call = live.gateway.Generate(message, timeout=CALL_TIMEOUT_S)
    if rng.random() < 0.1:
        return await left(call, rng)
    finished: list[bool] = []
    error = await ended(call, lambda answer: finished.append(answer.HasField("finished")))
    if error is None and not any(finished):
        raise Finding("an answer ended well without its end")
    return "ok" if error is None else reason_of(error)


async def statuses(live: Live, rng: random.Random) -> str:
    """Many at once, of which some carry what no version knows."""
    message = worker_pb2.WorkerStatusRequest()
    if rng.random() < 0.5:
        with contextlib.suppress(Exception):  # not a message: nothing to send
            message = worker_pb2.WorkerStatusRequest.FromString(b"\x0a" + bytes([8]) + rng.randbytes(8))
    status = await rng.choice(live.workers).Status(message, timeout=CALL_TIMEOUT_S)
    if status.pool.pages < status.pool.free:
        raise Finding("more pages are free than there are")
    return "ok"


LiveCase = Callable[[Live, random.Random], Awaitable[str]]
LIVE: dict[str, tuple[int, LiveCase]] = {
    "calls to decode": (300, decode_calls),
    "commands to prefill": (300, prefill_commands),
    "events from prefill": (500, handoffs),
    "calls to the gateway": (300, generate),
    "status calls": (300, statuses),
}


@contextlib.asynccontextmanager
async def live_cluster() -> AsyncIterator[Live]:
    """Up and warm."""
    subject = await asyncio.to_thread(load_subject, "probe")
    lab = EdgeLab(subject, **{
        "cache.decode_pages": 256, "cache.prefill_pages": 128, "transfer.lease_ms": LEASE_MS, "workers.max_waiting": 64,
    })  # fmt: skip
    await lab.start()
    tuning = replace(lab.inject.prefill_tuning(lab.checks, subject.model, lambda: 0), clock=lab.prefill.tuning.clock)
    second = BuiltWorker(WorkerSpec(Role.PREFILL, "prefill-1", lab._prefill_config), tuning)
    await second.start()
    hostile = HostilePrefill(second.endpoint)
    server = grpc.aio.server()
    worker_pb2_grpc.add_PrefillServiceServicer_to_server(hostile, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = [open_channel(worker.endpoint) for worker in (lab.decode, lab.prefill)]
    decode = worker_pb2_grpc.DecodeServiceStub(channels[0])
    session = DecodeSession(lambda: decode.Session(None), itertools.count(1))
    live = Live(
        lab, second, hostile, f"127.0.0.1:{port}", decode, Decoding(session),
        worker_pb2_grpc.PrefillServiceStub(channels[1]),
        [worker_pb2_grpc.WorkerServiceStub(channel) for channel in channels],
        inference_pb2_grpc.InferenceServiceStub(lab.client.channel),
        [subject.prompt(f"fuzz {i}", 20 + 9 * i) for i in range(PROMPTS)],
    )  # fmt: skip
    try:
        for worker in ("prefill-0", "prefill-1"):  # everything that is made once is there before anything is counted
            await warm(live, worker)
        live.before = counts()
        yield live
        if session.over:
            raise Finding("a request ended the session that it shared with others")
    finally:
        await session.close()
        for channel in channels:
            await channel.close(None)
        await hostile.close()
        await server.stop(None)
        await second.stop(0)
        await lab.stop()


async def warm(live: Live, worker: str) -> None:
    endpoint = (live.lab.prefill if worker == "prefill-0" else live.second).endpoint
    message = worker_pb2.DecodeRequest(
        ticket=ticket_to_proto(live.ticket(random.Random(1))), prefill_endpoint=endpoint, prefill_worker=worker
    )
    _tokens, error = await live.decoding.run(message, CALL_TIMEOUT_S)
    assert error is None, error
    await require_served(live.lab)


def counts() -> dict[str, int]:
    """What must not grow."""
    return {"files": len(os.listdir("/proc/self/fd")), "tasks": len(asyncio.all_tasks())}


async def require_baseline(live: Live) -> None:
    """Every page is back on all workers, nothing runs, nothing was surprised, nothing is left behind."""
    await require_served(live.lab)
    await live.lab.require_quiet()
    engine = live.second.engine
    await engine.loop.call(engine.core.evict_all)  # type: ignore[union-attr] # prefill's
    await live.lab.until(lambda: live.second.guard.free_pages == live.second.guard.slots, "the second worker's pages")
    for worker in (live.lab.prefill, live.second, live.lab.decode):
        if worker.engine.loop.surprises:
            raise Finding(f"{worker.worker_id} had {worker.engine.loop.surprises} surprises")
    before, after = live.before, counts()
    # Channels to endpoints that were tried are kept, as many as decode.pull allows; each may hold a few files.
    slack = {"files": 4 * len(live.lab.decode._handoffs.channels._open) + 64, "tasks": 16}  # type: ignore[union-attr] # decode's
    grown = {name: (before[name], after[name]) for name in before if after[name] > before[name] + slack[name]}
    if grown:
        raise Finding(f"left behind: {grown}")


async def beside(live: Live, work: Callable[[], Awaitable[None]]) -> None:
    """A healthy request runs while `work` does."""
    async with Neighbour(live.lab):
        await work()


async def drains(live: Live, count: int, rng: random.Random) -> None:
    """The last thing that is done to a cluster: everybody drains everybody, again and again."""

    async def one() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await rng.choice(live.workers).Drain(worker_pb2.DrainRequest(), timeout=rng.choice((0.01, 0.5, 20.0)))

    await asyncio.gather(*(one() for _ in range(count)))
    for stub in live.workers:
        await stub.Drain(worker_pb2.DrainRequest(), timeout=CALL_TIMEOUT_S)
        status = await stub.Status(worker_pb2.WorkerStatusRequest(), timeout=CALL_TIMEOUT_S)
        if not status.draining or status.running_requests:
            raise Finding("a drained worker is not drained")
