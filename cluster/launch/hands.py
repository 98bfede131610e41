"""The controller's hands on a launcher: which spec a worker of a name gets, and how settings become its policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.control.api import NodeRow
from cluster.control.asker import GrpcAsker
from cluster.control.controller import Controller
from cluster.control.hands import OnLost, Place, Room
from cluster.control.state import Found, Policy
from cluster.control.times import Clocks, Times
from cluster.launch.launcher import Launcher
from cluster.launch.spec import WorkerSpec
from cluster.registry.base import Registry
from cluster.registry.make import is_shared
from cluster.roles import Role
from cluster.settings import Config
from cluster.tls import dialer_of
from wire.clocks import now_ms, unix_ms


def spec_of(config: Config, role: Role, worker_id: str, avoid: frozenset[str] = frozenset()) -> WorkerSpec:
    """`config` carries the cluster secret. `{role}` in the workers' resources and labels becomes this worker's role."""
    own = {name: getattr(config.workers, name).replace("{role}", role.value) for name in ("resources", "labels")}
    config = replace(config, workers=replace(config.workers, **own))
    return WorkerSpec(role, worker_id, config, host=config.workers.host, avoid=avoid)


class LauncherHands:
    """Workers as a launcher starts them. `also_lost` hears of each end that nobody asked for."""

    def __init__(self, config: Config, launcher: Launcher, also_lost: OnLost) -> None:
        self._config = config
        self._launcher = launcher
        self._also_lost = also_lost

    async def start(self, worker_id: str, role: Role, on_lost: OnLost, avoid: frozenset[str] = frozenset()) -> Place:
        spec = spec_of(self._config, role, worker_id, avoid)
        endpoint = await self._launcher.start(spec, self._both(on_lost))
        return Place(endpoint, *await self._launcher.node_of(worker_id))

    async def stop(self, worker_id: str) -> None:
        await self._launcher.stop(worker_id, 0)

    async def kill(self, worker_id: str) -> None:
        await self._launcher.kill(worker_id)

    async def adopt(self, on_lost: OnLost) -> Sequence[Found]:
        return [
            Found(one.worker_id, one.role, one.endpoint, node=one.node, node_id=one.node_id)
            for one in await self._launcher.adopt(self._both(on_lost))
        ]

    async def check_room(self, counts: dict[Role, int], avoid: frozenset[str] = frozenset()) -> None:
        specs = [
            spec_of(self._config, role, f"{role.value}-{index}", avoid) for role, count in counts.items()
            for index in range(count)
        ]  # fmt: skip
        # Workers that may go to the same nodes are counted together.
        kinds: dict[tuple[str, str], list[WorkerSpec]] = {}
        for spec in specs:
            kinds.setdefault((spec.config.workers.resources, spec.config.workers.labels), []).append(spec)
        for kind in kinds.values():
            await self._launcher.check_room(kind)

    async def nodes(self) -> Sequence[NodeRow]:
        return [
            NodeRow(
                node.node, node.alive, node.cpus, node.cpus_free, node.gpus, node.gpus_free, node.workers, node.node_id
            )
            for node in await self._launcher.nodes()
        ]

    def _both(self, on_lost: OnLost) -> OnLost:
        def lost(worker_id: str, detail: str) -> None:
            on_lost(worker_id, detail)
            self._also_lost(worker_id, detail)

        return lost


def policy_of(config: Config) -> Policy:
    workers, control = config.workers, config.control
    return Policy(
        start_ms=workers.start_timeout_ms,
        drain_ms=workers.drain_timeout_ms,
        open_ms=control.drain_open_ms,
        stop_ms=control.stop_timeout_ms,
        backoff_ms=control.backoff_ms,
        backoff_cap_ms=control.backoff_cap_ms,
        healthy_ms=control.healthy_ms,
        stall_ms=workers.stall_ms,
        kill_ms=control.kill_ms,
        surge=control.surge,
        restart=control.restart,
    )


def make_controller(config: Config, registry: Registry, hands: LauncherHands, room: Room | None = None) -> Controller:
    """Not started. Where the registry is this process's own, the controller tells it of the workers. `room`: the nodes,
    where the controller owns them."""
    workers, control = config.workers, config.control
    times = Times(
        reconcile_ms=control.reconcile_ms,
        poll_ms=workers.status_poll_ms,
        poll_timeout_ms=workers.status_timeout_ms,
        feed_ttl_ms=0 if is_shared(config) else config.registry.ttl_ms,
        room_ms=config.kube.sync_ms,
    )
    clocks = Clocks(now_ms, unix_ms)
    seed = (workers.prefill, workers.decode)
    return Controller(policy_of(config), times, registry, hands, GrpcAsker(dialer_of(config.tls)), clocks, seed, room)
