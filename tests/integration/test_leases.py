"""What operators see of single leases: real workers, one of which keeps pages that are being pulled."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from cluster.cli.main import OK, UNREACHABLE, run
from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from genlock.v1 import worker_pb2
from tests.support.edge_lab import EdgeLab, cluster

PAGES = 5
LEASE_MS = 6_000


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@pytest.fixture
async def lab(subject: Subject):
    async with cluster(subject, transfer__lease_ms=LEASE_MS) as lab:
        yield lab


async def get_leases(lab: EdgeLab, capsys, *args: str) -> tuple[int, str, str]:
    code = await asyncio.to_thread(run, ["get", "leases", "--endpoint", lab.gateway.endpoint, *args])
    out, err = capsys.readouterr()
    return code, out, err


async def test_a_lease_is_shown_while_its_pages_are_pulled_and_not_after(lab: EdgeLab, capsys) -> None:
    let_go, held = threading.Event(), threading.Event()

    def hold(start, orders) -> None:
        held.set()
        let_go.wait(60)

    lab.hooks.each_pull = hold
    text = "xyzzy of a user. " * 20
    prompt = tuple(lab.subject.tokenizer.encode(text)[: PAGES * PAGE_TOKENS - 3])
    reading = asyncio.create_task(lab.read(lab.call(prompt, max_tokens=4, ignore_eos=True)))
    try:
        core = lab.prefill_engine.core
        await lab.until(lambda: held.is_set() and any(s.completed for s in core._promised.values()), "it is kept")
        [seq] = core._promised.values()
        await lab.until(lambda: core.leases.oldest(1)[0].renewals, "decode has renewed it")
        [running] = lab.gateway.state.running
        code, out, err = await get_leases(lab, capsys, "-o", "json")
        assert (code, err) == (OK, "")
        tree = json.loads(out)
        [lease] = tree["leases"]
        assert (tree["total"], tree["unreached"]) == (1, [])
        assert 0 < lease.pop("age_ms") < 60_000
        assert 0 < lease.pop("left_ms") <= LEASE_MS
        assert lease.pop("renewals") >= 1
        assert lease == {
            "worker_id": "prefill-0", "handoff": seq.handoff_id[:4].hex(), "ticket": seq.ticket.ticket_id[:4].hex(),
            "request": running.facts.server_id, "phase": "completed", "pages": PAGES, "prompt_pages": PAGES,
        }  # fmt: skip
        said = [out]
        for form in ("table", "wide", "yaml"):
            code, out, _err = await get_leases(lab, capsys, "-o", form)
            assert code == OK
            assert all(str(lease[name]) in out for name in ("worker_id", "handoff", "request", "phase"))
            said.append(out)
        secrets = (
            seq.handoff_id.hex(),
            seq.ticket.ticket_id.hex(),
            lab.config.cluster.secret,
            *map(bytes.hex, seq.keys),
        )
        for secret in ("xyzzy", ", ".join(map(str, prompt[:6])), *secrets):
            assert not any(secret in one for one in said)
    finally:
        let_go.set()
    assert (await reading).error is None
    await lab.until(lambda: not len(core.leases), "decode has what it wants")
    code, out, _err = await get_leases(lab, capsys, "-o", "json")
    assert (code, json.loads(out)["leases"], json.loads(out)["total"]) == (OK, [], 0)
    code, out, _err = await get_leases(lab, capsys)
    assert (code, "handoff" in out) == (OK, True), "a table's head is there without rows"
    service = lab.prefill._status._leases.__self__
    await lab.until(lambda: not service._requests, "no request's id is kept")


async def test_the_oldest_are_shown_and_the_others_counted(lab: EdgeLab, capsys) -> None:
    go = threading.Event()
    lab.hooks.before_prefill_plan = go.is_set
    calls = [lab.call(lab.subject.prompt(f"one of {at}", 70), max_tokens=2, ignore_eos=True) for at in range(3)]
    reading = [asyncio.create_task(lab.read(call)) for call in calls]
    try:
        await lab.until(lambda: len(lab.prefill_engine.core.leases) == 3, "all three wait")
        first, *_ = lab.prefill_engine.core.leases.oldest(1)
        code, out, _err = await get_leases(lab, capsys, "--limit", "1", "-o", "json")
        tree = json.loads(out)
        assert (code, tree["total"]) == (OK, 3)
        [lease] = tree["leases"]
        shown = (lease["handoff"], lease["phase"], lease["pages"], lease["prompt_pages"])
        assert shown == (first.handoff_id[:4].hex(), "queued", 0, -(-70 // PAGE_TOKENS))
        worker = lab.gateway.state.worker_stub(lab.prefill.endpoint)
        told = await worker.Leases(worker_pb2.WorkerLeasesRequest(limit=1), timeout=10)
        assert (len(told.leases), told.total) == (1, 3), "nor does the worker send more"
        assert "1 of 3" in (await get_leases(lab, capsys, "--limit", "1"))[1]
    finally:
        go.set()
    assert all(seen.error is None for seen in await asyncio.gather(*reading))


async def test_a_worker_that_does_not_answer_is_named(lab: EdgeLab, capsys) -> None:
    await lab.prefill._server.stop(0)  # type: ignore[union-attr] # started
    code, out, err = await get_leases(lab, capsys, "-o", "json")
    assert code == UNREACHABLE
    [missing] = json.loads(out)["unreached"]
    assert (missing["worker_id"], missing["reason"]) == ("prefill-0", "peer_unreachable")
    assert "worker prefill-0 did not answer" in err
