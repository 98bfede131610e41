"""A fleet in this process whose parts know each other through a real Redis-protocol server alone: workers that tell it
that they live, and gateways that look there."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.config import load
from cluster.gateway.fleet import WorkerState
from cluster.gateway.identity import authenticator_from
from cluster.gateway.pairs import unproved
from cluster.gateway.served import ServedModel
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.doors import Seams
from cluster.launch.front import Front
from cluster.launch.spec import WorkerSpec
from cluster.openai.server import HttpDoor
from cluster.registry.redis import RedisRegistry
from cluster.roles import Role
from cluster.selftest.lab import PAGE_TOKENS, Client, Subject
from cluster.settings import Config
from decode.engine import DecodeHooks
from genlock.v1 import operator_pb2, operator_pb2_grpc
from kvstore.errors import Unavailable
from prefill.engine import PrefillEngine
from tests.support.valkey import Valkey
from wire.options import open_channel

LIMIT_S = 60.0
TTL_MS = 600
REQUESTS = 4
TOKENS = 16


async def until(true: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not true():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S} s: {what}") from None


class Batch:
    """Requests that run at once, over all gateways in turn."""

    def __init__(self, subject: Subject, clients: Sequence[Client], count: int, tokens: int) -> None:
        self._subject = subject
        self._streaming: set[int] = set()
        self._prompts = [subject.prompt(f"load {number}") for number in range(count)]
        self._tasks = [
            asyncio.create_task(client.ask(prompt, tokens, lambda _n, number=number: self._streaming.add(number)))
            for number, (prompt, client) in enumerate(zip(self._prompts, itertools.cycle(clients), strict=False))
        ]

    async def streaming(self) -> Batch:
        """All of them have a token and none has ended."""
        await until(lambda: len(self._streaming) == len(self._tasks), "every request has its first token")
        assert not any(task.done() for task in self._tasks)
        return self

    async def right(self) -> None:
        """All of them end, whole, and as the oracle says."""
        for prompt, reply in zip(self._prompts, await asyncio.gather(*self._tasks), strict=True):
            assert reply.error is None, repr(reply.error)
            assert self._subject.right(prompt, reply), "a wrong answer"

    async def drop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class RegistryLab:
    """`fronts` gateways, `prefill` and `decode` workers. `tuning`: fault injection, by worker id. `tenants`: the text
    of a tenants file; empty: one tenant without a token."""

    def __init__(
        self, subject: Subject, folder: Path, *, fronts: int = 2, prefill: int = 2, decode: int = 2,
        tuning: dict[str, WorkerTuning] | None = None, tenants: str = "",
    ) -> None:  # fmt: skip
        self.subject = subject
        self.valkey = Valkey(folder)
        self.workers: dict[str, BuiltWorker] = {}
        self.fronts: list[Front] = []
        self.clients: list[Client] = []
        self.registry: RedisRegistry
        self.config: Config
        self._tuning = tuning or {}
        self._tenants = tenants
        self._counts = {Role.PREFILL: prefill, Role.DECODE: decode}
        self._front_count = fronts
        self._batches: list[Batch] = []
        self.held = False

    async def __aenter__(self) -> RegistryLab:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        await self.valkey.start()
        flags = {
            "model.name": self.subject.name,
            "cluster.secret": os.urandom(16).hex(),
            "cache.page_tokens": PAGE_TOKENS,
            "cache.prefill_pages": 96,
            "cache.decode_pages": 192,
            "workers.status_poll_ms": 100,
            "api.port": 0,
            "api.http_port": 0,
            **self.valkey.flags(ttl_ms=TTL_MS, poll_ms=50, timeout_ms=500),
        }
        self.config = load(flags=flags).config
        self.registry = RedisRegistry(self.config.registry)
        for role, count in self._counts.items():
            for number in range(count):
                await self.start_worker(role, f"{role.value}-{number}")
        for _ in range(self._front_count):
            known = authenticator_from(self._tenants, "tenants.yaml") if self._tenants else None
            front = Front(self.config, self._served, seams=Seams(authenticator=known), make_door=HttpDoor)
            self.fronts.append(front)
            self.clients.append(Client(open_channel(await front.start())))
        await until(self.all_ready, "every gateway has found every worker")

    async def _stop(self) -> None:
        self.held = False
        for batch in self._batches:
            await batch.drop()
        for client in self.clients:
            await client.channel.close(None)
        for front in self.fronts:
            await front.stop(0)
        for role in (Role.DECODE, Role.PREFILL):
            await asyncio.gather(*(worker.stop(0) for worker in self.workers.values() if worker.role is role))
        if hasattr(self, "registry"):
            await self.registry.close()
        self.valkey.kill()

    async def _served(self, _config: Config) -> ServedModel:
        return ServedModel(self.subject.model.info, self.subject.tokenizer)

    async def start_worker(self, role: Role, worker_id: str) -> BuiltWorker:
        hooks = DecodeHooks(before_plan=self.may_decode)
        tuning = self._tuning.get(worker_id) or WorkerTuning(model=self.subject.model, decode=hooks)
        worker = self.workers[worker_id] = BuiltWorker(WorkerSpec(role, worker_id, self.config), tuning)
        await worker.start()
        return worker

    # --- what is seen -------------------------------------------------------------------------------------------

    def all_ready(self) -> bool:
        return all(
            set(front.gateway.state.fleet.workers) == set(self.workers)
            and all(r.state is WorkerState.READY for r in front.gateway.state.fleet.workers.values())
            and not unproved(front.gateway.state.fleet)
            for front in self.fronts
        )

    def incarnations(self) -> dict[str, int]:
        return {worker_id: worker.guard.incarnation for worker_id, worker in self.workers.items()}

    async def registered(self) -> dict[str, int]:
        """Incarnations by name, as the registry has them; empty while it is away."""
        try:
            return {record.worker_id: record.incarnation for record in await self.registry.workers()}
        except Unavailable:
            return {}

    async def until_registered(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await self.registered() != self.incarnations():
                await asyncio.sleep(0.02)

    async def status(self, number: int) -> operator_pb2.GetStatusResponse:
        stub = operator_pb2_grpc.OperatorServiceStub(self.clients[number].channel)
        return await stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=10)

    async def until_status(self, word: str) -> None:
        """Every gateway says so of the registry."""
        async with asyncio.timeout(LIMIT_S):
            for number in range(len(self.clients)):
                while not (await self.status(number)).registry.startswith(word):
                    await asyncio.sleep(0.02)

    async def settled(self) -> None:
        """Every page of every worker is back."""
        async with asyncio.timeout(LIMIT_S):
            for worker in self.workers.values():
                while worker.guard.free_pages != worker.guard.slots:
                    engine = worker.engine
                    evict = engine.core.evict_all if isinstance(engine, PrefillEngine) else lambda: None
                    await engine.loop.call(evict)
                    await asyncio.sleep(0.02)

    # --- requests -----------------------------------------------------------------------------------------------

    def ask_all(self, count: int = REQUESTS, tokens: int = TOKENS) -> Batch:
        batch = Batch(self.subject, self.clients, count, tokens)
        self._batches.append(batch)
        return batch

    def may_decode(self) -> bool:
        """For `before_plan` of decode workers: while `held`, requests stay after their first token, which is
        prefill's."""
        return not self.held
