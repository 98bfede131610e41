"""A real gateway over real gRPC in front of scripted workers, and a client's small words for it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from cluster.gateway.front_door import MESSAGE_TIMEOUT_S
from cluster.gateway.served import Sources, StreamChecks
from cluster.gateway.server import Gateway
from cluster.roles import Role
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, operator_pb2_grpc
from kvstore.errors import (
    GenlockError,
)
from tests.support.fake_workers import (
    CONTEXT_TOKENS,
    ByteTokenizer,
    FakeWorker,
    Script,
    config,
    echo,
    served_model,
)
from wire.calls import responses
from wire.clocks import now_ms

SCRIPTED = StreamChecks(judge_answers=False)


def counting_bytes():
    counter = itertools.count(1)
    return lambda count: next(counter).to_bytes(count, "little")


@asynccontextmanager
async def cluster(
    script: Script = echo,
    *,
    decoders: int = 1,
    tokenizer: ByteTokenizer | None = None,
    context_tokens: int = CONTEXT_TOKENS,
    ready: bool = True,
    checks: StreamChecks = SCRIPTED,
    authenticator=None,
    message_timeout_s: float = MESSAGE_TIMEOUT_S,
    **flags: object,
) -> AsyncIterator[SimpleNamespace]:
    """`checks`: by default scripts may end an answer after any token; `StreamChecks()` holds them to what they can."""
    workers = [FakeWorker(f"decode-{index}", Role.DECODE, script) for index in range(decoders)]
    workers.append(FakeWorker("prefill-0", Role.PREFILL, script))
    sources = Sources(now_ms=now_ms, random_bytes=counting_bytes())
    gateway = Gateway(
        config(**flags), served_model(tokenizer, context_tokens), sources, checks=checks, authenticator=authenticator,
        message_timeout_s=message_timeout_s,
    )  # fmt: skip
    endpoint = await gateway.start()
    channel = grpc.aio.insecure_channel(endpoint, options=[("grpc.max_send_message_length", 64 << 20)])
    try:
        for worker in workers:
            gateway.add_worker(worker.worker_id, worker.role, await worker.start())
        if ready:
            await gateway.wait_ready(5000)
        yield SimpleNamespace(
            gateway=gateway,
            workers=workers,
            decode=workers[0],
            decoders=workers[:-1],
            prefill=workers[-1],
            channel=channel,
            endpoint=endpoint,
            stub=inference_pb2_grpc.InferenceServiceStub(channel),
            operator=operator_pb2_grpc.OperatorServiceStub(channel),
            state=gateway.state,
        )
    finally:
        await channel.close()
        await gateway.stop(0)
        for worker in workers:
            await worker.stop()


def prompt(text: str = "hello", request_id: str = "r1", *, stream: bool | None = None, **params: object):
    request = pb.GenerateRequest(request_id=request_id, text=text, sampling_params=pb.SamplingParams(**params))
    if stream is not None:
        request.stream = stream
    return request


async def first_of(call) -> AsyncIterator[pb.GenerateResponse]:
    """Reads one message; returns what reads the rest."""
    rest = responses(call)
    await anext(rest)
    return rest


async def read(call) -> list[pb.GenerateResponse]:
    messages = responses(call) if isinstance(call, grpc.aio.UnaryStreamCall) else call
    return [message async for message in messages]


async def refused(call) -> GenlockError:
    with pytest.raises(GenlockError) as caught:
        await read(call)
    return caught.value


def text_of(messages, index: int = 0) -> str:
    return "".join(message.text for message in messages if message.index == index)


async def idle(env) -> None:
    """Everything is given back."""
    async with asyncio.timeout(5):
        while env.state.running or env.state.ledger.loads:
            await asyncio.sleep(0.005)
