"""The HTTP door over real HTTP, in front of scripted workers: identity, refusals, limits, ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket

import httpx2
import openai
import pytest

from cluster.gateway.identity import authenticator_from
from cluster.openai.connection import BoundedConnection
from cluster.openai.server import HttpDoor
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import CorruptPage, InvalidInput, NoCapacity, StalePage, Unavailable
from tests.support.fake_workers import CONTEXT_TOKENS, ByteTokenizer, config, ended, finished, hang, say, tokens
from tests.support.http_door import client_of, scripted

USER = [{"role": "user", "content": "hi"}]
OUTSIDE = "192.0.2.1"


def chat(client: openai.AsyncOpenAI, **fields: object):
    return client.chat.completions.create(**{"model": "toy", "messages": USER, **fields})


async def error_of(awaitable) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await awaitable
    return caught.value


async def reasons_of(stream, seen: list[str | None]) -> None:
    """Reads a stream; notes why its answers ended."""
    async for chunk in stream:
        seen.extend(choice.finish_reason for choice in chunk.choices)


async def idle(env) -> None:
    async with asyncio.timeout(5):
        while env.state.running or env.state.ledger.loads:
            await asyncio.sleep(0.005)


async def raw(port: int, data: bytes, *, limit_s: float = 5.0) -> bytes:
    """Sends bytes and reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(limit_s):
            return await reader.read()
    finally:
        writer.close()


