"""One trace a request, through gateway, decode and prefill; nothing in it that a user wrote."""

from __future__ import annotations

import pytest
from opentelemetry.trace import StatusCode

from cluster.selftest.lab import Subject, load_subject
from tests.support.telemetry_lab import telemetry_cluster
from wire.calls import responses
from wire.tracing import ATTRIBUTES

PHASES = {
    "request": ("admit", "route", "answer"),
    "decode": ("queue", "handoff", "decode"),
    "prefill": ("queue", "prefill", "lease"),
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


def under(spans, parent) -> list[str]:
    """Names of the children, in the order in which they began."""
    own = [s for s in spans if s.parent is not None and s.parent.span_id == parent.context.span_id]
    return [s.name for s in sorted(own, key=lambda s: s.start_time)]


def one(spans, name: str, part: str):
    [span] = [s for s in spans if s.name == name and s.resource.attributes["service.instance.id"] == part]
    return span


async def test_a_request_is_one_trace_through_all_three(subject):
    async with telemetry_cluster(subject) as lab:
        seen = await lab.see(subject.prompt("traced", 70), max_tokens=8, ignore_eos=True)
        await lab.idle()
        await lab.until(lambda: any(s.name == "request" for s in lab.spans()), "the last span has ended")
        spans = lab.spans()
        assert len({s.context.trace_id for s in spans}) == 1
        request = one(spans, "request", "gateway")
        [decode] = [s for s in spans if s.name == "decode" and "handoff" in under(spans, s)]
        prefill = next(s for s in spans if s.name == "prefill" and "lease" in under(spans, s))
        assert request.parent is None
        for root in (request, decode, prefill):
            assert tuple(under(spans, root)) == PHASES[root.name]
            assert root.attributes["genlock.request_id"] == seen.messages[0].server_id
        answer = one(spans, "answer", "gateway")
        handoff = one(spans, "handoff", "decode-0")
        assert (decode.parent.span_id, prefill.parent.span_id) == (answer.context.span_id, handoff.context.span_id)
        transfer = one(spans, "transfer", "decode-0")
        assert transfer.parent.span_id == handoff.context.span_id
        for span in spans:
            assert {name.removeprefix("genlock.") for name in span.attributes} <= ATTRIBUTES
            assert span.start_time <= span.end_time
            assert span.status.status_code is not StatusCode.ERROR


async def test_what_failed_says_why_and_where(subject):
    async with telemetry_cluster(subject) as lab:
        victim = subject.prompt("corrupted", 70)
        lab.corrupt(victim)
        seen = await lab.see(victim, max_tokens=8)
        assert seen.error.reason == "digest_mismatch"
        await lab.idle()
        await lab.until(lambda: any(s.name == "request" for s in lab.spans()), "the last span has ended")
        spans = lab.spans()
        causes = {s.name: s.attributes["genlock.cause"] for s in spans if s.status.status_code is StatusCode.ERROR}
        assert causes == {"transfer": "digest_mismatch", "handoff": "digest_mismatch", "decode": "digest_mismatch",
                          "answer": "digest_mismatch", "request": "digest_mismatch"}  # fmt: skip
        assert not any(span.events for span in spans), "an exception's text may quote a prompt"


async def test_every_span_of_a_request_that_was_left_ends(subject):
    async with telemetry_cluster(subject) as lab:
        call = lab.call(subject.prompt("left", 70), max_tokens=1000, ignore_eos=True)
        await anext(responses(call))
        call.cancel()
        await lab.idle()
        wanted = {"request", "answer", "decode", "handoff", "prefill"}
        await lab.until(lambda: wanted <= {s.name for s in lab.spans()}, "all have ended")
        assert one(lab.spans(), "request", "gateway").attributes["genlock.cause"] == "cancelled"
