"""What users write and read stays out of what others see of it: the registry's events, the HTTP door's errors and
headers, and what operators are told of requests. Logs, metrics and spans: test_telemetry_privacy.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from genlock.v1 import inference_pb2 as pb
from genlock.v1 import operator_pb2, operator_pb2_grpc
from tests.support.http_door import ProbeCluster, probe
from tests.support.telemetry_lab import all_log_lines
from wire.calls import responses

# The probe model answers with what stood before, so the marker is in the answer, too.
MARKER = "xyzzy-of-the-user"
TEXT = f"{MARKER} " * 8
SURPRISE = "surprise"
TIMEOUT_S = 30.0
# Tokens of an answer that is still running when the others are done.
LONG = 1200


def forms() -> list[str]:
    """The marker as text, escaped, and as the ids of its tokens."""
    ids = probe()[1].encode(TEXT)[:6]
    return [MARKER, MARKER.encode().hex(), *(by.join(map(str, ids)) for by in (", ", ",", " "))]


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "probe", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


# What the HTTP door is asked, and what it answers: each with the marker where a prompt may be.
REFUSED: list[tuple[str, Any, int]] = [
    ("chat/completions", chat(TEXT, temperature=-1), 400),
    ("chat/completions", chat(TEXT, stream=True, top_p=7), 400),
    ("chat/completions", chat([{"type": "image_url", "image_url": {"url": TEXT}}]), 400),
    ("chat/completions", chat({"text": TEXT}), 400),
    ("chat/completions", {"model": "probe", "messages": [{"role": "nobody", "content": TEXT}]}, 400),
    ("chat/completions", {"model": "probe", "messages": TEXT}, 400),
    ("chat/completions", {"model": "other", "messages": [{"role": "user", "content": TEXT}]}, 404),
    ("chat/completions", chat(TEXT * 400), 400),
    ("chat/completions", '{"model": "probe", "messages": "' + TEXT, 400),
    ("chat/completions", chat(f"{TEXT}{SURPRISE}"), 500),
    ("completions", {"model": "probe", "prompt": [TEXT, 5]}, 400),
    ("completions", {"model": "probe", "prompt": {"text": TEXT}}, 400),
    ("completions", {"model": "probe", "prompt": TEXT, "max_tokens": -1}, 400),
    ("completions", {"model": "probe", "prompt": TEXT, "stop": [TEXT] * 40}, 400),
]


def content_of(body: str, stream: bool) -> str:
    if not stream:
        return json.loads(body)["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def over_http(cluster: ProbeCluster) -> list[str]:
    """Heads of all answers, and the bodies of those that are errors. The good ones carry the marker."""
    said = []
    async with httpx2.AsyncClient(base_url=cluster.cluster.url, timeout=TIMEOUT_S, trust_env=False) as client:
        for stream in (False, True):
            good = await client.post("chat/completions", json=chat(TEXT, max_tokens=64, stream=stream))
            assert good.status_code == 200
            assert MARKER in content_of(good.text, stream), "the answer carries the marker as well"
            said.append(str(good.headers.raw))
        for path, body, status in REFUSED:
            sent = {"content": body} if isinstance(body, str) else {"json": body}
            bad = await client.post(path, headers={"content-type": "application/json"}, **sent)
            assert bad.status_code == status, (path, bad.text[:300].replace(MARKER, "..."))
            assert json.loads(bad.text)["error"]["code"]
            said += [str(bad.headers.raw), bad.text]
    return said


async def told_of_requests(cluster: ProbeCluster) -> list[str]:
    """What operators are told of a request that runs, one that was cut by a restart, and those that ended."""
    operator = operator_pb2_grpc.OperatorServiceStub(cluster.channel)
    said = []

    async def ask(name: str, request: Any) -> Any:
        reply = await getattr(operator, name)(request, timeout=TIMEOUT_S)
        said.append(str(reply))
        return reply

    params = pb.SamplingParams(max_tokens=LONG, ignore_eos=True)
    call = cluster.stub.Generate(pb.GenerateRequest(request_id="a-label", text=TEXT, sampling_params=params))
    running = responses(call)
    first = await anext(running)
    [one] = (await ask("ListRequests", operator_pb2.ListRequestsRequest())).requests
    assert (one.server_id, one.request_id) == (first.server_id, "a-label")
    for name in (first.server_id, "a-label"):
        await ask("DescribeRequest", operator_pb2.DescribeRequestRequest(request_id=name))
    assert (await ask("ListLeases", operator_pb2.ListLeasesRequest())).unreached == []
    restart = operator_pb2.RestartRequest(worker="decode-0", force=True, deadline_ms=1)
    await ask("Restart", restart)
    with pytest.raises(Exception) as cut:
        async for _message in running:
            pass
    said.append(repr(cut.value))
    ended = await ask("DescribeRequest", operator_pb2.DescribeRequestRequest(request_id="a-label"))
    assert ended.outcome not in ("", "ok")
    await settled(ask)
    await ask("ListEvents", operator_pb2.ListEventsRequest())
    await ask("DescribeWorker", operator_pb2.DescribeWorkerRequest(worker_id="decode-0"))
    await ask("GetStatus", operator_pb2.GetStatusRequest())
    return said


async def settled(ask: Callable[[str, Any], Awaitable[Any]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not (await ask("GetFleet", operator_pb2.GetFleetRequest())).settled:
            await asyncio.sleep(0.05)


async def test_a_marker_is_nowhere_but_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(probe()[1])
    encode_chat = kind.encode_chat

    def quoting(self: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        if SURPRISE in str(messages):
            raise RuntimeError(f"a library quotes {messages}")
        return encode_chat(self, messages, *args, **kwargs)

    monkeypatch.setattr(kind, "encode_chat", quoting)
    with all_log_lines() as lines:
        async with ProbeCluster() as cluster:
            answered = await over_http(cluster)
            told = await told_of_requests(cluster)
            kept = await cluster.cluster._controller.registry.events(0, 1000)
    assert {event.kind for event in kept} >= {"restart", "phase"}
    for what, text in (
        ("the HTTP door", "\n".join(answered)),
        ("what operators are told", "\n".join(told)),
        ("the registry's events", "\n".join(map(str, kept))),
        ("logs", lines.getvalue()),
    ):
        assert len(text) > 200, what
        for form in forms():
            assert form not in text, what
    assert "RuntimeError" in lines.getvalue(), "the surprise was logged, without its text"
