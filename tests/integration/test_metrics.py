"""What operators scrape is what happened: real gateway, real workers, real HTTP, Prometheus' own parser."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from cluster.selftest.lab import Subject, load_subject
from genlock.v1 import worker_pb2
from tests.support.scrape import get
from tests.support.telemetry_lab import telemetry_cluster
from wire.calls import responses

GOOD, LEFT, CORRUPT = 10, 3, 2
LABELS = frozenset(
    {"outcome", "cause", "role", "state", "check", "result", "event", "le", "version", "worker", "model",
     "transfer_engine", "kv_format"}
)  # fmt: skip
SLOW_S = 0.2


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


async def test_each_request_is_counted_once_by_outcome_and_cause(subject):
    async with telemetry_cluster(subject) as lab:
        victim = subject.prompt("corrupted", 70)
        lab.corrupt(victim)
        good = [lab.see(subject.prompt(f"good {i}", 70), max_tokens=8, ignore_eos=True) for i in range(GOOD)]
        seen = await asyncio.gather(*good)
        assert all(one.error is None for one in seen)
        for i in range(LEFT):
            call = lab.call(subject.prompt(f"left {i}", 70), max_tokens=400, ignore_eos=True)
            await anext(responses(call))
            call.cancel()
        for _ in range(CORRUPT):
            assert (await lab.see(victim, max_tokens=8)).error.reason == "digest_mismatch"
        assert (await lab.see(victim, max_tokens=-1)).error.reason == "bad_max_tokens"
        await lab.idle()

        gateway = await lab.scrape()
        requests = gateway.by("genlock_requests_total", "outcome", "cause")
        assert {key: count for key, count in requests.items() if count} == {
            ("ok", "ok"): GOOD,
            ("cancelled", "cancelled"): LEFT,
            ("failed", "digest_mismatch"): CORRUPT,
            ("refused", "bad_max_tokens"): 1,
        }
        assert gateway.value("genlock_request_duration_seconds_count") == GOOD
        assert gateway.value("genlock_request_first_token_seconds_count") == GOOD + LEFT
        for name in ("queue", "prefill", "transfer", "per_token"):
            assert gateway.value(f"genlock_request_{name}_seconds_count") == GOOD, name
        assert gateway.value("genlock_request_prompt_tokens_total") == GOOD * 70
        assert gateway.value("genlock_request_answer_tokens_total") == GOOD * 8
        decode = await lab.scrape("decode")
        assert decode.value("genlock_checks_failed_total") == CORRUPT
        assert decode.by("genlock_worker_requests_total", "cause") == {
            ("ok",): GOOD, ("cancelled",): LEFT, ("digest_mismatch",): CORRUPT,
        }  # fmt: skip
        assert decode.value("genlock_verification_checks_total", check="receipt_digest", result="digest_mismatch") == (
            CORRUPT
        )


async def test_the_first_token_is_timed_as_the_client_times_it(subject):
    async with telemetry_cluster(subject) as lab:
        client_s = 0.0
        for i in range(5):
            # Each prompt waits for its prefill, so that the hop between client and gateway is small beside it.
            begun = time.perf_counter()
            lab.hooks.before_prefill_plan = lambda begun=begun: time.perf_counter() - begun > SLOW_S
            call = lab.call(subject.prompt(f"timed {i}", 70), max_tokens=2, ignore_eos=True)
            await anext(aiter(call))
            client_s += time.perf_counter() - begun
            await lab.read(call)
        gateway = await lab.scrape()
        assert gateway.value("genlock_request_first_token_seconds_count") == 5
        gateway_s = gateway.value("genlock_request_first_token_seconds_sum")
        assert 0.9 * client_s < gateway_s <= client_s


async def test_a_worker_shows_its_memory_beside_what_it_runs(subject):
    async with telemetry_cluster(subject) as lab:
        prompt = subject.prompt("shown", 70)
        call = lab.call(prompt, max_tokens=1000, ignore_eos=True)
        await anext(aiter(call))
        decode, prefill = await lab.scrape("decode"), await lab.scrape("prefill")
        guard = lab.decode.guard
        assert decode.value("genlock_sequences", role="decode", state="running") == 1
        pages = decode.by("genlock_pool_pages", "state")
        assert sum(pages.values()) == guard.slots
        page_bytes = guard.layout.slot_bytes
        assert decode.value("genlock_pool_capacity_bytes") == guard.slots * page_bytes
        used = decode.value("genlock_pool_used_bytes")
        assert used == (guard.slots - pages["free",]) * page_bytes
        assert used >= 70 // 16 * page_bytes
        assert decode.value("genlock_transfer_regions") == 2, "the pool's own, and the prefill worker's"
        assert prefill.value("genlock_transfer_regions") == 1
        call.cancel()
        await lab.idle()

        again = await lab.see(prompt, max_tokens=2, ignore_eos=True)
        assert again.error is None
        await lab.idle()
        decode, prefill = await lab.scrape("decode"), await lab.scrape("prefill")
        assert decode.value("genlock_sequences") == 0
        assert decode.value("genlock_pool_used_bytes") == 0
        steps = lab.decode.engine.facts().steps
        assert decode.value("genlock_step_batch_size_count") == decode.value("genlock_step_tokens_count") == steps > 0
        assert decode.value("genlock_step_batch_size_sum") == steps, "one sequence a step"
        assert prefill.value("genlock_step_tokens_sum") == prefill.value("genlock_tokens_total")
        assert prefill.value("genlock_prompt_tokens_total") == 140
        assert prefill.value("genlock_leases") == 0


async def test_prefix_hits_and_live_leases_are_shown(subject):
    async with telemetry_cluster(subject) as lab:
        prompt = subject.prompt("twice", 70)
        await lab.see(prompt, max_tokens=2, ignore_eos=True)
        hold = asyncio.Event()
        lab.hooks.each_event = lambda _start, message: [message]
        lab.hooks.before_prefill_plan = hold.is_set  # a prompt that waits has its lease already
        call = lab.call(prompt, max_tokens=2, ignore_eos=True)
        reading = asyncio.create_task(lab.read(call))
        await lab.until(lambda: len(lab.prefill_engine.core.leases), "a lease is live")
        await lab.until(lambda: max(lab.prefill.reading().lease_ages_ms) > 0, "and grows older")
        prefill = await lab.scrape("prefill")
        assert prefill.value("genlock_leases") == 1
        assert prefill.value("genlock_lease_oldest_age_seconds") > 0
        assert prefill.value("genlock_sequences", state="waiting") == 1
        hold.set()
        assert (await reading).error is None
        prefill = await lab.scrape("prefill")
        assert prefill.value("genlock_prefix_hit_tokens_total") == 64


async def test_no_family_has_a_label_that_can_grow(subject):
    async with telemetry_cluster(subject) as lab:
        await lab.see(subject.prompt("walked", 70), max_tokens=2, request_id="label-of-the-caller")
        for part in ("gateway", "prefill", "decode"):
            got = await lab.scrape(part)
            labels = {label for names in got.names().values() for label in names}
            assert labels - {"implementation"} <= LABELS, part
            assert "label-of-the-caller" not in got.text
            assert all(family.documentation for family in got.families), "each has its help"


async def test_workers_are_found_from_the_gateway(subject):
    async with telemetry_cluster(subject) as lab:
        await lab.until(
            lambda: all(r.status.metrics_endpoint for r in lab.gateway.state.fleet.workers.values()), "statuses are in"
        )
        groups = json.loads(await asyncio.to_thread(get, lab.gateway.metrics_endpoint, "/targets"))
        assert sorted((g["labels"]["__meta_genlock_role"], *g["targets"]) for g in groups) == [
            ("decode", lab.decode.telemetry.endpoint), ("prefill", lab.prefill.telemetry.endpoint),
        ]  # fmt: skip
        status = await lab.gateway.state.worker_stub(lab.decode.endpoint).Status(worker_pb2.WorkerStatusRequest())
        assert status.metrics_endpoint == lab.decode.telemetry.endpoint


async def test_metrics_are_off_by_default(subject):
    async with telemetry_cluster(subject, metrics__port=-1, metrics__worker_port=-1) as lab:
        assert lab.gateway.metrics_endpoint == lab.decode.telemetry.endpoint == ""
