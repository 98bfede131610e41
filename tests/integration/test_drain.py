"""Scale-down under load: with enough grace nobody loses a request; with too little each loss is a typed error."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import random
from dataclasses import dataclass, field

import pytest

from cluster.config import load
from cluster.control.api import Change
from cluster.control.state import Phase
from cluster.gateway.served import ServedModel
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.launcher import InProcessLauncher, Launcher
from cluster.launch.spec import WorkerSpec
from cluster.launch.up import Cluster
from cluster.roles import Role
from cluster.selftest.lab import PAGE_TOKENS, Client, Reply, Subject, load_subject
from decode.engine import DecodeHooks
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc
from kvstore.errors import Unavailable
from wire.options import open_channel

ME = Change("test")
WAIT_MS = 60_000
LOADERS = 4
ANSWER_TOKENS = 16
LOST_BY_DRAIN = {"draining", "drain_cut", "prefill_gone", "prefill_unreachable", "peer_unreachable", "unreachable"}


def build_with(model, spec: WorkerSpec) -> BuiltWorker:
    return BuiltWorker(spec, WorkerTuning(model=model))


@dataclass
class Load:
    """Requests one after another from several callers, each reply kept."""

    client: Client
    subject: Subject
    replies: list[tuple[tuple[int, ...], Reply]] = field(default_factory=list)
    stopped: bool = False

    async def run(self, caller: int) -> None:
        dice = random.Random(caller)
        for number in itertools.count():
            if self.stopped:
                return
            length = [40, 64, 90][number % 3]
            prompt = self.subject.prompt(f"load {caller} {length}", length)
            reply = await self.client.ask(prompt, dice.choice([1, 8, ANSWER_TOKENS]))
            self.replies.append((prompt, reply))


class DrainLab:
    def __init__(self, launcher: Launcher, subject: Subject, flags: dict[str, object] | None = None) -> None:
        self.subject = subject
        config = load(
            flags={
                "model.name": subject.name,
                "cluster.secret": os.urandom(16).hex(),
                "cache.page_tokens": PAGE_TOKENS,
                "cache.prefill_pages": 96,
                "cache.decode_pages": 96,
                "workers.prefill": 2,
                "workers.decode": 2,
                "workers.cpus": 0.1,
                "workers.status_poll_ms": 50,
                "workers.drain_timeout_ms": 20_000,
                "control.drain_open_ms": 250,
                "control.reconcile_ms": 20,
                "registry.poll_ms": 50,
                "api.port": 0,
                **(flags or {}),
            }
        ).config

        async def load_served(_config: object) -> ServedModel:
            return ServedModel(subject.model.info, subject.tokenizer)

        self.cluster = Cluster(config, launcher, load_served)
        self.load: Load
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> DrainLab:
        endpoint = await self.cluster.start()
        self.load = Load(Client(open_channel(endpoint)), self.subject)
        self._tasks = [asyncio.create_task(self.load.run(caller)) for caller in range(LOADERS)]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop_load()
        await self.load.client.channel.close(None)
        await self.cluster.stop(0)

    async def stop_load(self) -> None:
        self.load.stopped = True
        await asyncio.gather(*self._tasks)

    async def scaled(self, prefill: int, decode: int) -> None:
        """Scales and waits until the fleet is what is wanted, with some replies since."""
        await self.cluster.operations.scale(prefill, decode, ME)
        controller = self.cluster._controller
        assert controller is not None

        def right(state) -> bool:
            rows = state.rows.values()
            return len(rows) == prefill + decode and all(row.phase is Phase.READY for row in rows)

        assert await controller.turned(right, WAIT_MS), controller.state
        await self.cluster.gateway.wait_ready(WAIT_MS)
        before = len(self.load.replies)
        async with asyncio.timeout(60):
            while len(self.load.replies) < before + LOADERS:
                await asyncio.sleep(0.005)

    def verdicts(self) -> list[str]:
        """Per reply: ok, the error's reason, or `wrong`."""
        return [_verdict(self.subject, prompt, reply) for prompt, reply in self.load.replies]


def _verdict(subject: Subject, prompt: tuple[int, ...], reply: Reply) -> str:
    if reply.tokens and reply.tokens != subject.answer(prompt, ANSWER_TOKENS).tokens[: len(reply.tokens)]:
        return "wrong"
    if reply.error is None:
        return "ok" if reply.tokens else "wrong"
    return reply.error.reason


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


def in_process(subject: Subject) -> InProcessLauncher:
    return InProcessLauncher(functools.partial(build_with, subject.model))


@pytest.mark.parametrize(("rounds", "small"), [(20, (1, 2)), (20, (2, 1))], ids=["prefill", "decode"])
@pytest.mark.timeout(300)
async def test_scale_down_under_load_loses_nothing(subject: Subject, rounds: int, small: tuple[int, int]):
    launcher = in_process(subject)
    async with DrainLab(launcher, subject) as lab:
        for _round in range(rounds):
            await lab.scaled(*small)
            await lab.scaled(2, 2)
        await lab.stop_load()
        verdicts = lab.verdicts()
        assert set(verdicts) == {"ok"}, {reason: verdicts.count(reason) for reason in set(verdicts)}
        assert len(verdicts) >= rounds * LOADERS
        await pages_back(launcher)


