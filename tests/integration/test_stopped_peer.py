"""A peer that is stopped keeps its connection and says nothing: calls to it and from it end all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import grpc.aio
import pytest

from kvstore.errors import Unavailable
from wire.errors import from_rpc
from wire.options import channel_options, server_options

SERVER = """
import asyncio, grpc, grpc.aio
from wire.options import server_options

async def stream(request, context):
    await context.write(b"x")
    await asyncio.sleep(600)

async def main():
    server = grpc.aio.server(options=server_options())
    method = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": method}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_stream_of_a_stopped_peer_ends():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            port = int(peer.stdout.readline())
            # The default's intervals, shortened; the library's own limit would be a minute.
            options = channel_options(ping_ms=1_000, ping_timeout_ms=500)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                call = channel.unary_stream("/a/b")(b"", timeout=45)
                assert await call.read() == b"x"
                os.kill(peer.pid, signal.SIGSTOP)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert isinstance(from_rpc(caught.value), Unavailable)
        finally:
            peer.kill()


CLIENT = """
import grpc, sys
with grpc.insecure_channel(sys.argv[1]) as channel:
    for _ in channel.unary_stream("/a/b")(b""):
        print("read", flush=True)
"""


async def test_a_stream_to_a_stopped_caller_ends():
    ended = asyncio.Event()

    async def stream(_request, context):
        try:
            await context.write(b"x")
            await asyncio.sleep(600)
        finally:
            ended.set()

    server = grpc.aio.server(options=server_options(ping_ms=300, ping_timeout_ms=500))
    method = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", {"b": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, f"127.0.0.1:{port}", stdout=subprocess.PIPE
    )
    try:
        assert caller.stdout is not None
        assert await caller.stdout.readline() == b"read\n"
        os.kill(caller.pid, signal.SIGSTOP)
        await asyncio.wait_for(ended.wait(), 45)
    finally:
        caller.kill()
        await caller.wait()
        await server.stop(0)


@pytest.mark.parametrize("options", [channel_options(), server_options()])
def test_the_options_agree(options: list[tuple[str, int]]):
    options = dict(options)
    assert options["grpc.http2.ping_timeout_ms"] == options["grpc.keepalive_timeout_ms"]
