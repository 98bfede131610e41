"""Clients that send in ways that are work for the server: nobody else waits for them, and their connections end."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import ssl

import pytest

from cluster.devca import make
from cluster.gateway.identity import authenticator_from
from cluster.openai.connection import SLICE_BYTES, BoundedConnection, CountedParser
from tests.support.http_door import scripted

TENANTS = """
tenants:
  acme: {tokens_sha256: [2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b]}
"""
CRUMB = b"1\r\n \r\n"
LIMIT_S = 30


def head(path: str = "/v1/completions", *headers: str, framing: str = "transfer-encoding: chunked") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", framing, *headers)
    return "\r\n".join((*lines, "", "")).encode()


async def until_cut(writer: asyncio.StreamWriter, data: bytes) -> int:
    """Sends `data` again and again until the connection is no more; how many bytes were taken."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(LIMIT_S):
            while True:
                writer.write(data)
                await writer.drain()
                sent += len(data)
                await asyncio.sleep(0)
    return sent


async def is_empty(env) -> None:
    async with asyncio.timeout(LIMIT_S):
        while env.door._server.server_state.connections:
            await asyncio.sleep(0.01)


@pytest.fixture
def parsed(monkeypatch) -> list[int]:
    """Sizes of what the parser is given."""
    sizes: list[int] = []
    receive = CountedParser.receive_data

    def noting(self: CountedParser, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(CountedParser, "receive_data", noting)
    return sizes


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nowhere", "/healthz"])
async def test_who_was_refused_is_not_parsed_any_more(path: str, parsed: list[int]):
    async with scripted(authenticator=authenticator_from(TENANTS, "t.yaml")) as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(head(path))
        async with asyncio.timeout(LIMIT_S):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.split(b" ")[1] in (b"401", b"404", b"405")
        assert b"connection: close" in answer.lower()
        before = sum(parsed)
        await until_cut(writer, CRUMB * 10_000)
        assert sum(parsed) == before
        writer.close()
        await is_empty(env)


async def test_a_body_in_crumbs_is_refused_and_the_answer_arrives():
    async with scripted() as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(head())
        answer = asyncio.create_task(reader.read())
        await until_cut(writer, CRUMB * 1000)
        with contextlib.suppress(ConnectionError):
            told = await asyncio.wait_for(answer, LIMIT_S)
            assert told.startswith(b"HTTP/1.1 400 ")
            assert json.loads(told.split(b"\r\n\r\n")[1])["error"]["code"] == "body_in_crumbs"
        writer.close()
        await is_empty(env)
        async with asyncio.timeout(LIMIT_S):
            while env.state.running:
                await asyncio.sleep(0.01)
        assert env.state.outcomes == {"cancelled": 1}


async def test_the_parser_gets_slices_and_the_loop_turns_between(parsed: list[int]):
    """Also of what comes in one read, and while the application reads the body."""
    turns: list[int] = []

    async def turning() -> None:
        while True:
            turns.append(len(parsed))
            await asyncio.sleep(0)

    body = json.dumps({"model": "toy", "prompt": "x" * 200_000}).encode()
    async with scripted() as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        turner = asyncio.create_task(turning())
        writer.write(head(framing=f"content-length: {len(body)}") + body)
        async with asyncio.timeout(LIMIT_S):
            await reader.readuntil(b"\r\n\r\n")
        turner.cancel()
        writer.close()
    assert max(parsed) <= SLICE_BYTES
    assert len(parsed) >= len(body) // SLICE_BYTES
    assert max(after - before for before, after in itertools.pairwise(turns)) <= 2


async def test_a_client_reads_its_refusal_after_it_has_sent_all():
    async with scripted(authenticator=authenticator_from(TENANTS, "t.yaml")) as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        body = b"x" * 3_000_000
        writer.write(head(framing=f"content-length: {len(body)}"))
        await asyncio.sleep(0.1)
        writer.write(body)
        async with asyncio.timeout(LIMIT_S):
            await writer.drain()
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_api_key"
        writer.close()
        await is_empty(env)


async def test_a_refused_client_with_a_short_body_keeps_its_connection():
    async with scripted(authenticator=authenticator_from(TENANTS, "t.yaml")) as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        for _ in range(3):
            writer.write(head(framing="content-length: 1000"))
            async with asyncio.timeout(LIMIT_S):
                answer = await reader.readuntil(b"\r\n\r\n")
                size = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
            assert answer.startswith(b"HTTP/1.1 401 ")
            writer.write(b" " * 1000)
        writer.close()


async def test_what_is_no_http_is_told_so_as_json():
    async with scripted() as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 1000 + b"\r\n")
        async with asyncio.timeout(LIMIT_S):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "bad_http"
        writer.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
async def test_who_is_refused_within_a_body_reads_it_and_is_left_also_when_silent(secure: bool, tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.openai.gate.LINGER_S", 0.2)
    # The timer of stuck connections is not what ends it.
    monkeypatch.setattr(BoundedConnection, "patience_s", 10.0 * LIMIT_S)
    made = make(tmp_path, [], datetime.datetime.now(datetime.UTC))
    files = {"tls__api_cert_file": str(made.cert), "tls__api_key_file": str(made.key)} if secure else {}
    context = ssl.create_default_context(cafile=str(made.ca)) if secure else None
    async with scripted(authenticator=authenticator_from(TENANTS, "t.yaml"), **files) as env:
        for body in (b"", CRUMB * 100):
            reader, writer = await asyncio.open_connection("127.0.0.1", env.port, ssl=context)
            writer.write(head() + body)
            async with asyncio.timeout(LIMIT_S):
                answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 401 ")
            await is_empty(env)
            writer.close()
