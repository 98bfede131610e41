"""Quarantine ends by proof and never by the clock: whatever time limit has passed and whoever has cancelled, the pages
of a transfer that may still write are nobody's; operators see it, and the worker says that it is not ready."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from kvstore.errors import NoCapacity, TransferTimeout
from kvstore.transfer.faults import Ending, TransferFaults
from tests.support.edge_lab import EdgeLab, require_served
from tests.support.telemetry_lab import TelemetryLab, TracedHooks, telemetry_cluster
from wire.health import LIVENESS, READINESS
from wire.options import open_channel

PAGES, POOL = 7, 12
A_DAY_MS = 24 * 3600 * 1000
LIMITS = {"cache__decode_pages": POOL, "transfer__timeout_ms": 300, "transfer__lease_ms": 200}
UP, DOWN = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


class OneClock(TracedHooks):
    """Decode's clock moves with prefill's, and a victim's pages are pulled all at once."""

    def decode_tuning(self, checks, model):
        tuning = super().decode_tuning(checks, model)
        clock = tuning.clock
        return replace(tuning, clock=lambda: clock() + self.clock_shift_ms)

    def aim(self, prompt: tuple[int, ...]) -> None:
        kept: list = []

        def bundled(start, message):
            if start.ticket.token_ids != prompt or message.WhichOneof("event") not in ("page", "completed"):
                return [message]
            kept.append(message)
            return list(kept) if message.WhichOneof("event") == "completed" else []

        def pulling(start, _orders) -> None:
            self._pulling.victim = start.ticket.token_ids == prompt

        self.each_event, self.each_pull = bundled, pulling


@pytest.fixture
def one_clock(monkeypatch) -> None:
    plain = TelemetryLab.__init__

    def init(self, subject, **flags):
        plain(self, subject, **flags)
        exporter = self.exporter
        self.hooks = self.inject = OneClock()
        self.hooks.exporter = exporter

    monkeypatch.setattr(TelemetryLab, "__init__", init)


async def health(lab: EdgeLab, service: str) -> int:
    channel = open_channel(lab.decode.endpoint)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status
    finally:
        await channel.close(None)


async def require_quarantined(lab: TelemetryLab, ended: int) -> None:
    """The pages are nobody's, and everybody can see it. `ended`: transfers that nobody waits for any more."""
    counts = lab.decode.guard.counts()
    assert (counts.quarantined, counts.free) == (PAGES, POOL - PAGES)
    with pytest.raises(NoCapacity):
        lab.decode.guard.allocate(99, POOL - PAGES + 1)
    scrape = await lab.scrape("decode")
    assert scrape.value("genlock_pool_pages", state="quarantined") == PAGES
    assert scrape.value("genlock_unproved_transfers") == ended
    assert await health(lab, READINESS) == DOWN
    assert await health(lab, LIVENESS) == UP, "nobody is killed for it"


async def require_rest_serves(lab: TelemetryLab) -> None:
    """What is left of the pool does, and prefill gives the pages that may still be read to others."""
    for i in range(POOL // 3):
        prompt = lab.subject.prompt(f"small {i}", 2 * PAGE_TOKENS + 8)
        seen = await lab.see(prompt, max_tokens=8, ignore_eos=True)
        assert seen.error is None
        assert seen.tokens() == [t.token_id for t in lab.wanted(prompt, max_tokens=8, ignore_eos=True)]


async def let_every_limit_pass(lab: TelemetryLab) -> None:
    lab.hooks.clock_shift_ms += A_DAY_MS
    turns = [engine.loop.last_turn_ms for engine in (lab.prefill.engine, lab.decode.engine)]
    for engine, before in zip((lab.prefill.engine, lab.decode.engine), turns, strict=True):
        await lab.until(lambda engine=engine, before=before: engine.loop.last_turn_ms >= before + A_DAY_MS, "it turned")
    for _ in range(3):
        await lab.decode.engine.loop.call(lab.decode.engine._receiver.sweep)


@pytest.mark.usefixtures("one_clock")
@pytest.mark.parametrize("how", ["timed out", "cancelled twice"])
async def test_a_writer_that_outlasts_every_limit_keeps_its_pages_from_everybody(subject, how):
    async with telemetry_cluster(subject, **LIMITS, cache__prefill_pages=PAGES + 2) as lab:
        await require_served(lab)
        assert await health(lab, READINESS) == UP
        victim = subject.prompt("victim", PAGES * PAGE_TOKENS)
        lab.hooks.aim(victim)
        copying, go_on = threading.Event(), threading.Event()
        if how == "timed out":
            lab.hooks.faults = TransferFaults(ending=Ending.LATE)
            seen = await lab.see(victim, max_tokens=4)
            assert isinstance(seen.error, TransferTimeout)
            assert seen.tokens() == []
        else:
            lab.hooks.before_copy = lambda: (copying.set(), go_on.wait(60))
            call = lab.call(victim, max_tokens=4)
            reading = asyncio.create_task(lab.read(call))
            await lab.until(copying.is_set, "it copies")
            number = lab.decode_request_no(victim)
            lab.decode.engine.cancel(number)
            lab.decode.engine.cancel(number)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        try:
            await lab.until(lambda: lab.decode.guard.counts().quarantined == PAGES, "its pages are nobody's")
            await let_every_limit_pass(lab)
            await require_quarantined(lab, 1 if how == "timed out" else 0)
            await require_rest_serves(lab)
            await require_quarantined(lab, 1 if how == "timed out" else 0)
        finally:
            go_on.set()
            lab.hooks.landing_gate.set()
        await lab.until(lambda: lab.decode.guard.counts().free == POOL, "the proof gives them back")
        assert await health(lab, READINESS) == UP
        lab.hooks.each_pull = lab.hooks.before_copy = None
        await require_served(lab)


async def test_a_readers_source_pages_stay_leased_while_it_reads(subject):
    """Prefill's side: decode renews as long as it pulls, and no pressure takes the pages."""
    async with telemetry_cluster(subject, transfer__lease_ms=200, cache__prefill_pages=PAGES + 4) as lab:
        victim, other = subject.prompt("victim", PAGES * PAGE_TOKENS), subject.prompt("other", 5 * PAGE_TOKENS)
        reading, go_on = threading.Event(), threading.Event()

        def hold(start, _orders) -> None:
            if start.ticket.token_ids == victim:
                reading.set()
                go_on.wait(60)

        lab.hooks.each_pull = hold
        first = asyncio.create_task(lab.see(victim, max_tokens=4, ignore_eos=True))
        try:
            await lab.until(reading.is_set, "it reads")
            await lab.until(lambda: lab.prefill.guard.counts().sealed == PAGES, "all are promised")
            second = asyncio.create_task(lab.see(other, max_tokens=4, ignore_eos=True))
            await lab.until(lambda: lab.prefill.engine.facts().waiting == 1, "another prompt needs its pages")
            await lab.until(lambda: max(lab.prefill.reading().lease_ages_ms) > 1000, "five times the lease went by")
            await lab.prefill_engine.loop.call(lab.prefill_engine.core.evict_all)
            assert lab.prefill.guard.counts().sealed == PAGES
            assert lab.prefill.engine.facts().waiting == 1
            scrape = await lab.scrape("prefill")
            assert scrape.value("genlock_lease_oldest_age_seconds") > 1
        finally:
            go_on.set()
        for seen, prompt in ((await first, victim), (await second, other)):
            assert seen.error is None
            assert seen.tokens() == [t.token_id for t in lab.wanted(prompt, max_tokens=4, ignore_eos=True)]
