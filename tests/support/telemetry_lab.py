"""A cluster in this process whose metrics, spans and log lines a test can read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from io import StringIO

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.launch.build import WorkerTuning
from cluster.selftest.lab import Subject
from kvstore.checks import Checks
from model.base import LanguageModel
from tests.support.edge_lab import EdgeLab, Hooks
from tests.support.scrape import Scrape, scrape
from wire.logs import JsonFormatter, TextFormatter
from wire.tracing_otel import OtelTracer

METRICS_ON = {"metrics.port": 0, "metrics.worker_port": 0}


class TracedHooks(Hooks):
    """The workers' spans go to `exporter`, too."""

    exporter: InMemorySpanExporter

    def decode_tuning(self, checks: Checks, model: LanguageModel) -> WorkerTuning:
        return replace(super().decode_tuning(checks, model), tracer=tracer_to(self.exporter, "decode-0"))

    def prefill_tuning(self, checks: Checks, model: LanguageModel, clock: Callable[[], int]) -> WorkerTuning:
        return replace(super().prefill_tuning(checks, model, clock), tracer=tracer_to(self.exporter, "prefill-0"))


def tracer_to(exporter: InMemorySpanExporter, part: str) -> OtelTracer:
    return OtelTracer(part, SimpleSpanProcessor(exporter))


class TelemetryLab(EdgeLab):
    def __init__(self, subject: Subject, **flags: object) -> None:
        super().__init__(subject, **{**METRICS_ON, **flags})
        self.exporter = InMemorySpanExporter()
        self.hooks = TracedHooks()
        self.hooks.exporter = self.exporter
        self.inject = self.hooks

    async def start(self) -> None:
        await super().start()
        self.gateway.state.tracer = tracer_to(self.exporter, "gateway")

    async def scrape(self, part: str = "gateway") -> Scrape:
        endpoints = {
            "gateway": self.gateway.metrics_endpoint,
            "prefill": self.prefill.telemetry.endpoint,
            "decode": self.decode.telemetry.endpoint,
        }
        return await scrape(endpoints[part])

    async def idle(self) -> None:
        """Every request has ended at the gateway and at the workers."""
        await self.until(lambda: not self.gateway.state.running, "the gateway is idle")
        await self.require_quiet()

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def corrupt(self, prompt: tuple[int, ...]) -> None:
        """From now on a bit of each page that is pulled for this prompt flips after it has landed."""
        self.hooks.victim = prompt

        def each_pull(start, _orders) -> None:
            self.hooks._pulling.victim = start.ticket.token_ids == prompt

        def flip(slots_SU8, page_ids) -> None:
            slots_SU8[page_ids[0], -1] ^= 1

        self.hooks.each_pull = each_pull
        self.hooks.after_landing = flip


@asynccontextmanager
async def telemetry_cluster(subject: Subject, **flags: object):
    """A cluster that is at its baseline when it is left."""
    lab = TelemetryLab(subject, **{key.replace("__", "."): value for key, value in flags.items()})
    try:
        await lab.start()
        yield lab
        await lab.idle()
    finally:
        await lab.stop()


@contextmanager
def all_log_lines() -> Iterator[StringIO]:
    """Every line of every logger at DEBUG, in both forms."""
    out = StringIO()
    root = logging.getLogger()
    handlers = [logging.StreamHandler(out), logging.StreamHandler(out)]
    handlers[0].setFormatter(TextFormatter("test"))
    handlers[1].setFormatter(JsonFormatter("test"))
    before = root.level
    for handler in handlers:
        handler.setLevel(logging.DEBUG)
        root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield out
    finally:
        root.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
