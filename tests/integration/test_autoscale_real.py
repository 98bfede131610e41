"""The autoscaler on a real fleet: load comes, workers come; load goes, they are drained and gone; nobody loses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from cluster.autoscale.scaler import Scaler
from cluster.config import load
from cluster.control import scaling
from cluster.control.state import Phase
from cluster.gateway.served import ServedModel
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from cluster.roles import Role
from cluster.selftest.lab import PAGE_TOKENS, Client, Reply, Subject, load_subject
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc as services
from tests.integration.test_drain import in_process, pages_back
from tests.integration.test_operators import Operator
from wire.options import open_channel
from wire.worker_status import WorkerStatusService

WAIT_S = 60
HIGH = 3
ANSWER_TOKENS = 48
PROMPTS = 4
FIRST_PER_S = 2.0
GROWTH = 1.5
# Far below what the doors and the workers hold: an open loop must not turn into refusals where the machine is slow.
MOST_OPEN = 200
POLICY = f"""
mode: utilisation
utilisation: {{decode: 0.75}}
prefill: {{low: 1, high: 1}}
decode: {{low: 1, high: {HIGH}}}
up: {{delay_ms: 200, step: 1}}
down: {{delay_ms: 600, step: 1}}
"""

PREFILL_POLICY = """
mode: utilisation
utilisation: {prefill: 0.05}
prefill: {low: 1, high: 2}
decode: {low: 1, high: 1}
up: {delay_ms: 200, step: 1}
down: {delay_ms: 600, step: 1}
"""


@dataclass
class Load:
    """First an open loop whose rate rises, whether or not earlier requests were answered; then so many callers, each
    with one request after the other. Each answer is kept."""

    client: Client
    prompts: list[tuple[int, ...]]
    rising: bool = True
    callers: int = 0
    replies: list[tuple[tuple[int, ...], Reply]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def rise(self) -> None:
        rate_per_s = FIRST_PER_S
        while self.rising:
            if sum(not task.done() for task in self._tasks) < MOST_OPEN:
                self._tasks.add(asyncio.create_task(self._ask()))
            await asyncio.sleep(1 / rate_per_s)
            rate_per_s *= math.pow(GROWTH, 1 / rate_per_s)

    def keep(self, callers: int) -> None:
        """So many requests run at any time from now on."""
        before, self.rising, self.callers = self.callers, False, callers
        self._tasks.update(asyncio.create_task(self._call(number)) for number in range(before, callers))

    async def end(self) -> None:
        self.rising, self.callers = False, 0
        await asyncio.gather(*self._tasks)

    async def _call(self, number: int) -> None:
        while number < self.callers:
            await self._ask()

    async def _ask(self) -> None:
        prompt = self.prompts[len(self.replies) % len(self.prompts)]
        self.replies.append((prompt, await self.client.ask(prompt, ANSWER_TOKENS)))


class Fleet(Operator):
    """The operators' calls of a real cluster, and the loads on it."""

    launcher: InProcessLauncher
    cluster: Cluster
    load: Load

    async def until(self, true: Callable[[pb.FleetView], bool], what: str) -> pb.FleetView:
        try:
            async with asyncio.timeout(WAIT_S):
                while not true(fleet := await self.fleet()):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"{what}: {fleet}")
        return fleet

    async def decided(self, true: Callable[[pb.AutoscaleDecision], bool]) -> pb.AutoscaleDecision:
        async with asyncio.timeout(WAIT_S):
            while True:
                told = await self("ExplainAutoscale", pb.ExplainAutoscaleRequest(limit=1000))
                found = next((one for one in told.decisions if true(one)), None)
                if found is not None:
                    return found
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@asynccontextmanager
async def real_fleet(subject: Subject, **flags: object) -> AsyncIterator[Fleet]:
    merged: dict[str, object] = {
        "model.name": subject.name,
        "cache.page_tokens": PAGE_TOKENS,
        "cache.prefill_pages": 96,
        "cache.decode_pages": 96,
        "workers.prefill": 1,
        "workers.decode": 1,
        "workers.max_running": 4,
        "workers.max_waiting": MOST_OPEN,
        "workers.status_poll_ms": 50,
        "workers.drain_timeout_ms": 30_000,
        "control.autoscale_ms": 100,
        "control.drain_open_ms": 250,
        "control.reconcile_ms": 20,
        "registry.poll_ms": 50,
        "api.port": 0,
        "api.max_requests": 2 * MOST_OPEN,
        **{name.replace("__", "."): value for name, value in flags.items()},
    }

    async def load_served(_config: object) -> ServedModel:
        return ServedModel(subject.model.info, subject.tokenizer)

    launcher = in_process(subject)
    running = Cluster(load(flags=merged).config, launcher, load_served)
    endpoint = await running.start()
    try:
        async with open_channel(endpoint) as channel:
            fleet = Fleet(services.OperatorServiceStub(channel))
            fleet.launcher, fleet.cluster = launcher, running
            prompts = [subject.prompt(f"scale {number}", 64) for number in range(PROMPTS)]
            fleet.load = Load(Client(channel), prompts)
            yield fleet
    finally:
        await running.stop(0)


