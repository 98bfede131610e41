"""The gRPC door and who must not cost it anything: callers without a credential, messages that do not come or are of
many tiny parts."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.gateway import front_door
from cluster.gateway.identity import authenticator_from
from cluster.gateway.server import SPARE_STREAMS
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import operator_pb2
from kvstore.errors import DeadlineExceeded, InvalidInput, NoCapacity, Unauthenticated
from tests.support.gateway_cluster import cluster, prompt, read, refused, text_of
from wire.errors import from_rpc

GENERATE = "/genlock.v1.InferenceService/Generate"
TENANTS = """
tenants:
  acme: {tokens_sha256: [2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b], max_requests: 2}
"""
ACME = (("authorization", "Bearer secret"),)
PARTS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb.DESCRIPTOR, operator_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


@pytest.fixture
def read_messages(monkeypatch) -> list[int]:
    """Sizes of messages that the door has read."""
    sizes: list[int] = []
    inner = front_door._read

    async def noting(context, limit_s: float) -> bytes:
        data = await inner(context, limit_s)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(front_door, "_read", noting)
    return sizes


def tenants():
    return authenticator_from(TENANTS, "t.yaml")


@pytest.mark.parametrize("method", sorted(PARTS))
@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer nope"),)], ids=["none", "unknown"])
async def test_a_stranger_is_refused_without_its_message(method: str, metadata, read_messages: list[int]):
    """Its message never comes: grpc itself would wait for it for ever."""
    async with cluster(authenticator=tenants()) as env:
        call = env.channel.stream_stream(method)(metadata=metadata, timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert type(from_rpc(caught.value)) is Unauthenticated
        raw = env.channel.unary_stream(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"x" * 400_000, metadata=metadata, timeout=20).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert read_messages == []
        assert dict(env.state.outcomes) == (
            {("bad_credential" if metadata else "no_credential"): 2} if method == GENERATE else {}
        )
        assert text_of(await read(env.stub.Generate(prompt("hi"), timeout=20, metadata=ACME))) == "hi"
        assert len(read_messages) == 1


@pytest.mark.parametrize("method", [*sorted(PARTS), "/grpc.health.v1.Health/Check"])
async def test_a_message_that_does_not_come_has_a_deadline(method: str):
    async with cluster(message_timeout_s=0.2) as env:
        call = env.channel.stream_stream(method)(timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc(caught.value)
        assert (type(error), error.reason) == (DeadlineExceeded, "body_timeout")
        call = env.channel.stream_stream(method)(timeout=20)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc(caught.value).reason == "malformed_request"
        assert text_of(await read(env.stub.Generate(prompt("hi"), timeout=20))) == "hi"


async def test_messages_that_are_being_read_are_bounded_for_each_tenant():
    async with cluster(authenticator=tenants()) as env:
        waiting = [
            env.channel.stream_stream(GENERATE)(metadata=ACME, timeout=30) for _ in range(2 + front_door.SPARE_MESSAGES)
        ]
        for call in waiting:
            await call.wait_for_connection()
        error = await refused(env.stub.Generate(prompt("hi"), timeout=20, metadata=ACME))
        assert (type(error), error.reason) == (NoCapacity, "tenant_full")
        for call in waiting:
            call.cancel()
        async with asyncio.timeout(20):
            while (await asyncio.gather(*_tried(env)))[0] != "hi":
                await asyncio.sleep(0.01)


def _tried(env):
    async def one() -> str:
        try:
            return text_of(await read(env.stub.Generate(prompt("hi"), timeout=20, metadata=ACME)))
        except NoCapacity:
            return ""

    return [one()]


async def test_a_message_of_many_tiny_parts_is_refused_before_it_is_built():
    field = pb.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    inner = pb.ChatPrompt(messages=[pb.ChatMessage()]).SerializeToString() * 100_000
    size, varint = len(inner), b""
    while size > 127:
        varint, size = varint + bytes([size & 127 | 128]), size >> 7
    data = bytes([field << 3 | 2]) + varint + bytes([size]) + inner
    async with cluster() as env:
        for method in (GENERATE, "/genlock.v1.InferenceService/Tokenize"):
            kind = PARTS[method].input_type.fields_by_name["chat"].number
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await env.channel.unary_stream(method)(bytes([kind << 3 | 2]) + data[1:], timeout=20).read()
            error = from_rpc(caught.value)
            assert (type(error), error.reason) == (InvalidInput, "too_many_values")
        assert dict(env.state.outcomes) == {"too_many_values": 1}


async def test_a_long_text_is_taken():
    """Longer than what is parsed on the loop."""
    async with cluster() as env:
        error = await refused(env.stub.Generate(prompt("x" * 200_000), timeout=20))
        assert error.reason == "prompt_too_long"


async def test_calls_of_one_connection_are_bounded():
    """grpc's clients wait with calls beyond what the server says that it takes."""
    async with cluster(api__max_requests=1) as env:
        health = health_pb2_grpc.HealthStub(env.channel)
        held = [health.Watch(health_pb2.HealthCheckRequest(), timeout=60) for _ in range(1 + SPARE_STREAMS)]
        for call in held:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with grpc.aio.insecure_channel(env.endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as other:
            await health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest(), timeout=20)
        for call in held:
            call.cancel()


async def test_connections_are_bounded():
    async with cluster(api__max_connections=2) as env:
        options = [("grpc.use_local_subchannel_pool", 1)]
        more = [grpc.aio.insecure_channel(env.endpoint, options=options) for _ in range(3)]
        tried = [
            health_pb2_grpc.HealthStub(one).Check(health_pb2.HealthCheckRequest(), timeout=1, wait_for_ready=True)
            for one in more
        ]
        codes = [
            result for result in await asyncio.gather(*tried, return_exceptions=True) if isinstance(result, Exception)
        ]
        assert len(codes) == 1
        for one in more:
            await one.close()
