"""One HTTP request with a client of our own: what happens within a few turns of the loop, and at each way to end."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.types import Message

from cluster.gateway.served import Sources
from cluster.gateway.state import GatewayState
from cluster.openai import call as call_module
from cluster.openai.app import make_app
from cluster.roles import Role
from genlock.v1 import worker_pb2
from kvstore.errors import StalePage
from tests.support.decode_calls import ScriptedCall
from tests.support.fake_workers import config, finished, served_model, tokens
from tests.support.gateway_cluster import SCRIPTED

BODY = {"model": "toy", "prompt": "hello"}
JSON = ((b"content-type", b"application/json"),)
# Turns of the loop from the news to every call's cancel; far fewer than a network's round trip takes.
TURNS = 6


class Client:
    """The other end of one ASGI request."""

    def __init__(self, body: bytes) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.got = asyncio.Event()

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)
        self.got.set()

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def complete(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", True)


def make_state(calls: list[ScriptedCall], **flags: object) -> GatewayState:
    state = GatewayState(
        config(**flags),
        served_model(),
        Sources(now_ms=lambda: 1.0, random_bytes=lambda count: b"\x01" * count),
        checks=SCRIPTED,
    )
    for role in Role:
        state.add_worker(f"{role.value}-0", role, "127.0.0.1:1")
        status = worker_pb2.WorkerStatus(worker_id=f"{role.value}-0", role=role.value)
        state.set_fleet(state.fleet.answered(f"{role.value}-0", "127.0.0.1:1", status))
    left = iter(calls)
    state.open_decode = lambda *_args: next(left)
    return state


def post(state: GatewayState, body: object = BODY, headers=JSON, path: str = "/v1/completions"):
    """Starts a request; gives its client and its task."""
    client = Client(body if isinstance(body, bytes) else json.dumps(body).encode())
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": list(headers), "root_path": ""}  # fmt: skip
    app = make_app(state, lambda: 17.0)
    return client, asyncio.create_task(app(scope, client.messages.get, client.send))


async def turns(count: int = TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_every_call_at_once(stream: bool, n: int):
    calls = [ScriptedCall(tokens("a")) for _ in range(n)]
    state = make_state(calls)
    client, task = post(state, {**BODY, "stream": stream, "n": n})
    await asyncio.sleep(0.05)
    assert [call.cancelled for call in calls] == [False] * n
    client.leave()
    await turns()
    assert [call.cancelled for call in calls] == [True] * n
    await asyncio.wait_for(task, 5)
    assert not client.complete
    assert state.outcomes == {"cancelled": 1}
    assert not state.running
    assert state.ledger.loads == {}


async def test_a_client_that_neither_reads_nor_stays():
    call = ScriptedCall(tokens("a"), tokens("b"))
    client, task = post(make_state([call]), {**BODY, "stream": True})
    client.reads.clear()
    await asyncio.sleep(0.05)
    client.leave()
    await turns()
    assert call.cancelled
    await asyncio.wait_for(task, 5)


async def test_a_client_that_does_not_read_meets_the_deadline():
    call = ScriptedCall(tokens("a"))
    state = make_state([call], api__default_deadline_ms=100)
    client, task = post(state, {**BODY, "stream": True})
    client.reads.clear()
    await asyncio.sleep(0.3)
    assert call.cancelled
    assert state.outcomes == {"deadline_exceeded": 1}
    client.reads.set()
    await asyncio.wait_for(task, 5)
    assert not client.complete


async def test_a_stopped_server_ends_the_request():
    call = ScriptedCall(tokens("a"))
    _client, task = post(make_state([call]), {**BODY, "stream": True})
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.cancelled


async def test_a_whole_stream_ends_with_done_and_its_end():
    client, task = post(make_state([ScriptedCall(tokens("ab"), finished(2))]), {**BODY, "stream": True})
    await asyncio.wait_for(task, 5)
    assert client.status == 200
    assert client.headers[b"content-type"].startswith(b"text/event-stream")
    assert client.headers[b"x-request-id"] == b"01" * 8
    assert client.text.endswith(b"data: [DONE]\n\n")
    assert client.complete


async def test_a_failure_after_the_beginning_is_an_event_without_an_end():
    client, task = post(
        make_state([ScriptedCall(tokens("ab"), StalePage("stale_tag", "moved on"))]), {**BODY, "stream": True}
    )
    await asyncio.wait_for(task, 5)
    assert client.status == 200
    *_, last, nothing = client.text.split(b"\n\n")
    name, data = last.split(b"\n")
    assert (name, nothing) == (b"event: error", b"")
    assert json.loads(data.removeprefix(b"data: "))["error"]["code"] == "stale_tag"
    assert b"[DONE]" not in client.text
    assert not client.complete


async def test_a_failure_before_the_beginning_has_a_status_even_in_a_stream():
    client, task = post(make_state([ScriptedCall(StalePage("stale_tag", "moved on"))]), {**BODY, "stream": True})
    await asyncio.wait_for(task, 5)
    assert client.status == 500
    assert client.headers[b"x-should-retry"] == b"false"
    assert json.loads(client.text)["error"]["code"] == "stale_tag"
    assert client.complete


async def test_a_surprise_tells_its_class_and_never_its_text():
    client, task = post(make_state([ScriptedCall(ValueError("secret words"))]))
    await asyncio.wait_for(task, 5)
    assert client.status == 500
    assert b"secret" not in client.text
    assert json.loads(client.text)["error"]["code"] == "internal"


async def test_a_number_that_json_does_not_have_is_no_answer():
    event = tokens("a")
    event.tokens.tokens[0].logprob = float("nan")
    client, task = post(make_state([ScriptedCall(event, finished(1))]), {**BODY, "logprobs": 0})
    await asyncio.wait_for(task, 5)
    assert client.status == 500


async def test_a_body_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(call_module, "BODY_TIMEOUT_S", 0.05)
    state = make_state([])
    client = Client(b"")
    client.messages.get_nowait()
    client.messages.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": list(JSON),
             "root_path": ""}  # fmt: skip
    await asyncio.wait_for(make_app(state, lambda: 17.0)(scope, client.messages.get, client.send), 5)
    assert client.status == 408
    assert state.outcomes == {"body_timeout": 1}


async def test_a_client_that_leaves_within_its_body():
    state = make_state([])
    client = Client(b"")
    client.messages.get_nowait()
    client.messages.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    client.leave()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": list(JSON),
             "root_path": ""}  # fmt: skip
    await asyncio.wait_for(make_app(state, lambda: 17.0)(scope, client.messages.get, client.send), 5)
    assert state.outcomes == {"cancelled": 1}
    assert not state.running


@pytest.mark.parametrize("told", [True, False])
async def test_a_body_over_the_limit_is_not_kept(told: bool):
    state = make_state([], api__max_prompt_bytes=1024, api__max_message_bytes=1024)
    headers = [*JSON, (b"content-length", b"2000")] if told else JSON
    client, task = post(state, b" " * 2000, headers)
    await asyncio.wait_for(task, 5)
    assert client.status == 413


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ((), 415, "content-type"),
        (((b"content-type", b"text/plain"),), 415, "content-type"),
        (((b"content-type", b"application/json; charset=utf-8"),), 200, None),
        ((*JSON, (b"content-encoding", b"gzip")), 415, "content-encoding"),
        ((*JSON, (b"x-genlock-deadline-ms", b"-1")), 400, "x-genlock-deadline-ms"),
        ((*JSON, (b"x-genlock-deadline-ms", b"9" * 30)), 400, "x-genlock-deadline-ms"),
        ((*JSON, (b"x-client-request-id", b"x" * 129)), 400, "x-client-request-id"),
    ],
)
async def test_headers(headers, status: int, param: str | None):
    state = make_state([ScriptedCall(tokens("a"), finished(1))])
    client, task = post(state, BODY, headers)
    await asyncio.wait_for(task, 5)
    assert client.status == status
    if param:
        assert json.loads(client.text)["error"]["param"] == param
    assert not state.running


async def test_the_callers_deadline_is_kept():
    call = ScriptedCall(tokens("a"))
    client, task = post(make_state([call]), BODY, [*JSON, (b"x-genlock-deadline-ms", b"50")])
    await asyncio.wait_for(task, 5)
    assert client.status == 504
    assert call.cancelled
