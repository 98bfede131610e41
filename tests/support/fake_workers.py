"""Stand-ins for a model's tokenizer and for workers, so that the gateway is tested over real gRPC without a model."""

from __future__ import annotations

import asyncio
import codecs
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from cluster.config import load
from cluster.gateway.served import ServedModel
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.settings import Config
from genlock.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, InvalidInput
from model.base import ModelInfo
from wire.convert import token_from_proto
from wire.interceptor import TypedErrors
from wire.options import server_options
from wire.session import Handle, Session, Tell

EOS = 256
VOCAB = 300
CONTEXT_TOKENS = 256
STEP_S = 0.01


class ByteTokenizer:
    """One token a byte; 256 is the end of sequence."""

    digest = "bytes"
    shows_tools = False
    vocab_size = VOCAB
    eos_token_ids = (EOS,)

    def __init__(self, refuse: InvalidInput | None = None) -> None:
        self.refuse = refuse

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True, tools: Sequence[object] = ()
    ) -> list[int]:
        if self.refuse is not None:
            raise self.refuse
        if tools:
            raise InvalidInput("tools_unsupported", "this model's chat template shows no tools", field="tools")
        return self.encode("".join(f"{message['role']}:{message['content']}\n" for message in messages))

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def token_text(self, token_id: int) -> str:
        return chr(token_id) if token_id < 128 else f"<{token_id}>"

    def stream(self) -> ByteStream:
        return ByteStream()


class ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def served_model(tokenizer: ByteTokenizer | None = None, context_tokens: int = CONTEXT_TOKENS) -> ServedModel:
    tokenizer = tokenizer or ByteTokenizer()
    info = ModelInfo("toy", "rev-1", tokenizer.digest, VOCAB, context_tokens, (EOS,))
    return ServedModel(info, tokenizer)


def config(**flags: object) -> Config:
    """A gateway's config on a free port; `api__port=1` sets `api.port`."""
    merged: dict[str, object] = {"api.port": 0, "workers.status_poll_ms": 50, "workers.status_timeout_ms": 2000}
    merged.update({key.replace("__", "."): value for key, value in flags.items()})
    return load(flags=merged).config


def tokens(text: str | bytes, *, top: int = -1) -> worker_pb2.DecodeEvent:
    """One tick's tokens, a byte each."""
    data = text.encode() if isinstance(text, str) else text
    return worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(tokens=[sampled(byte, top) for byte in data]))


def sampled(token_id: int, top: int = -1) -> worker_pb2.SampledToken:
    """Its log-probability and `top` alternatives are as unlikely as each other."""
    best = [worker_pb2.SampledLogprob(token_id=(token_id + at) % VOCAB, logprob=-0.5) for at in range(top)]
    return worker_pb2.SampledToken(token_id=token_id, logprob=-0.5, top=best)


def finished(
    count: int, reason: inference_pb2.FinishReason = inference_pb2.FINISH_REASON_LENGTH
) -> worker_pb2.DecodeEvent:
    return worker_pb2.DecodeEvent(
        finished=worker_pb2.DecodeFinished(
            finish_reason=reason,
            completion_tokens=count,
            cached_tokens=3,
            queue_ms=1.0,
            prefill_ms=2.0,
            transfer_ms=3.0,
            verification=inference_pb2.Verification(pages_received=2, bytes_received=4096, read_checks=9),
        )
    )


@dataclass
class Seen:
    """One call that a fake worker got, and how it ended."""

    request: worker_pb2.DecodeRequest
    remaining_s: float | None
    ended: str = "open"
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    assigned: list[worker_pb2.PrefillAssigned] = field(default_factory=list)


Script = Callable[["FakeWorker", worker_pb2.DecodeRequest], AsyncIterator[worker_pb2.DecodeEvent]]


