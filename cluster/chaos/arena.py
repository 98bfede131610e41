"""The cluster of a chaos run: real workers and a real gateway, with what a controller would do done from here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import grpc.aio

from cluster.chaos.ports import own_ports
from cluster.chaos.worker import Switchboard, board_path
from cluster.config import with_secret
from cluster.gateway.served import ServedModel, Sources
from cluster.gateway.server import Gateway
from cluster.gateway.watch import RegistryWatch
from cluster.launch.launcher import Launcher
from cluster.launch.spec import WorkerSpec
from cluster.launch.up import specs_of
from cluster.registry.make import is_shared, registry_from
from cluster.settings import Config
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, Unavailable
from wire.clocks import now_ms
from wire.options import open_channel

READY_TIMEOUT_MS = 60_000
STATUS_TIMEOUT_S = 2.0
PORT_TRIES = 50
PORT_PAUSE_S = 0.1
PID_TRIES = 20

Place = Callable[[WorkerSpec], WorkerSpec]


@dataclass(frozen=True)
class Death:
    """A worker that nobody killed. `was_stopped`: by SIGSTOP, in this life."""

    worker_id: str
    was_stopped: bool
    detail: str


class Arena:
    """Owns launcher, workers and gateway. Workers are killed, stopped and started again by name."""

    def __init__(
        self,
        config: Config,
        launcher: Launcher,
        served: ServedModel,
        folder: str,
        report: Callable[[str], None],
        place: Place = lambda spec: spec,
    ) -> None:
        """`place` gives a spec the address where its worker shall listen."""
        self.config = with_secret(config, os.urandom)
        self._launcher = launcher
        self._served = served
        self._folder = folder
        self._report = report
        self._specs = {spec.worker_id: place(spec) for spec in specs_of(self.config)}
        self._endpoints: dict[str, str] = {}
        self._pids: dict[str, int] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._gateway: Gateway | None = None
        self._watch: RegistryWatch | None = None
        self._registered = is_shared(self.config)  # workers tell of themselves, the gateway looks there
        self._gateway_lock = asyncio.Lock()
        self._locks = {name: asyncio.Lock() for name in self._specs}
        self._doomed: set[str] = set()
        self._dead: set[str] = set()
        self._rescues: set[asyncio.Task[None]] = set()
        self._stopped: set[str] = set()  # lives that were stopped once
        self.deaths: list[Death] = []
        self.rescue_errors: list[str] = []
        self.endpoint = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._specs)

    def board(self, worker_id: str) -> Switchboard:
        return Switchboard(board_path(self._folder, worker_id))

    async def start(self) -> None:
        """Raises what the launcher or the gateway raise; `stop` cleans up then."""
        await self._launcher.open(list(self._specs.values()))
        await asyncio.gather(*(self._start_worker(spec) for spec in self._specs.values()))
        await self._start_gateway()
        await self._ready()

    async def stop(self) -> None:
        for pid in self._pids.values():  # a stopped process would not hear Ray's word
            _signal(pid, signal.SIGCONT)
        for task in tuple(self._rescues):
            task.cancel()
        await asyncio.gather(*self._rescues, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        try:
            await self._stop_gateway()
        finally:
            await self._launcher.close()

    # --- what a fault does ------------------------------------------------------------------------------------------

    async def kill(self, worker_id: str, down_s: float, pages: int = 0) -> None:
        """SIGKILL; `down_s` later another life begins, same name. `pages`: size of its pool, 0 for the configured
        one."""
        async with self._locks[worker_id]:
            self._doomed.add(worker_id)
            _signal(self._pids[worker_id], signal.SIGKILL)
            await asyncio.sleep(down_s)
            await self._revive(worker_id, pages)

    def halt(self, worker_id: str) -> None:
        """SIGSTOP."""
        self._stopped.add(worker_id)
        _signal(self._pids[worker_id], signal.SIGSTOP)

    def go_on(self, worker_id: str) -> None:
        """SIGCONT."""
        _signal(self._pids[worker_id], signal.SIGCONT)

    @property
    def dead(self) -> set[str]:
        """Workers that died by themselves and have no other life yet."""
        return set(self._dead)

    async def rescued(self) -> None:
        """Waits until every worker that died by itself has another life, or none could be begun."""
        await asyncio.gather(*self._rescues)

    async def _rescue(self, worker_id: str) -> None:
        async with self._locks[worker_id]:
            if worker_id not in self._dead:
                return
            try:
                await self._revive(worker_id, 0)
            except Exception as error:
                self.rescue_errors.append(f"{worker_id} died and did not come back: {error!r}"[:300])

    async def _revive(self, worker_id: str, pages: int) -> None:
        with contextlib.suppress(GenlockError):
            await self._launcher.kill(worker_id)
        spec = self._specs[worker_id]
        if pages:
            cache = replace(spec.config.cache, prefill_pages=pages, decode_pages=pages)
            spec = replace(spec, config=replace(spec.config, cache=cache))
        if self._gateway is not None and not self._registered:
            await self._gateway.remove_worker(worker_id)
        await self._start_worker(spec)
        async with self._gateway_lock:
            if self._gateway is not None and not self._registered:  # else the registry tells of it
                with contextlib.suppress(GenlockError):  # a gateway that came up meanwhile knows it
                    await self._gateway.remove_worker(worker_id)
                self._gateway.add_worker(worker_id, spec.role, self._endpoints[worker_id])

    async def restart_gateway(self) -> None:
        """Ends the gateway without a grace; another one comes up on the same port."""
        async with self._gateway_lock:
            await self._stop_gateway()
            await self._start_gateway()

    # --- facts ------------------------------------------------------------------------------------------------------

    async def status(self, worker_id: str) -> worker_pb2.WorkerStatus:
        """Raises grpc.aio.AioRpcError."""
        endpoint = self._endpoints[worker_id]
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = open_channel(endpoint)
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return await stub.Status(worker_pb2.WorkerStatusRequest(), timeout=STATUS_TIMEOUT_S)

    def pair_ports(self, decode_id: str, prefill_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ports whose traffic is that of this pair alone while they are on two hosts: all of the prefill worker's (only
        decode calls it), and of the decode worker's those of the transfer engine. Its gRPC port is the gateway's way.
        """
        prefill = own_ports(self._folder, prefill_id, self._pids[prefill_id])
        grpc_port = int(self._endpoints.get(decode_id, ":0").rsplit(":", 1)[1])
        return prefill, own_ports(self._folder, decode_id, self._pids[decode_id], but=(grpc_port,))

    async def not_at_baseline(self, names: Collection[str]) -> list[str]:
        """What each of these workers that is not at its baseline still holds; empty when every page is back."""

        async def look(worker_id: str) -> str:
            if worker_id not in self._endpoints:
                return f"{worker_id}: is starting"
            try:
                return unsettled(await self.status(worker_id))
            except grpc.aio.AioRpcError as error:
                return f"{worker_id}: {error.code().name}"

        found = await asyncio.gather(*(look(worker_id) for worker_id in names))
        return [text for text in found if text]

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _start_worker(self, spec: WorkerSpec) -> None:
        worker_id = spec.worker_id
        former = self._channels.pop(self._endpoints.pop(worker_id, ""), None)
        if former is not None:
            await former.close(None)
        self._endpoints[worker_id] = await self._launcher.start(spec, self._lost)
        self._pids[worker_id] = await self._pid(worker_id)
        for lives in (self._doomed, self._dead, self._stopped):
            lives.discard(worker_id)
        self._report(f"{worker_id} is up")

    async def _pid(self, worker_id: str) -> int:
        """Asks until the worker answers: a link may be cut at this moment. Raises grpc.aio.AioRpcError."""
        for _ in range(PID_TRIES):
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await self.status(worker_id)).pid
            await asyncio.sleep(PORT_PAUSE_S)
        return (await self.status(worker_id)).pid

    async def _start_gateway(self) -> None:
        port = int(self.endpoint.rsplit(":", 1)[1]) if self.endpoint else self.config.api.port
        config = replace(self.config, api=replace(self.config.api, port=port))
        for left in reversed(range(PORT_TRIES)):
            gateway = Gateway(config, self._served, Sources(now_ms=now_ms, random_bytes=os.urandom))
            try:
                self.endpoint = await gateway.start()
                break
            except Unavailable:  # the former one's port is not free yet
                await gateway.stop(0)
                if not left:
                    raise
                await asyncio.sleep(PORT_PAUSE_S)
        self._gateway = gateway
        if self._registered:
            self._watch = RegistryWatch(gateway.state, registry_from(self.config, now_ms))
            await self._watch.look()
            self._watch.start()
            return
        for worker_id, endpoint in self._endpoints.items():
            gateway.add_worker(worker_id, self._specs[worker_id].role, endpoint)

    async def _stop_gateway(self) -> None:
        gateway, self._gateway = self._gateway, None
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.stop()
        if gateway is not None:
            await gateway.stop(0)

    async def _ready(self) -> None:
        assert self._gateway is not None, "started"
        await self._gateway.wait_ready(READY_TIMEOUT_MS)

    def _lost(self, worker_id: str, detail: str) -> None:
        if worker_id not in self._doomed:
            self.deaths.append(Death(worker_id, worker_id in self._stopped, detail[:200]))
            self._report(f"{worker_id} died: {detail}")
            self._dead.add(worker_id)
            task = asyncio.ensure_future(self._rescue(worker_id))
            self._rescues.add(task)
            task.add_done_callback(self._rescues.discard)
        if self._gateway is not None:
            with contextlib.suppress(GenlockError):  # it was removed already
                self._gateway.worker_lost(worker_id, detail)


def unsettled(status: worker_pb2.WorkerStatus) -> str:
    """What a worker still holds, in words; empty at its baseline. Pages of the prefix cache are nobody's."""
    pool = status.pool
    back = pool.free + pool.cached == pool.pages
    idle = not (status.running_requests or status.waiting_requests or status.leases)
    if back and idle and not pool.quarantined:
        return ""
    return (
        f"{status.worker_id}: {pool.free} free and {pool.cached} cached of {pool.pages} pages, {pool.open} open, "
        f"{pool.quarantined} in quarantine, {status.running_requests} running, {status.waiting_requests} waiting, "
        f"{status.leases} leases"
    )


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
