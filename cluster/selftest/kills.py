"""Rows that need real processes: workers are Ray actors, and the fault is SIGKILL.

The control runs with a broken stream taken for a proper end: then half an answer, or an answer from half the pages,
looks like a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from cluster.config import load
from cluster.gateway.served import ServedModel
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.doors import Seams
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.spec import WorkerSpec
from cluster.launch.up import Cluster
from cluster.selftest.lab import PAGE_TOKENS, Client, Reply, Subject, stream_checks
from cluster.selftest.rows import Observed, Row
from decode.core import StartHandoff
from decode.pull import PullHooks
from genlock.v1 import operator_pb2, operator_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.receive import PageOrder
from wire.options import open_channel

POLL_S = 0.005
PHASE_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 20.0
CHUNK_TOKENS = 32
LONG_PROMPT_TOKENS = 1024
PULL_HOLD_S = 10.0


def build_without(off: tuple[str, ...], spec: WorkerSpec) -> BuiltWorker:
    """A worker that runs without some checks; picklable, so that an actor can make it."""
    return BuiltWorker(spec, WorkerTuning(checks=ALL_CHECKS.without(*off)))


def build_slow(spec: WorkerSpec) -> BuiltWorker:
    """A worker whose pulls of long prompts begin only after a while: what is sent is not acknowledged."""

    def hold(start: StartHandoff, _orders: tuple[PageOrder, ...]) -> None:
        if len(start.ticket.token_ids) >= LONG_PROMPT_TOKENS:
            time.sleep(PULL_HOLD_S)

    return BuiltWorker(spec, WorkerTuning(pull=PullHooks(before_pull=hold)))


class KillLab:
    """One prefill and two decode workers as Ray actors behind a real gateway."""

    def __init__(
        self,
        subject: Subject,
        checks: Checks,
        flags: dict[str, object] | None = None,
        build: Callable[[WorkerSpec], BuiltWorker] | None = None,
    ) -> None:
        """`build` makes the workers, in their processes; it must be picklable."""
        self.subject = subject
        off = tuple(name for name, on in vars(checks).items() if not on)
        config = load(
            flags={
                "model.name": subject.name,
                "cache.page_tokens": PAGE_TOKENS,
                "cache.prefill_pages": 160,
                "cache.decode_pages": 160,
                "workers.prefill": 1,
                "workers.decode": 2,
                "workers.cpus": 0.1,
                "workers.chunk_tokens": CHUNK_TOKENS,
                "workers.status_poll_ms": 100,
                # What dies stays dead: the row is about its requests.
                "control.restart": False,
                "api.port": 0,
                **(flags or {}),
            }
        ).config
        served = ServedModel(subject.model.info, subject.tokenizer)

        async def load_served(_config: object) -> ServedModel:
            return served

        seams = Seams(stream_checks=stream_checks(checks))
        launcher = RayLauncher(build or functools.partial(build_without, off))
        self._cluster = Cluster(config, launcher, load_served, seams=seams)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.client: Client
        self.endpoints: dict[str, str] = {}

    async def start(self) -> None:
        endpoint = await self._cluster.start()
        self.client = Client(open_channel(endpoint))
        operator = operator_pb2_grpc.OperatorServiceStub(self.client.channel)
        status = await operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=5)
        self.endpoints = {entry.worker_id: entry.endpoint for entry in status.workers}

    async def stop(self) -> None:
        with contextlib.suppress(AttributeError):  # the start may have failed
            await self.client.channel.close(None)
        for channel in self._channels.values():
            await channel.close(None)
        await self._cluster.stop(0)

    async def status(self, worker_id: str) -> worker_pb2.WorkerStatus:
        endpoint = self.endpoints[worker_id]
        channel = self._channels.setdefault(endpoint, open_channel(endpoint))
        return await worker_pb2_grpc.WorkerServiceStub(channel).Status(worker_pb2.WorkerStatusRequest(), timeout=5)

    async def until(self, worker_id: str, true: Callable[[worker_pb2.WorkerStatus], bool]) -> worker_pb2.WorkerStatus:
        """Polls a worker until `true` of its status."""
        async with asyncio.timeout(PHASE_TIMEOUT_S):
            while not true(status := await self.status(worker_id)):
                await asyncio.sleep(POLL_S)
            return status

    async def kill(self, worker_id: str) -> None:
        os.kill((await self.status(worker_id)).pid, signal.SIGKILL)

    async def settled(self, survivors: Sequence[str]) -> bool:
        """Whether the surviving workers have every page back; pages of the prefix cache are nobody's."""

        def back(status: worker_pb2.WorkerStatus) -> bool:
            pool = status.pool
            return not status.leases and not status.running_requests and pool.free + pool.cached == pool.pages

        try:
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                for worker_id in survivors:
                    await self.until(worker_id, back)
            return True
        except TimeoutError:
            return False


