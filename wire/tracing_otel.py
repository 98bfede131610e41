"""Spans through OpenTelemetry. Imported only where tracing is on; needs the extra `tracing`."""

from __future__ import annotations

import time

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span as OtelSpanApi
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from wire.tracing import ATTRIBUTES, OK, Metadata, Span, Tracer, Value

PREFIX = "genlock."
QUEUE_SPANS = 4096
CLOSE_TIMEOUT_MS = 3_000


class OtelSpan:
    """Implements `Span`."""

    def __init__(self, tracer: OtelTracer, span: OtelSpanApi) -> None:
        self._tracer = tracer
        self._span = span

    def child(self, name: str, ago_ms: float = 0.0, **attributes: Value) -> Span:
        context = set_span_in_context(self._span)
        span = self._tracer.api.start_span(name, context, attributes=_named(attributes), start_time=_at(ago_ms))
        return OtelSpan(self._tracer, span)

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def carrier(self) -> Metadata:
        headers: dict[str, str] = {}
        self._tracer.propagator.inject(headers, set_span_in_context(self._span))
        return tuple(headers.items())

    def end(self, cause: str = OK, ago_ms: float = 0.0) -> None:
        if not self._span.is_recording():
            return
        self._span.set_attribute(f"{PREFIX}cause", cause)
        if cause != OK:
            # The cause is a word from the code; an error's message may name what the caller sent.
            self._span.set_status(Status(StatusCode.ERROR, cause))
        self._span.end(_at(ago_ms))


class OtelTracer:
    """Implements `Tracer` with a provider of its own; nothing global is set."""

    def __init__(self, part: str, processor: SpanProcessor, sample_ratio: float = 1.0) -> None:
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(sample_ratio),
            resource=Resource.create({"service.name": "genlock", "service.instance.id": part}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(processor)
        self.api = self._provider.get_tracer("genlock")
        self.propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, metadata: Metadata, **attributes: Value) -> Span:
        context = self.propagator.extract(dict(metadata))
        span = self.api.start_span(name, context, kind=SpanKind.SERVER, attributes=_named(attributes))
        return OtelSpan(self, span)

    def close(self) -> None:
        self._provider.force_flush(CLOSE_TIMEOUT_MS)
        self._provider.shutdown()


def otlp_tracer(endpoint: str, part: str, sample_ratio: float) -> Tracer:
    """Sends to an OTLP collector over gRPC, from a thread of its own; what it cannot send in time is dropped.
    `http://` in front of the endpoint is plain text, `https://` is TLS."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    exporter = OTLPSpanExporter(endpoint=url, insecure=url.startswith("http://"), timeout=CLOSE_TIMEOUT_MS // 1000)
    return OtelTracer(part, BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS), sample_ratio)


def _at(ago_ms: float) -> int:
    """Unix nanoseconds."""
    return time.time_ns() - int(ago_ms * 1e6)


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    """Only what ATTRIBUTES allows: anything else is a mistake that must not leave the process."""
    return {f"{PREFIX}{key}": value for key, value in attributes.items() if key in ATTRIBUTES}
