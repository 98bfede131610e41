"""A stream that is cancelled at any moment of its first messages still tells its caller how it ended."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from kvstore.errors import Unavailable
from wire.errors import abort_with
from wire.replies import Replies

METHOD = "/test.Service/Stream"


async def _run(delay_turns: int, make) -> grpc.StatusCode:
    """One call whose handler is cut after so many turns of the loop; the status that the caller got."""

    async def handler(_request: bytes, context) -> None:
        write = make(context)

        async def writing() -> None:
            while True:
                await write(b"message")

        task = asyncio.create_task(writing())
        for _ in range(delay_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await abort_with(context, Unavailable("worker_stopped", "cut"))

    server = grpc.aio.server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_stream(METHOD)(b"", timeout=2)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [message async for message in call]
            return caught.value.code()
    finally:
        await server.stop(0)


@pytest.mark.parametrize("turns", range(8))
async def test_a_cut_stream_gets_its_status(turns: int) -> None:
    assert await _run(turns, lambda context: Replies(context).write) is grpc.StatusCode.UNAVAILABLE


async def test_control_without_headers_first_a_caller_waits_for_ever() -> None:
    """If this fails, grpc has mended it, and `wire/replies.py` can go."""
    codes = await asyncio.gather(*(_run(turns, lambda context: context.write) for turns in range(4)))
    assert grpc.StatusCode.DEADLINE_EXCEEDED in codes