def ready(fleet: pb.FleetView, role: Role) -> int:
    return sum(worker.role == role.value and worker.phase == Phase.READY.value for worker in fleet.workers)


def check_explained(decisions: list[pb.AutoscaleDecision], events: list[pb.Event]) -> None:
    """Every change of the counts is the autoscaler's, one step, and the words of the decision that made it."""
    scales = [event for event in events if (event.kind, event.subject) == ("scale", "fleet")]
    moved = [one for one in reversed(decisions) if not one.held]
    assert [event.actor for event in scales] == ["autoscaler"] * len(scales)
    assert len(scales) == len(moved) >= 2 * (HIGH - 1)
    for event, decision in zip(scales, moved, strict=True):
        before, after = decision.before, decision.target
        assert event.message == (
            f"prefill {before.prefill} to {after.prefill}, decode {before.decode} to {after.decode}"
        )
        assert event.reason == "; ".join(decision.reasons)[:500]
        assert f"decode: {decision.inputs['decode.running'] + decision.inputs['decode.waiting']:.0f} requests" in (
            event.reason
        )
        assert abs(after.decode - before.decode) == 1
        assert 1 <= after.decode <= HIGH


@pytest.mark.timeout(300)
async def test_workers_come_with_the_load_and_go_with_it(subject: Subject) -> None:
    async with real_fleet(subject) as fleet:
        expected = {prompt: subject.answer(prompt, ANSWER_TOKENS).tokens for prompt in fleet.load.prompts}
        await fleet("SetAutoscale", pb.SetAutoscaleRequest(policy=POLICY))
        rise = asyncio.create_task(fleet.load.rise())
        grown = await fleet.until(lambda view: ready(view, Role.DECODE) == HIGH, "the fleet has not grown")
        assert grown.desired_decode == HIGH
        # What is left keeps every worker busy, also the one that goes: it has something to lose.
        for left, callers in ((2, 5), (1, 2)):
            fleet.load.keep(callers)
            small = await fleet.until(
                lambda view, left=left: view.settled and len(view.workers) == 1 + left == 1 + ready(view, Role.DECODE),
                f"the fleet has not shrunk to {left}",
            )
        await fleet.load.end()
        await rise
        verdicts = [reply.error or reply.tokens == expected[prompt] for prompt, reply in fleet.load.replies]
        assert all(verdict is True for verdict in verdicts), [one for one in verdicts if one is not True]
        assert len(verdicts) > PROMPTS
        # The extra ones have ended as processes too, and what stays has all its pages.
        assert set(fleet.launcher.workers) == {worker.worker_id for worker in small.workers}
        await pages_back(fleet.launcher)
        told = await fleet("ExplainAutoscale", pb.ExplainAutoscaleRequest(limit=1000))
        events = await fleet("ListEvents", pb.ListEventsRequest(limit=1000))
        check_explained(list(told.decisions), list(events.events))


