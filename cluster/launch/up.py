"""A whole cluster: workers, then the gateway in front of them; stopped in the opposite order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.config import with_secret
from cluster.gateway.identity import Authenticator
from cluster.gateway.served import ServedModel, Sources, StreamChecks
from cluster.gateway.server import Gateway
from cluster.gateway.state import GatewayState
from cluster.launch.launcher import Launcher
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.settings import Config

READY_TIMEOUT_MS = 30_000


def no_report(_text: str) -> None:
    """For callers that do not want to hear."""


@dataclass(frozen=True)
class Seams:
    """What tests replace."""

    sources: Sources = field(
        default_factory=lambda: Sources(now_ms=lambda: time.monotonic() * 1000, random_bytes=os.urandom)
    )
    authenticator: Authenticator | None = None
    stream_checks: StreamChecks = field(default_factory=StreamChecks)


class Door(Protocol):
    """Another way into a gateway's request path, beside gRPC."""

    async def start(self) -> str:
        """Listens; returns the URL, "" where the configuration has it off. Raises Unavailable."""
        ...

    async def stop(self) -> None:
        """After the gateway has drained."""
        ...


class Cluster:
    """Prefill and decode workers behind one gateway."""

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        load_served: Callable[[Config], Coroutine[Any, Any, ServedModel]],
        *,
        seams: Seams | None = None,
        report: Callable[[str], None] = no_report,
        make_door: Callable[[GatewayState], Door] | None = None,
    ) -> None:
        """`report` hears, in words, of each phase and of workers that are lost. `make_door`: opens another door beside
        gRPC; `url` says where."""
        self._seams = seams or Seams()
        self.config = with_secret(config, self._seams.sources.random_bytes)
        self.launcher = launcher
        self._load_served = load_served
        self._report = report
        self._make_door = make_door
        self._door: Door | None = None
        self.url = ""
        self._gateway: Gateway | None = None
        self._worker_ids: list[str] = []

    @property
    def gateway(self) -> Gateway:
        """There once `start` has returned."""
        assert self._gateway is not None
        return self._gateway

    async def start(self) -> str:
        """Returns the gateway's endpoint when a request can be served. Whatever fails, nothing is left behind."""
        try:
            return await self._start()
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, grace_ms: int | None = None) -> None:
        """Refuses new requests, lets running ones end within the grace, then stops gateway, workers and launcher."""
        grace_ms = self.config.workers.drain_timeout_ms if grace_ms is None else grace_ms
        gateway, self._gateway = self._gateway, None
        door, self._door = self._door, None
        worker_ids, self._worker_ids = self._worker_ids, []
        try:
            try:
                if gateway is not None:
                    await gateway.stop(grace_ms)
            finally:
                if door is not None:
                    await door.stop()
            # Decode first: it releases what prefill keeps for it.
            for role in (Role.DECODE, Role.PREFILL):
                ids = [worker_id for worker_id in worker_ids if worker_id.startswith(role.value)]
                stops = (self.launcher.stop(worker_id, grace_ms) for worker_id in ids)
                await asyncio.gather(*stops, return_exceptions=True)
        finally:
            await self.launcher.close()

    async def kill_worker(self, worker_id: str) -> None:
        """Ends a worker at once, as a crash would. Raises NotFound."""
        await self.launcher.kill(worker_id)
        self._worker_ids.remove(worker_id)
        self.gateway.worker_lost(worker_id, "killed")

    async def _start(self) -> str:
        config = self.config
        specs = specs_of(config)
        self._report(f"making room for {config.workers.prefill} prefill and {config.workers.decode} decode workers")
        await self.launcher.open(specs)
        self._report(f"loading {config.model.name} in {len(specs)} workers and its tokenizer in the gateway")
        served, endpoints = await self._load_all(specs)
        gateway = Gateway(
            config,
            served,
            self._seams.sources,
            authenticator=self._seams.authenticator,
            checks=self._seams.stream_checks,
        )
        self._gateway = gateway
        endpoint = await gateway.start()
        if self._make_door is not None:
            self._door = self._make_door(gateway.state)
            self.url = await self._door.start()
        for spec, worker_endpoint in zip(specs, endpoints, strict=True):
            gateway.add_worker(spec.worker_id, spec.role, worker_endpoint)
        await gateway.wait_ready(READY_TIMEOUT_MS)
        self._report(f"serving at {endpoint}" + (f" and {self.url}" if self.url else ""))
        return endpoint

    async def _load_all(self, specs: list[WorkerSpec]) -> tuple[ServedModel, list[str]]:
        """Starts all workers and loads the tokenizer at once. The first failure cancels the others, which then remove
        what they began; it is the one that is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                served = group.create_task(self._load_served(self.config))
                starts = [group.create_task(self._start_worker(spec)) for spec in specs]
        except BaseExceptionGroup as failures:
            first: BaseException = failures
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        return served.result(), [task.result() for task in starts]

    async def _start_worker(self, spec: WorkerSpec) -> str:
        endpoint = await self.launcher.start(spec, self._lost)
        self._worker_ids.append(spec.worker_id)
        self._report(f"{spec.worker_id} is up at {endpoint}")
        return endpoint

    def _lost(self, worker_id: str, detail: str) -> None:
        self._report(f"{worker_id} is gone: {detail}")
        if self._gateway is not None:
            self._gateway.worker_lost(worker_id, detail)


def specs_of(config: Config) -> list[WorkerSpec]:
    """One spec for each configured worker, prefill first."""
    counts = ((Role.PREFILL, config.workers.prefill), (Role.DECODE, config.workers.decode))
    return [
        WorkerSpec(role, f"{role.value}-{index}", config, host=config.workers.host)
        for role, count in counts
        for index in range(count)
    ]
