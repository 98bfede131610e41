"""A whole cluster: workers, the gateway in front of them, the controller behind; stopped in the opposite order.

The first start is all or nothing, and its failure is the caller's. From then on the controller keeps the fleet as it is
wanted: a worker that dies comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.config import with_secret
from cluster.control.arrivals import Arrivals
from cluster.control.controller import Controller
from cluster.control.metrics import ControllerCollector, read_controller
from cluster.control.operations import Operations
from cluster.control.scaling import PolicyScaler
from cluster.control.state import Ended, Found, State
from cluster.gateway.served import ServedModel
from cluster.gateway.server import Gateway
from cluster.gateway.state import GatewayState
from cluster.gateway.watch import RegistryWatch
from cluster.launch.doors import Door, Doors, Seams
from cluster.launch.hands import LauncherHands, make_controller, spec_of
from cluster.launch.launcher import Launcher
from cluster.launch.spec import WorkerSpec
from cluster.operators.fleet import FleetOperations
from cluster.operators.service import LocalBackend
from cluster.registry.base import Registry
from cluster.registry.make import registry_from
from cluster.roles import Role
from cluster.settings import Config
from kvstore.errors import NotFound
from wire.clocks import unix_ms

READY_TIMEOUT_MS = 30_000


def no_report(_text: str) -> None:
    """For callers that do not want to hear."""


class Cluster:
    """Prefill and decode workers behind one gateway, kept by one controller."""

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
        self._doors = Doors(self.config, self._seams, make_door)
        self._controller: Controller | None = None
        self._operations: Operations | None = None
        self._watch: RegistryWatch | None = None
        self._worker_ids: list[str] = []
        # Ends of workers that came before there was a controller to tell.
        self._early: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        """Of the door beside gRPC; "" where there is none."""
        return self._doors.url

    @property
    def gateway(self) -> Gateway:
        """There once `start` has returned."""
        assert self._doors.gateway is not None
        return self._doors.gateway

    @property
    def operations(self) -> Operations:
        """What operators may ask of the fleet. There once `start` has returned."""
        assert self._operations is not None
        return self._operations

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
        try:
            try:
                await self._doors.close(grace_ms)
            finally:
                worker_ids = await self._stop_control()
            # Decode first: it releases what prefill keeps for it.
            for role in (Role.DECODE, Role.PREFILL):
                ids = [worker_id for worker_id in worker_ids if worker_id.startswith(role.value)]
                stops = (self.launcher.stop(worker_id, grace_ms) for worker_id in ids)
                await asyncio.gather(*stops, return_exceptions=True)
        finally:
            await self.launcher.close()

    async def kill_worker(self, worker_id: str) -> None:
        """Ends a worker at once, as a crash would. Raises NotFound."""
        controller = self._controller
        assert controller is not None, "started"
        life = controller.row(worker_id).life
        await self.launcher.kill(worker_id)
        self._tell_gateway(worker_id, "killed")
        controller.hear(Ended(worker_id, life, "killed"))

    async def _start(self) -> str:
        config = self.config
        specs = specs_of(config)
        self._doors.check()
        self._report(f"making room for {config.workers.prefill} prefill and {config.workers.decode} decode workers")
        await self.launcher.open(specs)
        self._report(f"loading {config.model.name} in {len(specs)} workers and its tokenizer in the gateway")
        served, endpoints = await self._load_all(specs)
        gateway, endpoint = await self._doors.open(served)
        for spec, worker_endpoint in zip(specs, endpoints, strict=True):
            gateway.add_worker(spec.worker_id, spec.role, worker_endpoint)
        await gateway.wait_ready(READY_TIMEOUT_MS)
        await self._start_control(gateway, specs, endpoints)
        self._report(f"serving at {endpoint}" + (f" and {self.url}" if self.url else ""))
        return endpoint

    async def _start_control(self, gateway: Gateway, specs: list[WorkerSpec], endpoints: list[str]) -> None:
        """From here on the controller owns the workers, and the gateway follows its registry."""
        registry: Registry = registry_from(self.config, self._seams.sources.now_ms)
        controller = make_controller(self.config, registry, LauncherHands(self.config, self.launcher, self._lost))
        controller.on_change = self._follow
        found = [
            Found(spec.worker_id, spec.role, endpoint, node=node, node_id=node_id)
            for spec, endpoint in zip(specs, endpoints, strict=True)
            for node, node_id in [await self.launcher.node_of(spec.worker_id)]
        ]
        self._controller = controller
        await controller.start(found)
        await controller.turned(lambda state: len(state.rows) >= len(found), READY_TIMEOUT_MS)
        early, self._early = self._early, []
        for worker_id, detail in early:
            self._tell_end(worker_id, detail)
        scaler = PolicyScaler(unix_ms, Arrivals(registry).since_last)
        operations = self._operations = Operations(controller, scaler, self.config.control.autoscale_ms)
        gateway.state.metrics.registry.register(ControllerCollector(lambda: read_controller(controller, operations)))
        operations.start()
        gateway.state.backend = LocalBackend(FleetOperations(operations, unix_ms))
        self._watch = RegistryWatch(gateway.state, registry, unix_ms)
        self._watch.start()

    async def _stop_control(self) -> list[str]:
        """Ends watch and controller. Returns the workers that there may still be."""
        watch, self._watch = self._watch, None
        operations, self._operations = self._operations, None
        controller, self._controller = self._controller, None
        worker_ids, self._worker_ids = self._worker_ids, []
        if watch is not None:
            await watch.stop()
        if operations is not None:
            await operations.stop()
        if controller is not None:
            await controller.stop()
            worker_ids = [row.worker_id for row in controller.state.rows.values() if row.alive]
        return worker_ids

    def _follow(self, before: State, after: State) -> None:
        """The gateway hears of a new place at once; of cordons and of those that left it reads in the registry."""
        gateway = self._doors.gateway
        for row in after.rows.values():
            known = before.rows.get(row.worker_id)
            if gateway is None or not row.endpoint or (known is not None and known.endpoint == row.endpoint):
                continue
            routed = gateway.state.fleet.workers.get(row.worker_id)
            if routed is None or routed.endpoint != row.endpoint:
                self._report(f"{row.worker_id} is up at {row.endpoint}")
                gateway.add_worker(row.worker_id, row.role, row.endpoint)

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
        endpoint = await self.launcher.start(spec, self._first_lost)
        self._worker_ids.append(spec.worker_id)
        self._report(f"{spec.worker_id} is up at {endpoint}")
        return endpoint

    def _lost(self, worker_id: str, detail: str) -> None:
        self._report(f"{worker_id} is gone: {detail}")
        self._tell_gateway(worker_id, detail)

    def _tell_gateway(self, worker_id: str, detail: str) -> None:
        """The gateway may have dropped the worker already: it did not answer, and the registry had forgotten it."""
        gateway = self._doors.gateway
        if gateway is not None:
            with contextlib.suppress(NotFound):
                gateway.worker_lost(worker_id, detail)

    def _first_lost(self, worker_id: str, detail: str) -> None:
        """The end of a worker of the first start."""
        self._lost(worker_id, detail)
        self._tell_end(worker_id, detail)

    def _tell_end(self, worker_id: str, detail: str) -> None:
        controller = self._controller
        if controller is None or worker_id not in controller.state.rows:
            self._early.append((worker_id, detail))
        else:
            controller.hear(Ended(worker_id, controller.row(worker_id).life, detail))


def specs_of(config: Config) -> list[WorkerSpec]:
    """One spec for each configured worker, prefill first."""
    counts = ((Role.PREFILL, config.workers.prefill), (Role.DECODE, config.workers.decode))
    return [spec_of(config, role, f"{role.value}-{index}") for role, count in counts for index in range(count)]