@pytest.mark.timeout(300)
async def test_prefill_workers_come_with_the_prompts_and_go_with_them(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on the other side: prompts that nobody has seen before, each with a short answer."""
    monkeypatch.setattr(scaling, "Scaler", lambda: Scaler(window_ms=2_000))
    asking = True
    wrong: list[object] = []

    async def call(fleet: Fleet, number: int) -> int:
        asked = 0
        while asking:
            prompt = subject.prompt(f"caller {number} asks {asked}", 192)
            reply = await fleet.load.client.ask(prompt, 2)
            asked += 1
            if not subject.right(prompt, reply):
                wrong.append(reply)
        return asked

    def both_compute(view: pb.FleetView) -> bool:
        return sum(worker.role == "prefill" and worker.status.tokens > 0 for worker in view.workers) == 2

    async with real_fleet(subject) as fleet:
        await fleet("SetAutoscale", pb.SetAutoscaleRequest(policy=PREFILL_POLICY))
        callers = [asyncio.create_task(call(fleet, number)) for number in range(6)]
        grown = await fleet.until(lambda view: ready(view, Role.PREFILL) == 2, "prefill has not grown")
        assert (grown.desired_prefill, grown.desired_decode) == (2, 1)
        await fleet.until(both_compute, "the new one gets no prompts")
        asking = False
        asked = await asyncio.gather(*callers)
        small = await fleet.until(lambda view: view.settled and len(view.workers) == 2, "prefill has not shrunk")
        assert (small.desired_prefill, small.desired_decode) == (1, 1)
        assert not wrong, wrong
        assert min(asked) > 0
        assert set(fleet.launcher.workers) == {worker.worker_id for worker in small.workers}
        await pages_back(fleet.launcher)
        up = await fleet.decided(lambda one: one.target.prefill > one.before.prefill)
        assert any(line.startswith("prefill: ") and "tokens/s arrive" in line for line in up.reasons)


async def test_a_worker_that_tells_nothing_holds_the_fleet_and_says_so(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two idle decode workers where one would do. One does not answer: first its role's numbers are missing, and when
    it is taken for degraded, what it may still be doing is no reason to shrink. It answers again: the fleet shrinks."""
    hushed: set[str] = set()
    real = WorkerStatusService.Status

    async def status(self, request, context):
        if self._facts.__self__.worker_id in hushed:
            await asyncio.Event().wait()  # until the caller gives up
        return await real(self, request, context)

    monkeypatch.setattr(WorkerStatusService, "Status", status)
    async with real_fleet(subject, workers__decode=2, workers__status_timeout_ms=1_500) as fleet:
        seen = await fleet.settled(1, 2)
        assert all(worker.HasField("status") for worker in seen.workers)
        hushed.add("decode-1")
        await fleet.until(
            lambda view: any(w.worker_id == "decode-1" and not w.HasField("status") for w in view.workers),
            "its last answer still counts",
        )
        await fleet("SetAutoscale", pb.SetAutoscaleRequest(policy=POLICY.replace("600", "0")))
        missing = await fleet.decided(lambda one: "decode holds: ready is missing" in one.reasons)
        assert missing.held
        unseen = await fleet.decided(lambda one: one.inputs.get("decode.unseen") == 1)
        assert unseen.held
        assert (unseen.clamped.decode, unseen.target.decode) == (1, 2)
        assert "decode does not shrink: 1 worker does not answer" in unseen.reasons
        degraded = await fleet.fleet()
        assert (degraded.desired_decode, ready(degraded, Role.DECODE)) == (2, 1)
        # The healthy one goes on serving.
        prompt = fleet.load.prompts[0]
        assert subject.right(prompt, await fleet.load.client.ask(prompt, ANSWER_TOKENS))
        hushed.clear()
        await fleet.until(lambda view: view.settled and len(view.workers) == 2, "the fleet has not shrunk")
        await pages_back(fleet.launcher)
