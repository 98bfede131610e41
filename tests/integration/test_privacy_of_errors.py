"""What a caller wrote and an error quotes goes back to that caller alone: not to operators, logs, metrics or spans.

Each request has the marker in another place that is refused, or that could be quoted when something else is."""

from __future__ import annotations

import logging
from typing import Any

import httpx2
import pytest

from cluster.gateway.running import told_of
from cluster.openai.server import HttpDoor
from cluster.selftest.lab import load_subject
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvstore.errors import GenlockError, InvalidInput
from tests.support.edge_lab import TIMEOUT_S
from tests.support.telemetry_lab import TelemetryLab, all_log_lines, telemetry_cluster

MARKER = "Xyzzy-of-the-user"
CHAT, TEXT = "chat/completions", "completions"
USER = [{"role": "user", "content": "hello"}]


def schema(wanted: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}}


def called(name: str = "f", arguments: str = "{}", kind: str = "function") -> dict[str, Any]:
    call = {"id": MARKER, "type": kind, "function": {"name": name, "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "x", "tool_calls": [call]}, *USER]}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}], "tool_choice": "required"}


# A door, what the body has beside a good one's fields, headers.
ASKED: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    (TEXT, {"model": MARKER}, {}),
    (TEXT, {MARKER: MARKER, "prompt": {MARKER: MARKER}}, {}),
    (TEXT, {"prompt": [MARKER, MARKER]}, {}),
    (TEXT, {"prompt": [[MARKER]]}, {}),
    (TEXT, {"stop": [MARKER * 40]}, {}),
    (TEXT, {"stop": {MARKER: 1}}, {}),
    (TEXT, {"user": MARKER, "n": 99}, {}),
    (TEXT, {"seed": MARKER}, {}),
    (TEXT, {"logit_bias": {MARKER: 1}}, {}),
    (TEXT, {"suffix": MARKER, "stream_options": {MARKER: MARKER}}, {}),
    (TEXT, {"max_tokens": MARKER}, {}),
    (TEXT, {}, {"x-session-affinity": MARKER * 40}),
    (TEXT, {}, {"x-priority": MARKER}),
    (TEXT, {}, {"x-genlock-deadline-ms": MARKER}),
    (TEXT, {}, {"content-type": MARKER}),
    (TEXT, {}, {"content-encoding": MARKER}),
    (TEXT, schema({"type": MARKER}), {}),
    (TEXT, schema({"type": "string", "format": MARKER}), {}),
    (TEXT, schema({"type": "string", "pattern": f"({MARKER}"}), {}),
    (TEXT, schema({MARKER: MARKER}), {}),
    (TEXT, schema({"$ref": MARKER}), {}),
    (TEXT, schema({"type": "object", "properties": {MARKER: {"type": MARKER}}}), {}),
    (TEXT, schema({"title": MARKER, "type": "integer", "multipleOf": 1000003}), {}),
    (TEXT, schema({"type": "object", "properties": {f"{MARKER}{n}": {} for n in range(1500)}}), {}),
    (TEXT, {"response_format": {"type": MARKER}}, {}),
    (CHAT, {"messages": [{"role": MARKER, "content": "x"}]}, {}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]}, {}),
    (CHAT, {"messages": [{"role": "user", "content": "x", "name": MARKER * 40}]}, {}),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": MARKER * 40}]}, {}),
    (CHAT, {"messages": [{"role": "tool", "content": {MARKER: 1}, "tool_call_id": MARKER}]}, {}),
    (CHAT, called(kind=MARKER), {}),
    (CHAT, called(arguments=MARKER), {}),
    (CHAT, called(name=MARKER, arguments=f'{{"{MARKER}": '), {}),
    (CHAT, tool(name=MARKER, parameters={"type": MARKER}), {}),
    (CHAT, tool(parameters={"type": "object", "properties": {MARKER: {"format": MARKER}}}), {}),
    (CHAT, tool(strict=MARKER, description={MARKER: 1}), {}),
    (CHAT, {"tools": [{"type": MARKER}]}, {}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": f"{MARKER} no name!"}}]}, {}),
    (CHAT, {**tool(), "tool_choice": {"type": "function", "function": {"name": MARKER}}}, {}),
    (CHAT, {**tool(), "tool_choice": MARKER}, {}),
    (CHAT, {"functions": [{"name": MARKER}], "function_call": MARKER}, {}),
    (CHAT, {"reasoning_effort": MARKER, "audio": MARKER, "modalities": [MARKER]}, {}),
]
GRPC = [
    pb.GenerateRequest(request_id=MARKER * 40, text="x"),
    pb.GenerateRequest(model=MARKER, text="x"),
    pb.GenerateRequest(session_affinity=MARKER * 40, text="x"),
    pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(stop=[MARKER * 40])),
    pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(json_schema=f'{{"{MARKER}')),
    pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(json_schema=f'{{"type": "{MARKER}"}}')),
    pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=MARKER, content="x")])),
    pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")], tools=[MARKER])),
]