async def test_what_a_closed_door_turns_away_is_served_by_another_worker(subject: Subject):
    """Doors that shut at once: whoever was on its way when the drain began is sent elsewhere, and nobody fails."""
    launcher = in_process(subject)
    async with DrainLab(launcher, subject, {"control.drain_open_ms": 0}) as lab:
        async with asyncio.timeout(120):
            moved = lab.cluster.gateway.state.metrics._turned_away._value
            while moved.get() < 3:
                await lab.scaled(2, 1)
                await lab.scaled(2, 2)
        await lab.stop_load()
        verdicts = lab.verdicts()
        assert set(verdicts) == {"ok"}, {reason: verdicts.count(reason) for reason in set(verdicts)}
        await pages_back(launcher)


async def pages_back(launcher: InProcessLauncher) -> None:
    """Every page of every worker is free again or kept by the prefix cache."""
    async with asyncio.timeout(10):
        for worker in launcher.workers.values():
            assert isinstance(worker, BuiltWorker)
            while True:
                if worker.role is Role.PREFILL:
                    await worker.engine.loop.call(worker.engine.core.evict_all)
                if worker.guard.free_pages == worker.guard.slots:
                    break
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("small", [(1, 2), (2, 1)], ids=["prefill", "decode"])
async def test_too_little_grace_ends_requests_typed(subject: Subject, small: tuple[int, int]):
    launcher = in_process(subject)
    flags: dict[str, object] = {"workers.drain_timeout_ms": 1, "control.drain_open_ms": 0}
    async with DrainLab(launcher, subject, flags) as lab:
        async with asyncio.timeout(60):
            for _round in range(30):
                await lab.scaled(*small)
                await lab.scaled(2, 2)
                if set(lab.verdicts()) - {"ok"}:
                    break
        await lab.stop_load()
        losses = set(lab.verdicts()) - {"ok"}
        assert losses, "this grace was to be too little for somebody"
        assert losses <= LOST_BY_DRAIN, losses
        errors = [reply.error for _prompt, reply in lab.load.replies if reply.error is not None]
        assert all(isinstance(error, Unavailable) for error in errors)
        await pages_back(launcher)


@dataclass
class Gate:
    """Steps of decode, let through or not. Handoffs go on."""

    shut: bool = True

    def build(self, model, spec: WorkerSpec) -> BuiltWorker:
        return BuiltWorker(spec, WorkerTuning(model=model, decode=DecodeHooks(before_plan=lambda: not self.shut)))


async def test_a_request_that_is_preempted_after_its_prefill_worker_was_drained_is_answered(subject: Subject):
    """Three answers that need more pages than there are, all computed by prefill-0, which is gone before any is
    preempted."""
    gate, most = Gate(), 80
    launcher = InProcessLauncher(functools.partial(gate.build, subject.model))
    # No load but the three.
    flags: dict[str, object] = {"workers.decode": 1, "cache.decode_pages": 18, "workers.drain_timeout_ms": 60_000}
    lab = DrainLab(launcher, subject, flags)
    prompts = [subject.prompt(f"pressed {number}", 70) for number in range(3)]
    for prompt in prompts:  # now: the oracle keeps this thread, and with it the gateway
        subject.answer(prompt, most)
    endpoint = await lab.cluster.start()
    client = Client(open_channel(endpoint))
    try:
        asked = []
        for prompt in prompts:
            first = asyncio.Event()
            asking = asyncio.create_task(client.ask(prompt, most, lambda _count, first=first: first.set()))
            asked.append((prompt, asking))
            await asyncio.wait_for(first.wait(), 20)
        served = {name: worker.engine.facts().steps for name, worker in launcher.workers.items() if "prefill" in name}
        assert served["prefill-0"]
        assert not served["prefill-1"], "the gateway's tie goes to the first"
        await lab.cluster.operations.drain(["prefill-0"], [], ME)
        async with asyncio.timeout(30):
            while "prefill-0" in launcher.workers:
                await asyncio.sleep(0.02)
        gate.shut = False
        for prompt, asking in asked:
            reply = await asyncio.wait_for(asking, 60)
            assert reply.error is None, reply.error
            assert reply.tokens == subject.answer(prompt, most).tokens
        assert launcher.workers["decode-0"].engine.facts().outcomes["preempted"]
        stub = operator_pb2_grpc.OperatorServiceStub(client.channel)
        told = [await stub.DescribeRequest(pb.DescribeRequestRequest(request_id=f"lab-{i}")) for i in range(3)]
        again = [recompute for one in told for recompute in one.recomputes]
        assert again
        assert {(one.from_worker, one.to_worker) for one in again} <= {
            ("prefill-0", "prefill-1"), ("prefill-1", "prefill-1"),
        }  # fmt: skip
        assert sum(one.request.preemptions for one in told) == len(again)
        assert {one.request.prefill_worker for one in told if one.recomputes} == {"prefill-1"}
        await pages_back(launcher)
    finally:
        await client.channel.close(None)
        await lab.cluster.stop(0)