def say(*events: worker_pb2.DecodeEvent | GenlockError | Awaitable[object]) -> Script:
    """A script: each event is sent, an error is raised, anything awaitable is waited for."""

    async def script(_fake: FakeWorker, _request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
        for event in events:
            if isinstance(event, GenlockError):
                raise event
            if isinstance(event, worker_pb2.DecodeEvent):
                yield event
            else:
                await event

    return script


async def echo(_fake: FakeWorker, request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
    """Answers with the prompt's own tokens, as many as were asked for; where these are more, with an end of sequence
    after them."""
    most, asked = request.ticket.sampling.max_tokens, request.ticket.sampling.logprobs
    ids = list(request.ticket.token_ids)[:most]
    for token in ids:
        yield tokens(bytes([token]), top=asked)
    if len(ids) == most or request.ticket.sampling.ignore_eos:
        yield finished(len(ids))
        return
    yield worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(tokens=[sampled(EOS, asked)]))
    yield finished(len(ids) + 1, inference_pb2.FINISH_REASON_STOP)


async def hang(_fake: FakeWorker, _request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
    """One token, then nothing."""
    yield tokens("x")
    await asyncio.sleep(60)


class FakeWorker(worker_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """A worker of either role whose answers are scripted."""

    def __init__(self, worker_id: str, role: Role, script: Script = echo) -> None:
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.seen: list[Seen] = []
        self.draining = False
        self.incarnation = secrets.randbits(62) | 1
        self.step_age_ms = 0
        self.status_delay_s = 0.0
        self.leases = worker_pb2.WorkerLeases()
        self.endpoint = ""
        self._cut = asyncio.Event()
        self._handlers: set[asyncio.Task[object] | None] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(interceptors=(TypedErrors(),), options=server_options())
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.endpoint = f"127.0.0.1:{bound}"
        return self.endpoint

    async def stop(self, grace_ms: int = 0) -> None:
        if self._server is not None:
            await self._server.stop(grace_ms / 1000)
            self._server = None
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=2)
        await asyncio.sleep(0)

    async def Session(self, commands, context):
        self._handlers.add(asyncio.current_task())
        session, cut = Session(self._start, context), asyncio.create_task(self._cut.wait())
        running = asyncio.create_task(session.run(commands))
        try:
            await asyncio.wait({running, cut}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut.cancel()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            self._handlers.discard(asyncio.current_task())

    async def _start(self, request: worker_pb2.DecodeRequest, tell: Tell) -> Handle:
        seen = Seen(request, request.left_ms / 1000)
        self.seen.append(seen)
        playing = asyncio.create_task(self._play(request, tell, seen))
        return Handle(playing.cancel, seen.assigned.append)

    async def _play(self, request: worker_pb2.DecodeRequest, tell: Tell, seen: Seen) -> None:
        complete = False
        try:
            async for event in self.script(self, request):
                for token in event.tokens.tokens:
                    tell(token_from_proto(token))
                if event.HasField("finished"):
                    complete = True
                    tell(event.finished)
                # The next step: what is told at once leaves as one message.
                await asyncio.sleep(STEP_S)
            seen.ended = "ok"
        except asyncio.CancelledError:
            seen.ended = "cancelled"
            raise
        except GenlockError as error:
            seen.ended, complete = error.reason, True
            tell(error)
        finally:
            seen.closed.set()
        if not complete:
            # The worker goes away in the middle of an answer.
            await asyncio.sleep(0.05)
            self._cut.set()

    async def Status(self, request, context):
        await asyncio.sleep(self.status_delay_s)
        return worker_pb2.WorkerStatus(
            worker_id=self.worker_id,
            role=self.role.value,
            incarnation=self.incarnation,
            draining=self.draining,
            step_age_ms=self.step_age_ms,
            layout_fingerprint="layout",
            pool=worker_pb2.PoolStatus(pages=10, free=10),
        )

    async def Leases(self, request, context):
        return self.leases

    async def Drain(self, request, context):
        self.draining = True
        return worker_pb2.DrainResponse(drained=True)


async def ended(workers: Sequence[FakeWorker], count: int, limit_s: float = 5.0) -> list[str]:
    """How the first `count` calls ended, waiting for them."""
    async with asyncio.timeout(limit_s):
        while sum(len(worker.seen) for worker in workers) < count:
            await asyncio.sleep(0.005)
        calls = [seen for worker in workers for seen in worker.seen]
        for seen in calls:
            await seen.closed.wait()
    return [seen.ended for seen in calls]


class BuiltFake(FakeWorker):
    """What a launcher's builder makes: decode answers from the prompt, and a worker can be told to fail."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec.worker_id, spec.role)
        self.stops: list[int] = []
        self.fail: GenlockError | None = None

    async def start(self, port: int = 0) -> str:
        if self.fail is not None:
            raise self.fail
        return await super().start(port)

    async def stop(self, grace_ms: int = 0) -> None:
        self.stops.append(grace_ms)
        await super().stop(grace_ms)


def build_fake(spec: WorkerSpec) -> BuiltFake:
    return BuiltFake(spec)


def build_fake_that_fails_as_decode(spec: WorkerSpec) -> BuiltFake:
    worker = BuiltFake(spec)
    if spec.role is Role.DECODE:
        worker.fail = InvalidInput("bad_layout", "layout.page_tokens is odd", field="layout.page_tokens")
    return worker


def build_fake_that_hangs(spec: WorkerSpec) -> BuiltFake:
    worker = BuiltFake(spec)

    async def start(port: int = 0) -> str:
        await asyncio.sleep(60)
        return ""

    worker.start = start  # type: ignore[method-assign]  # a stand-in
    return worker


async def load_fake(_config: Config) -> ServedModel:
    return served_model()