def request_bytes(body: object, path: str = "/v1/chat/completions", *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


async def test_models():
    async with scripted(model__name="nick") as env:
        models = (await env.client.models.list()).data
        assert [(one.id, one.created, one.owned_by) for one in models] == [
            ("toy", 1_700_000_000, "genlock"),
            ("nick", 1_700_000_000, "genlock"),
        ]
        assert (await env.client.models.retrieve("nick")).id == "nick"
        error = await error_of(env.client.models.retrieve("other"))
        assert (error.status_code, error.code, error.type) == (404, "model_not_found", "invalid_request_error")


async def test_a_request_passes_and_the_ticket_is_the_gateways():
    async with scripted(say(tokens("he"), tokens("llo"), finished(5))) as env:
        reply = await chat(
            env.client, max_tokens=5, seed=7, temperature=0, extra_headers={"x-client-request-id": "mine"}
        )
        assert reply.choices[0].message.content == "hello"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (8, 5)
        assert reply.usage.prompt_tokens_details.cached_tokens == 3
        assert reply.id == f"chatcmpl-{reply._request_id}"
        ticket = env.decode.seen[0].request.ticket
        assert (ticket.tenant, bytes(ticket.token_ids)) == ("default", b"user:hi\n")
        assert (ticket.sampling.seed, ticket.sampling.max_tokens, ticket.sampling.temperature) == (7, 5, 0)
        await idle(env)
        assert dict(env.state.outcomes) == {"ok": 1}


async def test_an_answer_without_max_tokens_has_the_configured_length():
    async with scripted(say(tokens("a"), finished(1)), api__default_max_tokens=17) as env:
        await chat(env.client)
        assert env.decode.seen[0].request.ticket.sampling.max_tokens == 17


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = f"tenants: {{acme: {{tokens_sha256: [{digest('key-a')}]}}, rival: {{tokens_sha256: [{digest('key-r')}]}}}}"


async def test_the_tenant_is_the_credentials_and_no_bodys():
    async with scripted(say(tokens("a"), finished(1)), authenticator=authenticator_from(TENANTS, "t")) as env:
        acme = client_of(env.url, "key-a")
        await chat(acme, user="rival", extra_body={"tenant": "rival"}, extra_headers={"x-tenant": "rival"})
        assert env.decode.seen[0].request.ticket.tenant == "acme"
        stranger = client_of(env.url, "nobody")
        for asked in (chat(stranger), stranger.models.list(), stranger.models.retrieve("toy")):
            error = await error_of(asked)
            assert (error.status_code, error.code, error.type) == (401, "invalid_api_key", "authentication_error")
        assert error.response.headers["www-authenticate"] == "Bearer"
        assert len(env.decode.seen) == 1
        await acme.close()
        await stranger.close()


async def test_a_stranger_is_refused_before_the_body_is_read():
    async with scripted(authenticator=authenticator_from(TENANTS, "t")) as env:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(head)
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


REFUSED = {
    "no such model": ({"model": "other"}, 404, "model", "model_not_found"),
    "top_p": ({"top_p": 2}, 400, "top_p", "bad_top_p"),
    "temperature": ({"temperature": -1}, 400, "temperature", "bad_temperature"),
    "n": ({"n": 9}, 400, "n", "bad_n"),
    "no messages": ({"messages": []}, 400, "messages", "no_messages"),
    "a role": ({"messages": [{"role": "root", "content": "x"}]}, 400, "messages[0].role", "bad_role"),
    "max_tokens": ({"max_tokens": 0}, 400, "max_tokens", "bad_max_tokens"),
    "context": ({"max_completion_tokens": CONTEXT_TOKENS}, 400, "max_completion_tokens", "max_tokens_over_context"),
    "long prompt": ({"messages": [{"role": "user", "content": "x" * 400}]}, 400, "messages", "prompt_too_long"),
    "stop": ({"stop": ["a", ""]}, 400, "stop[1]", "bad_stop"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "bad_logprobs"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "tools_unsupported"),
    "format": ({"response_format": {"type": "xml"}}, 400, "response_format.type", "unsupported_field"),
    "transfer": ({"extra_body": {"kv_transfer_params": {}}}, 400, "kv_transfer_params", "transfer_field"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
async def test_bad_requests_in_openais_shape(name: str, stream: bool):
    fields, status, param, code = REFUSED[name]
    async with scripted() as env:
        error = await error_of(chat(env.client, stream=stream, **fields))
        assert (error.status_code, error.param, error.code, error.type) == (
            status,
            param,
            code,
            "invalid_request_error",
        )
        assert error.body["message"].startswith(param) or name in ("no such model", "tools", "context")
        assert not env.decode.seen
        await idle(env)
        assert sum(env.state.outcomes.values()) == 1


async def test_the_templates_refusal_is_the_callers_error():
    refuse = InvalidInput("bad_chat_template", "cannot render", field="messages[0].role")
    async with scripted(tokenizer=ByteTokenizer(refuse)) as env:
        error = await error_of(chat(env.client))
        assert (error.status_code, error.param, error.code) == (400, "messages[0].role", "bad_chat_template")


async def test_nothing_in_a_request_makes_a_connection(monkeypatch):
    """Every field that a transfer could hide in, refused or ignored: nobody is called but our own workers."""
    called: list[object] = []
    async with scripted(say(tokens("a"), finished(1))) as env:
        own = {("127.0.0.1", env.port)}
        async with httpx2.AsyncClient() as http:
            plain = socket.socket.connect
            monkeypatch.setattr(
                socket.socket,
                "connect",
                lambda sock, address: called.append(address) if address not in own else plain(sock, address),
            )
            loop_connect = asyncio.get_running_loop().sock_connect

            async def connect(sock, address):
                if address not in own:
                    called.append(address)
                await loop_connect(sock, address)

            monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
            hints = {"url": f"http://{OUTSIDE}/", "remote": {"host": OUTSIDE, "port": 1}, "webhook": f"http://{OUTSIDE}/",
                     "kv": {"peer": OUTSIDE}, "metadata": {"peer": OUTSIDE}, "user": f"http://{OUTSIDE}/"}  # fmt: skip
            reply = await http.post(f"{env.url}/chat/completions", json={"model": "toy", "messages": USER, **hints})
            assert reply.status_code == 200
            for name in ("kv_transfer_params", "peer", "page_ids", "prefill_endpoint", "remote_host", "bootstrap_host"):
                body = {"model": "toy", "messages": USER, name: OUTSIDE}
                reply = await http.post(f"{env.url}/chat/completions", json=body)
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert len(env.decode.seen) == 1
        assert OUTSIDE not in str(env.decode.seen[0].request)
    assert not called


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (NoCapacity("no_pages", retry_after_ms=1500), 429, openai.RateLimitError),
        (Unavailable("draining"), 503, openai.InternalServerError),
        (StalePage("stale_tag"), 500, openai.InternalServerError),
        (CorruptPage("digest"), 500, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_workers_answer_becomes_a_status(error, status: int, kind: type, stream: bool):
    async with scripted(say(error)) as env:
        caught = await error_of(chat(env.client, stream=stream))
        assert (caught.status_code, caught.code) == (status, error.reason)
        assert isinstance(caught, kind)
        headers = caught.response.headers
        assert headers.get("retry-after") == ("2" if status == 429 else None)
        assert headers.get("x-should-retry") == ("false" if status == 500 else None)


async def test_a_stock_client_that_retries_does_not_repeat_an_unproved_answer():
    async with scripted(say(StalePage("stale_tag"))) as env:
        retrying = env.client.with_options(max_retries=2)
        await error_of(chat(retrying))
        assert len(env.decode.seen) == 1


@pytest.mark.parametrize("error", [StalePage("stale_tag", "moved on"), Unavailable("worker_lost", "gone")])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_failure_in_a_stream_raises_in_the_client(error, n: int):
    async with scripted(say(tokens("ab"), error)) as env:
        seen: list[str | None] = []
        with pytest.raises(openai.APIError) as caught:
            await reasons_of(await chat(env.client, stream=True, n=n), seen)
        assert caught.value.code == error.reason
        assert set(seen) <= {None}


async def test_a_failure_in_a_stream_is_no_end_even_for_who_knows_no_events():
    async with scripted(say(tokens("ab"), StalePage("stale_tag"))) as env:
        data = await raw(env.port, request_bytes({"model": "toy", "messages": USER, "stream": True}))
        assert b"event: error\n" in data
        assert b"[DONE]" not in data
        # The last chunk of a chunked body, which says that it is whole.
        assert not data.endswith(b"0\r\n\r\n")


async def test_a_whole_stream_has_its_end():
    async with scripted(say(tokens("ab"), finished(2))) as env:
        request = request_bytes(
            {"model": "toy", "messages": USER, "stream": True}, "/v1/chat/completions", "connection: close"
        )
        data = await raw(env.port, request)
        assert b"data: [DONE]\n\n" in data
        assert data.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_decode(stream: bool):
    async with scripted(hang) as env:
        _reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(request_bytes({"model": "toy", "messages": USER, "stream": stream, "n": 2}))
        async with asyncio.timeout(5):
            while len(env.decode.seen) < 2:
                await asyncio.sleep(0.005)
        writer.close()
        assert await ended([env.decode], 2) == ["cancelled"] * 2
        await idle(env)
        assert dict(env.state.outcomes) == {"cancelled": 1}


async def test_a_client_that_sent_its_next_request_early_and_leaves():
    """The server does not read ahead for long, and sees the end all the same."""
    async with scripted(hang) as env:
        _reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(request_bytes({"model": "toy", "messages": USER}))
        async with asyncio.timeout(5):
            while not env.decode.seen:
                await asyncio.sleep(0.005)
        writer.write(request_bytes({"model": "toy", "messages": USER}))
        await asyncio.sleep(0.05)
        writer.close()
        assert await ended([env.decode], 1) == ["cancelled"]


async def test_a_client_that_sends_too_much_ahead_is_dropped():
    async with scripted(hang) as env:
        _reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        writer.write(request_bytes({"model": "toy", "messages": USER}))
        async with asyncio.timeout(5):
            while not env.decode.seen:
                await asyncio.sleep(0.005)
        writer.write(b"x" * 1_000_000)
        assert await ended([env.decode], 1) == ["cancelled"]
        writer.close()


async def test_requests_that_follow_each_other_are_answered_in_order():
    async with scripted() as env:
        bodies = [{"model": "toy", "prompt": text, "max_tokens": 1} for text in ("a", "b")]
        data = request_bytes(bodies[0], "/v1/completions") + request_bytes(
            bodies[1], "/v1/completions", "connection: close"
        )
        answers = await raw(env.port, data)
        assert [part.split('"')[0] for part in answers.decode().split('"text":"')[1:]] == ["a", "b"]


async def test_abort_over_grpc_ends_a_request_of_this_door():
    async with scripted(hang) as env:
        asked = asyncio.create_task(error_of(chat(env.client, extra_headers={"x-client-request-id": "mine"})))
        async with asyncio.timeout(5):
            while not env.decode.seen:
                await asyncio.sleep(0.005)
        assert (await env.stub.Abort(pb.AbortRequest(request_id="mine"))).aborted == 1
        error = await asyncio.wait_for(asked, 5)
        assert (error.status_code, error.code) == (499, "aborted_by_caller")


async def test_both_doors_count_against_one_limit():
    async with scripted(hang, api__max_requests=1, api__retry_after_ms=2500) as env:
        call = env.stub.Generate(pb.GenerateRequest(text="hi"), timeout=20)
        async with asyncio.timeout(5):
            while not env.decode.seen:
                await asyncio.sleep(0.005)
        error = await error_of(chat(env.client))
        assert (error.status_code, error.code) == (429, "gateway_full")
        assert (error.response.headers["retry-after"], error.response.headers["retry-after-ms"]) == ("3", "2500")
        call.cancel()


async def test_deadlines():
    async with scripted(hang) as env:
        error = await error_of(chat(env.client, extra_headers={"x-genlock-deadline-ms": "100"}))
        assert (error.status_code, error.code) == (504, "deadline_exceeded")
        stream = await chat(env.client, stream=True, extra_headers={"x-genlock-deadline-ms": "200"})
        with pytest.raises(openai.APIError, match="took longer"):
            await reasons_of(stream, [])
        assert await ended([env.decode], 2) == ["cancelled"] * 2


async def test_health():
    async with scripted(ready=False) as env, httpx2.AsyncClient(base_url=env.url.removesuffix("/v1")) as http:
        env.state.set_fleet(env.state.fleet.removed("decode-0"))
        assert (await http.get("/healthz")).json() == {"status": "live"}
        for path in ("/readyz", "/health"):
            waiting = await http.get(path)
            assert (waiting.status_code, waiting.json()["error"]["code"]) == (503, "not_ready")
        error = await error_of(chat(env.client))
        assert error.status_code == 503
    async with scripted() as env, httpx2.AsyncClient(base_url=env.url.removesuffix("/v1")) as http:
        for path in ("/readyz", "/health"):
            assert (await http.get(path)).json() == {"status": "ready"}
        env.state.draining = True
        assert (await http.get("/readyz")).json()["error"]["code"] == "draining"
        assert (await http.get("/healthz")).status_code == 200
        assert (await error_of(chat(env.client))).code == "draining"


async def test_paths_and_methods_that_are_not_there():
    async with scripted() as env, httpx2.AsyncClient(base_url=env.url.removesuffix("/v1")) as http:
        for path in ("/", "/v1/embeddings", "/v1/chat/completions/", "/v1/chat"):
            reply = await http.post(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_path")
        reply = await http.get("/v1/chat/completions")
        assert (reply.status_code, reply.json()["error"]["code"]) == (405, "method_not_allowed")
        assert reply.headers["allow"] == "POST"


async def test_a_body_over_the_limit():
    async with scripted(api__max_prompt_bytes=2000, api__max_message_bytes=2000) as env:
        error = await error_of(chat(env.client, messages=[{"role": "user", "content": "x" * 5_000_000}]))
        assert (error.status_code, error.code) == (413, "body_too_large")
        assert (await chat(env.client, max_tokens=1)).choices[0].message.content == "u"


async def test_a_drain_waits_for_answers_of_this_door_and_then_ends_them():
    gate = asyncio.Event()
    async with scripted(say(tokens("a"), gate.wait(), tokens("b"), finished(2))) as env:
        asked = asyncio.create_task(chat(env.client))
        async with asyncio.timeout(5):
            while not env.decode.seen:
                await asyncio.sleep(0.005)
        stopping = asyncio.create_task(env.gateway.stop(5000))
        await asyncio.sleep(0.05)
        gate.set()
        assert (await asyncio.wait_for(asked, 5)).choices[0].message.content == "ab"
        await stopping
    async with scripted(hang) as env:
        stream = await chat(env.client, stream=True)
        await anext(aiter(stream))
        await env.gateway.stop(0)
        with pytest.raises(openai.APIError, match="before the answer was complete"):
            await reasons_of(stream, [])


# --- connections ---


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(BoundedConnection, "patience_s", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"])
@pytest.mark.parametrize("start", [b"", b"POST /v1/completions HT"])
async def test_a_head_that_does_not_come_ends_the_connection(before: bytes, start: bytes, monkeypatch):
    monkeypatch.setattr("cluster.openai.server.IDLE_CONNECTION_S", 60 if start else 0.3)
    async with scripted() as env:
        reader, writer = await asyncio.open_connection("127.0.0.1", env.port)
        async with asyncio.timeout(5):
            writer.write(before)
            if before:
                assert b" 200 " in await reader.readline()
            writer.write(start)
            await reader.read()
        writer.close()


@pytest.mark.usefixtures("impatient")
async def test_a_long_answer_and_an_idle_client_are_not_stuck():
    async with scripted(say(tokens("a"), asyncio.sleep(0.6), finished(1))) as env:
        assert (await chat(env.client)).choices[0].message.content == "a"
        assert [len(env.door._server.server_state.connections)] == [1]
        await asyncio.sleep(0.6)
        assert [len(env.door._server.server_state.connections)] == [1]


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_does_not_read_is_dropped():
    many = [tokens("x" * 1000)] * 2000
    room = {"context_tokens": 4_000_000, "api__default_max_tokens": 3_000_000}
    async with scripted(say(*many, finished(2_000_000)), **room) as env:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", env.port))
        await asyncio.get_running_loop().sock_sendall(
            sock, request_bytes({"model": "toy", "messages": USER, "stream": True, "logprobs": True})
        )
        assert await ended([env.decode], 1) == ["cancelled"]
        await idle(env)
        assert not env.door._server.server_state.connections
        sock.close()


async def test_too_many_connections():
    async with scripted(api__max_connections=2) as env:
        held = [await asyncio.open_connection("127.0.0.1", env.port) for _ in range(2)]
        await asyncio.sleep(0.05)
        data = await raw(env.port, b"")
        assert data.startswith(b"HTTP/1.1 429 ")
        assert json.loads(data.split(b"\r\n\r\n")[1])["error"]["code"] == "too_many_connections"
        for _reader, writer in held:
            writer.close()
        await asyncio.sleep(0.05)
        assert [one.id for one in (await env.client.models.list()).data] == ["toy", "smollm2"]


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00", b"x" * 100_000, b"GET / HTTP/1.1\r\n\r\n"])
async def test_junk_is_refused(junk: bytes):
    async with scripted() as env:
        assert (await raw(env.port, junk)).startswith(b"HTTP/1.1 400 ")


async def test_a_taken_port_is_a_typed_error():
    async with scripted() as env:
        state = env.state
        state.config = config(api__http_port=env.port)
        with pytest.raises(Unavailable) as caught:
            await HttpDoor(state).start()
        assert (caught.value.reason, caught.value.field) == ("port_taken", "api.http_port")


@pytest.mark.parametrize("text", ["-1", "", " "])
async def test_off(text: str):
    async with scripted() as env:
        env.state.config = config(api__http_port=text)
        door = HttpDoor(env.state)
        assert await door.start() == ""
        await door.stop()