KillRun = Callable[[KillLab], Awaitable[tuple[Observed, tuple[str, ...]]]]


def prefill_killed(phase: str) -> KillRun:
    async def run(lab: KillLab) -> tuple[Observed, tuple[str, ...]]:
        blocker: asyncio.Task[Reply] | None = None
        if phase == "queued":
            blocker = asyncio.create_task(lab.client.ask(lab.subject.prompt("blocker", LONG_PROMPT_TOKENS), 1))
            await lab.until("prefill-0", lambda s: s.running_requests == 1)
        before = await lab.status("prefill-0")
        victim = asyncio.create_task(
            lab.client.ask(lab.subject.prompt("victim", LONG_PROMPT_TOKENS), lab.subject.answer_tokens)
        )
        reached: dict[str, Callable[[worker_pb2.WorkerStatus], bool]] = {
            "queued": lambda s: s.waiting_requests == 1,
            "computing": lambda s: s.running_requests == 1 and s.tokens > before.tokens,
            "half": lambda s: s.running_requests == 1 and s.pool.sealed - before.pool.sealed >= 8,
        }
        await lab.until("prefill-0", reached[phase])
        await lab.kill("prefill-0")
        reply = await victim
        if blocker is not None:
            await blocker
        return Observed(reply), ("decode-0", "decode-1")

    return run


async def decode_killed(lab: KillLab) -> tuple[Observed, tuple[str, ...]]:
    """Kills the decode worker that serves the victim, in the middle of its answer; the neighbour is on the other."""
    busy = [w for w in ("decode-0", "decode-1") if (await lab.status(w)).running_requests]
    assert len(busy) == 1, "the neighbour runs on one of the two decode workers"
    target = next(w for w in ("decode-0", "decode-1") if w not in busy)
    answering = asyncio.Event()
    victim = asyncio.create_task(
        lab.client.ask(lab.subject.prompt("victim"), lab.subject.answer_tokens, lambda count: answering.set())
    )
    await answering.wait()
    await lab.kill(target)
    return Observed(await victim), ("prefill-0", *busy)


async def kill_trial(row: Row, subject: Subject, checks: Checks) -> tuple[Observed, bool, bool]:
    """(what was seen, neighbour right, pages back)."""
    lab = KillLab(subject, checks, dict(row.flags))
    try:
        await lab.start()
        prompt = subject.prompt("neighbour")
        running = asyncio.Event()
        neighbour = asyncio.create_task(lab.client.ask(prompt, subject.neighbour_tokens, lambda count: running.set()))
        await running.wait()
        seen, survivors = await KILLS[row.number](lab)
        reply = await neighbour
        return seen, subject.right(prompt, reply), await lab.settled(survivors)
    finally:
        await lab.stop()


KILLS: dict[str, KillRun] = {
    "17a": prefill_killed("queued"),
    "17b": prefill_killed("computing"),
    "17c": prefill_killed("half"),
    "18": decode_killed,
}
