"""A peer that takes a while to answer a connection is slow and not gone."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from wire.options import open_channel, server_options

SLOW_S = 0.3


async def test_a_peer_that_accepts_a_connection_late_is_reached():
    server = grpc.aio.server(options=server_options())
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SLOW_S)
        to_server, from_server = (await asyncio.open_connection("127.0.0.1", port))[::-1]
        await asyncio.gather(copy(reader, to_server), copy(from_server, writer), return_exceptions=True)

    front = await asyncio.start_server(late, "127.0.0.1", 0)
    host, front_port = front.sockets[0].getsockname()[:2]
    channel = open_channel(f"{host}:{front_port}")
    try:
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert (await check).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await channel.close(None)
        front.close()
        await server.stop(None)
