"""Connections of the HTTP door whose TLS greeting does not end: so many, so long, and nobody else is kept waiting."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.devca import DevCertificates, make
from cluster.openai.lobby import Lobby
from cluster.openai.server import HttpDoor
from tests.support.gateway_cluster import cluster

NOW = datetime.datetime.now(datetime.UTC)
MAX_CONNECTIONS = 3


@pytest.fixture
def made(tmp_path: Path) -> DevCertificates:
    return make(tmp_path, [], NOW)


@asynccontextmanager
async def door(made: DevCertificates) -> AsyncIterator[tuple[HttpDoor, int]]:
    async with cluster(
        api__http_port=0, api__max_connections=MAX_CONNECTIONS, tls__cert_file=str(made.cert),
        tls__key_file=str(made.key), tls__ca_file=str(made.ca), ready=False,
    ) as env:  # fmt: skip
        door = HttpDoor(env.gateway.state)
        url = await door.start()
        try:
            yield door, int(url.removesuffix("/v1").rpartition(":")[2])
        finally:
            await door.stop()


async def silent(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TCP connection that sends nothing of a greeting."""
    return await asyncio.open_connection("127.0.0.1", port)


async def gone(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes it, within a while."""
    try:
        return await asyncio.wait_for(reader.read(), 5) == b""
    except ConnectionResetError:
        return True


async def asked(made: DevCertificates, port: int) -> bytes:
    """The first line of an answer; the request leaves together with the end of the greeting."""
    trusting = ssl.create_default_context(cafile=str(made.ca))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="localhost")
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    line = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    return line


async def settled(lobby: Lobby, greetings: int) -> None:
    async with asyncio.timeout(5):
        while len(lobby.greetings) != greetings:
            await asyncio.sleep(0.005)


async def test_greetings_that_do_not_end_are_bounded_in_number(made: DevCertificates) -> None:
    async with door(made) as (running, port):
        lobby = running._lobby
        assert lobby is not None
        held = [await silent(port) for _ in range(MAX_CONNECTIONS)]
        await settled(lobby, MAX_CONNECTIONS)
        for _ in range(3):
            reader, _writer = await silent(port)
            assert await gone(reader)
        assert len(lobby.greetings) == MAX_CONNECTIONS
        for _reader, writer in held:
            writer.close()
        await settled(lobby, 0)
        assert await asked(made, port) == b"HTTP/1.1 200 OK\r\n"


async def test_greetings_that_do_not_end_are_bounded_in_time(made: DevCertificates, monkeypatch) -> None:
    monkeypatch.setattr(Lobby, "greeting_s", 0.2)
    async with door(made) as (running, port):
        assert running._lobby is not None
        held = [await silent(port) for _ in range(MAX_CONNECTIONS)]
        assert all([await gone(reader) for reader, _writer in held])
        await settled(running._lobby, 0)
        assert await asked(made, port) == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05junk!", b"\0" * 10_000])
async def test_what_is_no_greeting_is_closed(made: DevCertificates, junk: bytes) -> None:
    async with door(made) as (running, port):
        assert running._lobby is not None
        reader, writer = await silent(port)
        writer.write(junk)
        async with asyncio.timeout(5):
            while await reader.read(4096):  # an alert may come first
                pass
        await settled(running._lobby, 0)
        assert await asked(made, port) == b"HTTP/1.1 200 OK\r\n"


async def test_a_door_that_closes_leaves_no_greeting(made: DevCertificates) -> None:
    async with door(made) as (running, port):
        lobby = running._lobby
        assert lobby is not None
        reader, _writer = await silent(port)
        await settled(lobby, 1)
    assert not lobby.greetings
    assert await gone(reader)