async def over_http(lab: TelemetryLab) -> tuple[int, int]:
    """How many were refused, and how many of those refusals quote the marker."""
    door = HttpDoor(lab.gateway.state)
    refused = quoting = 0
    try:
        async with httpx2.AsyncClient(base_url=await door.start(), timeout=TIMEOUT_S, trust_env=False) as client:
            for path, fields, headers in ASKED:
                good = {"messages": USER} if path == CHAT else {"prompt": "hello"}
                reply = await client.post(
                    path, json={"model": "probe", "max_tokens": 2, **good, **fields}, headers=headers
                )
                refused += reply.status_code >= 400
                quoting += reply.status_code >= 400 and MARKER in reply.text
            # No JSON, and no HTTP.
            await client.post(TEXT, content=f'{{"{MARKER}'.encode(), headers={"content-type": "application/json"})
            await client.get(f"models/{MARKER}")
            await client.get(f"{MARKER}?{MARKER}={MARKER}")
    finally:
        await door.stop()
    return refused, quoting


async def over_grpc(lab: TelemetryLab) -> int:
    """How many of the refusals quote the marker."""
    stub = inference_pb2_grpc.InferenceServiceStub(lab.client.channel)
    seen = [await lab.read(stub.Generate(request, timeout=TIMEOUT_S)) for request in GRPC]
    assert all(one.error is not None for one in seen)
    return sum(MARKER in one.error.message for one in seen)


async def told_to_operators(lab: TelemetryLab) -> list[operator_pb2.DescribeRequestResponse]:
    operator = operator_pb2_grpc.OperatorServiceStub(lab.client.channel)
    ids = list(lab.gateway.state.ended_requests._kept)
    asked = [operator_pb2.DescribeRequestRequest(request_id=one) for one in ids]
    return [await operator.DescribeRequest(one, timeout=TIMEOUT_S) for one in asked]


@pytest.fixture
def silent_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of this test's own client say what it asks."""
    for name in ("httpx2", "httpcore2"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("httpcore2")]:
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


@pytest.mark.usefixtures("silent_client")
async def test_what_a_refusal_quotes_goes_to_its_caller_alone():
    with all_log_lines() as lines:
        async with telemetry_cluster(load_subject("probe"), api__http_port=0) as lab:
            refused, quoting = await over_http(lab)
            assert refused >= 30, "most of these are refused"
            assert quoting + await over_grpc(lab) >= 8, "some refusals quote, or this test shows nothing"
            await lab.idle()
            told = await told_to_operators(lab)
            operator = operator_pb2_grpc.OperatorServiceStub(lab.client.channel)
            status = await operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
            scrapes = [(await lab.scrape(part)).text for part in ("gateway", "prefill", "decode")]
            spans = [span.to_json() for span in lab.spans()]
    labels = [one.request.request_id for one in told]
    for one in told:
        one.request.request_id = ""  # the caller's own name for its request is meant to be seen
    assert len(told) >= len(ASKED) + len(GRPC) - 2
    assert any(MARKER in label for label in labels)
    for what, text in (
        ("operators", "\n".join(map(str, told))),
        ("status", str(status)),
        ("logs", lines.getvalue()),
        ("metrics", "\n".join(scrapes)),
        ("spans", "\n".join(spans)),
    ):
        assert text, what
        at = text.lower().find(MARKER.lower())
        assert at < 0, f"{what}: {text[max(0, at - 200) : at + 100]}"
    bad = [one for one in told if one.outcome == "bad_role"]
    assert {one.message.split(": ")[0] for one in bad} >= {"chat.messages[0].role"}, "the field is told"
    assert all(one.message for one in told if one.outcome != "ok"), "and what the reason means"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidInput("bad_role", MARKER, field="chat.messages[3].role"), "chat.messages[3].role: A field "),
        (InvalidInput("bad_role", MARKER, field=f"{MARKER} {MARKER}"), "A field of "),
        (GenlockError("no_such_reason_is_explained", MARKER), ""),
    ],
)
def test_an_error_is_told_by_reason_and_field(error: GenlockError, told: str):
    assert told_of(error).startswith(told)
    assert MARKER not in told_of(error)
