"""Nothing that a user writes or reads leaves a process but in the answer: not in logs, metrics, spans or errors."""

from __future__ import annotations

import json

import pytest

from cluster.selftest.lab import Subject, load_subject
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from tests.support.edge_lab import TIMEOUT_S, Seen
from tests.support.telemetry_lab import TelemetryLab, all_log_lines, telemetry_cluster
from wire.calls import responses

# The probe model answers with what stood LAG tokens before, so the marker is in the answer, too.
MARKER = "xyzzy-of-the-user"
TEXT = f"{MARKER} " * 8


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


async def ask_in_all_ways(lab: TelemetryLab) -> list[Seen]:
    """Good, cancelled, corrupted, invalid in several ways, and a surprise inside the step loop."""
    subject = lab.subject
    good = await lab.see(TEXT, max_tokens=64, ignore_eos=True)
    assert MARKER in good.text(), "the answer carries the marker as well"
    call = lab.call(TEXT, max_tokens=400, ignore_eos=True)
    await anext(responses(call))
    call.cancel()
    ids = tuple(subject.tokenizer.encode(TEXT + "!"))
    lab.corrupt(ids)
    bad = [await lab.see(TEXT + "!", max_tokens=8)]
    lab.hooks.each_pull = lab.hooks.after_landing = None
    bad.append(await lab.see(TEXT * 40, max_tokens=8))
    bad.append(await lab.see(TEXT, max_tokens=8, temperature=-1.0))
    stub = inference_pb2_grpc.InferenceServiceStub(lab.client.channel)
    turn = pb.ChatMessage(role="nobody", content=TEXT)
    bad.append(await lab.read(stub.Generate(pb.GenerateRequest(chat=pb.ChatPrompt(messages=[turn])), timeout=9)))

    def surprise(_start, _message):
        raise RuntimeError(f"a library quotes {TEXT}")

    lab.hooks.each_event = surprise
    bad.append(await lab.see(TEXT + "?", max_tokens=8))
    lab.hooks.each_event = None
    assert [seen.error.reason for seen in bad[:1]] == ["digest_mismatch"]
    assert all(seen.error is not None for seen in bad)
    return bad


async def test_a_marker_is_nowhere_but_in_the_answer(subject):
    with all_log_lines() as lines:
        async with telemetry_cluster(subject) as lab:
            bad = await ask_in_all_ways(lab)
            await lab.idle()
            scrapes = [(await lab.scrape(part)).text for part in ("gateway", "prefill", "decode")]
            operator = operator_pb2_grpc.OperatorServiceStub(lab.client.channel)
            status = await operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
            spans = [span.to_json() for span in lab.spans()]
            ids = subject.tokenizer.encode(TEXT)
    said = lines.getvalue()
    for what, text in (
        ("logs", said),
        ("metrics", "\n".join(scrapes)),
        ("status", str(status)),
        ("spans", "\n".join(spans)),
        ("errors", "\n".join(f"{seen.error.message} {seen.error.field}" for seen in bad)),
    ):
        assert text, what
        assert MARKER not in text, what
        for form in (", ", ",", " "):
            assert form.join(map(str, ids[:6])) not in text, f"{what}: token ids are the prompt, too"
    assert "internal error in handoff: RuntimeError" in said, "the surprise was logged, without its text"
    json_lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    about_requests = [line for line in json_lines if line["logger"] in ("genlock.request", "genlock.errors")]
    assert len(about_requests) > 20
    assert all(len(line["request_id"]) == 16 for line in about_requests), "each carries its request's id"


async def test_a_request_has_one_id_in_all_parts(subject):
    with all_log_lines() as lines:
        async with telemetry_cluster(subject) as lab:
            seen = await lab.see(subject.prompt("followed", 70), max_tokens=2, ignore_eos=True)
            await lab.idle()
    own = [json.loads(line) for line in lines.getvalue().splitlines() if seen.messages[0].server_id in line
           and line.startswith("{")]  # fmt: skip
    said = {line["message"].split(" total_ms")[0] for line in own}
    assert {"gateway: admit", "gateway: ended ok", "decode: handoff", "prefill: lease", "prefill: ended ok"} <= said


async def test_prompts_are_logged_where_the_switch_says_so(subject):
    with all_log_lines() as lines:
        async with telemetry_cluster(subject, log__prompts=True) as lab:
            await lab.see(TEXT, max_tokens=64, ignore_eos=True)
            await lab.idle()
    records = [json.loads(line) for line in lines.getvalue().splitlines() if line.startswith("{")]
    quoting = [line for line in records if MARKER in line["message"]]
    assert {line["logger"] for line in quoting} == {"genlock.prompts"}
    assert {line["level"] for line in quoting} == {"debug"}
    assert {line["message"].split(":")[0] for line in quoting} >= {"prompt"}
