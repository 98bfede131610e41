"""Spans reach an OTLP collector: here a stub of its gRPC service, asked through the exporter that a cluster uses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra `tracing` is not installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_services
from opentelemetry.proto.trace.v1 import trace_pb2

from cluster.selftest.lab import load_subject
from tests.support.edge_lab import EdgeLab, Seen
from wire.tracing import ATTRIBUTES, make_tracer

MARKER = "xyzzy-of-the-user"


class Collector(otlp_services.TraceServiceServicer):
    """Keeps what it gets: (the part that sent it, the span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []
        self.raw: list[bytes] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            self.raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                about = texts(resource.resource.attributes)
                assert about["service.name"] == "genlock"
                self.spans += [
                    (about["service.instance.id"], span) for scope in resource.scope_spans for span in scope.spans
                ]
        return otlp.ExportTraceServiceResponse()

    def one(self, part: str, name: str) -> trace_pb2.Span:
        [span] = [span for of, span in self.spans if (of, span.name) == (part, name)]
        return span


def texts(attributes: Any) -> dict[str, str | int]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    stub = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_services.add_TraceServiceServicer_to_server(stub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield stub, f"127.0.0.1:{port}"
    server.stop(0).wait(5)


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_spans_of_two_processes_are_one_trace(collector, scheme: str) -> None:
    stub, endpoint = collector
    gateway, decode = (make_tracer(scheme + endpoint, part, 1.0) for part in ("gateway", "decode-0"))
    request = gateway.begin("request", (), request_id="3f9c", prompt=MARKER)
    answer = request.child("answer", ago_ms=20, tokens=7)
    there = decode.begin("decode", answer.carrier(), worker="decode-0")
    there.end("digest_mismatch")
    answer.end("digest_mismatch")
    request.end()
    for tracer in (gateway, decode):
        tracer.close()
    root, child, other = stub.one("gateway", "request"), stub.one("gateway", "answer"), stub.one("decode-0", "decode")
    assert root.parent_span_id == b""
    assert (child.parent_span_id, other.parent_span_id) == (root.span_id, child.span_id)
    assert {root.trace_id, child.trace_id, other.trace_id} == {root.trace_id}
    assert root.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert texts(root.attributes) == {"genlock.request_id": "3f9c", "genlock.cause": "ok"}, "nothing but ATTRIBUTES"
    assert texts(child.attributes) == {"genlock.tokens": 7, "genlock.cause": "digest_mismatch"}
    assert child.end_time_unix_nano - child.start_time_unix_nano >= 20_000_000
    assert (other.status.code, other.status.message) == (trace_pb2.Status.STATUS_CODE_ERROR, "digest_mismatch")
    assert root.status.code == trace_pb2.Status.STATUS_CODE_UNSET


def test_what_is_not_sampled_is_not_sent(collector) -> None:
    stub, endpoint = collector
    tracer = make_tracer(endpoint, "gateway", 0.0)
    tracer.begin("request", ()).end()
    tracer.close()
    assert stub.spans == []


@pytest.mark.parametrize(("own_ratio", "others_ratio"), [(1.0, 0.0), (0.0, 1.0)])
def test_who_began_a_request_decides_for_all_parts(collector, own_ratio: float, others_ratio: float) -> None:
    """Else traces would be torn: a part that is traced less than the gateway would leave holes in the gateway's."""
    stub, endpoint = collector
    gateway, decode = make_tracer(endpoint, "gateway", own_ratio), make_tracer(endpoint, "decode-0", others_ratio)
    request = gateway.begin("request", ())
    answer = request.child("answer")
    decode.begin("decode", answer.carrier()).end()
    answer.end()
    request.end()
    for tracer in (gateway, decode):
        tracer.close()
    told = {(part, span.name) for part, span in stub.spans}
    assert told == ({("gateway", "request"), ("gateway", "answer"), ("decode-0", "decode")} if own_ratio else set())


def test_a_share_is_sampled(collector) -> None:
    stub, endpoint = collector
    tracer = make_tracer(endpoint, "gateway", 0.5)
    for _ in range(200):
        tracer.begin("request", ()).end()
    tracer.close()
    assert 50 < len(stub.spans) < 150  # by chance less than once in 10^12


def test_a_collector_that_is_away_keeps_nobody() -> None:
    with socket.socket() as taken:  # bound and not listening: the port is nobody's, and stays so
        taken.bind(("127.0.0.1", 0))
        tracer = make_tracer(f"127.0.0.1:{taken.getsockname()[1]}", "gateway", 1.0)
        for _ in range(100):
            tracer.begin("request", ()).end()
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < 30


async def seen_by(**settings: object) -> Seen:
    """One answered request of a cluster with these settings; its spans have left when this returns."""
    lab = EdgeLab(load_subject("probe"), **settings)
    try:
        await lab.start()
        seen = await lab.see(f"{MARKER} " * 8, max_tokens=8, ignore_eos=True)
        assert seen.error is None
        await lab.until(lambda: not lab.gateway.state.running, "the gateway is idle")
        await lab.require_quiet()
    finally:
        await lab.stop()
    return seen


async def test_a_cluster_samples_what_it_is_set_to(collector) -> None:
    stub, endpoint = collector
    await seen_by(**{"tracing.endpoint": endpoint, "tracing.sample_ratio": 0.0})
    assert stub.spans == []


async def test_a_cluster_sends_its_spans(collector) -> None:
    stub, endpoint = collector
    seen = await seen_by(**{"tracing.endpoint": endpoint})
    request = stub.one("gateway", "request")
    own = [(part, span) for part, span in stub.spans if span.trace_id == request.trace_id]
    assert {part for part, _span in own} == {"gateway", "decode-0", "prefill-0"}
    assert {span.name for _part, span in own} >= {"admit", "route", "answer", "handoff", "transfer", "lease"}
    assert texts(request.attributes)["genlock.request_id"] == seen.messages[0].server_id
    for _part, span in stub.spans:
        assert {name.removeprefix("genlock.") for name in texts(span.attributes)} <= ATTRIBUTES
    assert all(MARKER.encode() not in raw for raw in stub.raw)
