"""The interceptor and the readers over real calls: only typed errors come out, on either side."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from kvstore.errors import Cancelled, GenlockError, InvalidInput, StalePage, Unavailable
from wire.calls import answer, responses
from wire.interceptor import TypedErrors
from wire.options import open_channel, server_options


async def unary(request, context):
    if request == b"typed":
        raise StalePage("stale", "moved on")
    if request == b"bug":
        raise ValueError("secret")
    if request == b"cancelled":
        raise Cancelled("gone", "left")
    if request == b"hang":
        await asyncio.sleep(60)
    return request


async def generator(request, context):
    yield b"one"
    yield await unary(request, context)


async def writer(request, context):
    await context.write(b"one")
    await context.write(await unary(request, context))


async def echo(requests, context):
    async for request in requests:
        yield await unary(request, context)


def parse(data: bytes) -> bytes:
    # Stands for a protobuf parser that meets a text which is not UTF-8.
    data.decode()
    return data


@asynccontextmanager
async def server(refused: list | None = None):
    heard = [] if refused is None else refused
    aio = grpc.aio.server(interceptors=(TypedErrors(on_refused=lambda *what: heard.append(what)),))
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, parse),
        "Generator": grpc.unary_stream_rpc_method_handler(generator, parse),
        "Writer": grpc.unary_stream_rpc_method_handler(writer, parse),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
    }
    aio.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("genlock.T", handlers),))
    port = aio.add_insecure_port("127.0.0.1:0")
    await aio.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await aio.stop(0)


def call(channel, method: str, request: bytes, timeout: float = 5.0):
    path = f"/genlock.T/{method}"
    if method == "Unary":
        return channel.unary_unary(path)(request, timeout=timeout)
    if method == "Echo":
        return channel.stream_stream(path)(iter([b"one", request]), timeout=timeout)
    return channel.unary_stream(path)(request, timeout=timeout)


async def outcome(channel, method: str, request: bytes) -> tuple[list[bytes], GenlockError | None]:
    got: list[bytes] = []
    try:
        if method == "Unary":
            got.append(await answer(call(channel, method, request)))
        else:
            async for message in responses(call(channel, method, request)):
                got.append(message)  # noqa: PERF401  # what came before an error is looked at too
    except GenlockError as error:
        return got, error
    return got, None


@pytest.mark.parametrize("method", ["Unary", "Generator", "Writer", "Echo"])
async def test_every_kind_of_handler_gives_typed_errors(method: str, caplog):
    before = [] if method == "Unary" else [b"one"]
    async with server() as channel:
        assert await outcome(channel, method, b"fine") == ([*before, b"fine"], None)
        got, error = await outcome(channel, method, b"typed")
        assert (got, type(error), error.reason, error.message) == (before, StalePage, "stale", "moved on")
        got, error = await outcome(channel, method, b"bug")
        assert (got, type(error), error.reason) == (before, GenlockError, "internal")
        assert "secret" not in error.message
        # The peer's CANCELLED is an answer, not the end of this task.
        got, error = await outcome(channel, method, b"cancelled")
        assert (got, type(error)) == (before, Cancelled)
    assert "secret" not in caplog.text


@pytest.mark.parametrize("method", ["Unary", "Generator", "Writer"])
async def test_bytes_that_cannot_be_parsed_are_invalid_input(method: str):
    heard: list = []
    async with server(heard) as channel:
        _got, error = await outcome(channel, method, b"\xff")
        assert (type(error), error.reason) == (InvalidInput, "malformed_request")
    assert [method for method, _error in heard] == [f"/genlock.T/{method}"]


@pytest.mark.parametrize("method", ["Unary", "Generator", "Writer", "Echo"])
async def test_cancelling_the_reader_s_task_is_a_cancel(method: str):
    async with server() as channel:
        task = asyncio.create_task(outcome(channel, method, b"hang"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_call_that_somebody_else_cancels_is_an_error_and_no_cancel_of_the_reader():
    async with server() as channel:
        stream = call(channel, "Generator", b"hang")
        reading = responses(stream)
        assert await anext(reading) == b"one"
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(Cancelled):
            await anext(reading)
        single = call(channel, "Unary", b"hang")
        asyncio.get_running_loop().call_later(0.05, single.cancel)
        with pytest.raises(Cancelled):
            await answer(single)


async def test_leaving_early_cancels_the_call():
    async with server() as channel:
        stream = call(channel, "Generator", b"hang")
        reading = responses(stream)
        await anext(reading)
        await reading.aclose()
        assert stream.cancelled()


async def test_a_server_that_is_not_there_is_unavailable():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        for method in ("Unary", "Generator"):
            _got, error = await outcome(channel, method, b"x")
            assert (type(error), error.reason) == (Unavailable, "peer_unreachable")


@pytest.mark.slow
async def test_a_stream_that_is_long_silent_survives_our_own_pings():
    """A server that does not expect the pings of `channel_options` ends the connection after the third one."""

    async def silent(request, context):
        yield b"one"
        await asyncio.sleep(42)
        yield b"two"

    aio = grpc.aio.server(options=server_options())
    handlers = {"Do": grpc.unary_stream_rpc_method_handler(silent)}
    aio.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("genlock.T", handlers),))
    port = aio.add_insecure_port("127.0.0.1:0")
    await aio.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        got = [message async for message in responses(channel.unary_stream("/genlock.T/Do")(b"", timeout=60))]
    await aio.stop(0)
    assert got == [b"one", b"two"]
