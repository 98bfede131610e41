"""Workers as Ray actors, one placement group each. Ray places, supervises and cleans up; requests and pages never
pass through it. A dead actor is not restarted by Ray: who restarts, and when, is a decision of the cluster.

On a Ray of our own everything goes with this process. On one that was there already, workers are detached actors named
in a namespace: they outlive the process that started them, and a later one adopts them.

Ray is blocking, so all calls to it run on one thread of our own; only awaiting results happens on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.launch.launcher import Adopted, NodeFacts, OnLost, ignore_loss, start_timeout, unknown_worker
from cluster.launch.logs import start_logging
from cluster.launch.ray_place import (
    Supply,
    demand_of,
    first_without,
    labels_of,
    no_place,
    places,
    selector_of,
    supplies,
)
from cluster.launch.ray_session import RaySession, cause, first_line
from cluster.launch.spec import WorkerBuilder, WorkerSpec
from cluster.roles import Role
from cluster.settings import ControlConfig
from kvstore.errors import GenlockError, NoCapacity, Unavailable
from wire.errors import surprise

T = TypeVar("T")
log = logging.getLogger(__name__)

# Beyond a worker's own grace: its server's and engine's closing.
STOP_MARGIN_MS = 15_000
PLACE_POLL_S = 0.05
# One question to Ray whether a place is there; too short a one is never answered on a busy host.
PLACE_ASK_S = 0.5
# How long a live actor may take to say where it is.
WHERE_S = 10.0
NAME = re.compile(r"(prefill|decode)-\d{1,9}")


class WorkerActor:
    """Lives in the actor's process. Its errors travel as values, for Ray would wrap what it cannot unpickle."""

    def __init__(self, spec: WorkerSpec, builder: WorkerBuilder) -> None:
        self._spec = spec
        self._worker = builder(spec)
        self._endpoint = ""

    async def start(self) -> str | GenlockError:
        try:
            start_logging(self._spec.config.log, self._spec.worker_id)
            self._endpoint = await self._worker.start()
        except GenlockError as error:
            await self._worker.stop(0)
            return error
        return self._endpoint

    async def where(self) -> tuple[str, str]:
        """Its endpoint, "" while it starts, and Ray's id of the node."""
        return self._endpoint, importlib.import_module("ray").get_runtime_context().get_node_id()

    async def stop(self, grace_ms: int) -> None:
        await self._worker.stop(grace_ms)

    async def until_the_end(self) -> None:
        """Never returns: the caller learns of this process's end."""
        await asyncio.Event().wait()


@dataclass
class _Started:
    actor: Any
    group: Any
    node_id: str = ""
    watch: asyncio.Task[None] | None = None


class RayLauncher:
    """On an isolated local Ray of its own, which it removes at the end, or on the one that `control` names."""

    def __init__(
        self,
        builder: WorkerBuilder,
        *,
        cpus: float | None = None,
        host: str = "127.0.0.1",
        control: ControlConfig | None = None,
    ) -> None:
        """`cpus`: what a Ray of our own may hand out; by default the CPUs that this process may use. `host`: address of
        its node."""
        control = control or ControlConfig()
        self._builder = builder
        self._cpus = float(len(os.sched_getaffinity(0))) if cpus is None else cpus
        self._host = host
        self._place_s = control.place_timeout_ms / 1000
        self._session = RaySession(control.ray_address, control.ray_namespace)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._started: dict[str, _Started] = {}
        self._closed = False

    @property
    def _ray(self) -> Any:
        return self._session.ray

    async def open(self, specs: list[WorkerSpec]) -> None:
        demand = sum(spec.config.workers.cpus for spec in specs)
        if self._session.local and demand > self._cpus + 1e-9:
            each = specs[0].config.workers.cpus
            raise NoCapacity(
                "too_few_cpus",
                f"{len(specs)} workers need {demand:g} CPUs ({each:g} each), this host offers {self._cpus:g}: "
                "start fewer workers or lower workers.cpus",
                field="workers.cpus",
            )
        await self._call(self._open)

    async def start(self, spec: WorkerSpec, on_lost: OnLost = ignore_loss) -> str:
        group = await self._place(spec)
        started = self._started[spec.worker_id] = _Started(None, group)
        timeout_ms = spec.config.workers.start_timeout_ms
        try:
            started.actor = await self._make(spec, group)
            async with asyncio.timeout(timeout_ms / 1000):
                endpoint = await started.actor.start.remote()
                _endpoint, started.node_id = await started.actor.where.remote()
            if isinstance(endpoint, GenlockError):
                raise endpoint
        except BaseException as exc:
            await self._remove(spec.worker_id)
            if isinstance(exc, TimeoutError):
                raise start_timeout(spec.worker_id, timeout_ms) from exc
            if isinstance(exc, self._ray.exceptions.RayError):
                raise Unavailable("worker_died", f"{spec.worker_id} died at its start: {cause(exc)}") from exc
            raise
        self._begin_watch(spec.worker_id, started, on_lost)
        return str(endpoint)

    async def stop(self, worker_id: str, grace_ms: int) -> None:
        started = self._get(worker_id)
        self._unwatch(started)
        try:
            async with asyncio.timeout((grace_ms + STOP_MARGIN_MS) / 1000):
                await started.actor.stop.remote(grace_ms)
        except TimeoutError:
            log.warning("%s did not stop in time and is ended", worker_id)
        except self._ray.exceptions.RayError as exc:
            log.warning("%s had died: %s", worker_id, first_line(exc))
        finally:
            await self._remove(worker_id)

    async def kill(self, worker_id: str) -> None:
        self._unwatch(self._get(worker_id))
        await self._remove(worker_id)

    async def adopt(self, on_lost: OnLost) -> list[Adopted]:
        """One that had not finished its start is ended: nobody was served by it."""
        names = [name for name in await self._call(self._names) if NAME.fullmatch(name) and name not in self._started]
        found = await asyncio.gather(*(self._adopt(name, on_lost) for name in names))
        return [adopted for adopted in found if adopted is not None]

    async def check_room(self, specs: list[WorkerSpec]) -> None:
        nodes = await self._call(self._nodes)
        spec = specs[0]
        demand, labels = self._bundle(spec), labels_of(spec.config.workers)
        room = places(demand, labels, [supply for supply in nodes if supply.node_id not in spec.avoid])
        if room < len(specs):
            free = await self._call(self._ray.available_resources)
            why = f"{len(specs)} such workers are wanted in all, {room} have a place."
            who = first_without([spec.worker_id for spec in specs], room, self._started)
            raise no_place(who, demand, labels, nodes, free, why, spec.avoid)

    async def node_of(self, worker_id: str) -> tuple[str, str]:
        node_id = self._get(worker_id).node_id
        nodes = await self._call(self._nodes)
        return next((supply.node for supply in nodes if supply.node_id == node_id), node_id[:12]), self._told_id(
            node_id
        )

    async def nodes(self) -> list[NodeFacts]:
        nodes, free = await self._call(lambda: (self._nodes(), self._free_by_node()))
        workers = {name: started.node_id for name, started in self._started.items()}

        def left(supply: Supply, key: str) -> float:
            return float(free.get(supply.node_id, {}).get(key, 0.0))

        return [
            NodeFacts(
                supply.node, supply.alive, supply.total.get("CPU", 0.0), left(supply, "CPU"),
                supply.total.get("GPU", 0.0), left(supply, "GPU"),
                tuple(sorted(name for name, node_id in workers.items() if node_id == supply.node_id)),
                self._told_id(supply.node_id),
            )
            for supply in nodes
        ]  # fmt: skip

    async def close(self) -> None:
        """Ends the workers too."""
        if self._closed:
            return
        self._closed = True
        for started in self._started.values():
            self._unwatch(started)
        if not self._session.local:
            for worker_id in list(self._started):
                await self._remove(worker_id)
        self._started.clear()
        await self._call(self._session.close)
        self._thread.shutdown(wait=True)

    # --- on the event loop ------------------------------------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T:
        """Runs blocking work of Ray to its end, also when the caller is cancelled: half-done work would be lost track
        of."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await future
            raise

    async def _place(self, spec: WorkerSpec) -> Any:
        """A placement group for one worker. Raises NoCapacity (`no_place`) when there is none in time; nothing is left
        then."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._place_s
        group = await self._call(lambda: self._make_group(spec))
        try:
            while not await self._call(lambda: group.wait(PLACE_ASK_S)):
                if loop.time() >= deadline:
                    raise await self._call(lambda: self._no_place(spec))
                await asyncio.sleep(PLACE_POLL_S)
        except BaseException:
            await self._call(lambda: self._remove_group(group))
            raise
        return group

    async def _make(self, spec: WorkerSpec, group: Any) -> Any:
        """The actor. A former life that still has the name is ended; Ray gives the name back a little later."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._place_s
        while True:
            try:
                return await self._call(lambda: self._make_actor(spec, group))
            except ValueError as exc:
                if loop.time() >= deadline:
                    raise Unavailable(
                        "name_taken", f"{spec.worker_id} still runs elsewhere: {first_line(exc)}"
                    ) from exc
                await self._call(lambda: self._kill_named(spec.worker_id))
                await asyncio.sleep(PLACE_POLL_S)

    async def _adopt(self, name: str, on_lost: OnLost) -> Adopted | None:
        try:
            started = await self._call(lambda: self._named(name))
            async with asyncio.timeout(WHERE_S):
                endpoint, started.node_id = await started.actor.where.remote()
        except TimeoutError:
            endpoint = ""  # it may serve all the same: its start's deadline decides
        except (ValueError, self._ray.exceptions.RayError):
            return None
        else:
            if not endpoint:
                await self._call(lambda: self._end(started))
                return None
        self._started[name] = started
        self._begin_watch(name, started, on_lost)
        return Adopted(name, Role(name.split("-")[0]), endpoint, *await self.node_of(name))

    def _begin_watch(self, worker_id: str, started: _Started, on_lost: OnLost) -> None:
        started.watch = asyncio.create_task(self._watch(worker_id, started, on_lost), name=f"watch {worker_id}")

    async def _watch(self, worker_id: str, started: _Started, on_lost: OnLost) -> None:
        try:
            await started.actor.until_the_end.remote()
        except self._ray.exceptions.RayError as exc:
            await self._remove(worker_id, unless=started)
            on_lost(worker_id, f"its process ended: {first_line(exc)}")
        except Exception as unexpected:
            # Whether the worker lives is asked of itself again and again.
            surprise(unexpected, f"the watch over {worker_id}")

    async def _remove(self, worker_id: str, unless: _Started | None = None) -> None:
        """Ends actor and group. `unless`: only this one, not a later life of the name; its watch is the caller."""
        started = self._started.get(worker_id)
        if started is None or (unless is not None and started is not unless):
            return
        del self._started[worker_id]
        if unless is None:
            self._unwatch(started)
        await self._call(lambda: self._end(started))

    def _unwatch(self, started: _Started) -> None:
        if started.watch is not None:
            started.watch.cancel()

    def _told_id(self, node_id: str) -> str:
        """A Ray of our own has one node: a worker that may not go there could go nowhere."""
        return "" if self._session.local else node_id

    def _get(self, worker_id: str) -> _Started:
        try:
            return self._started[worker_id]
        except KeyError:
            raise unknown_worker(worker_id, self._started) from None

    # --- on Ray's thread --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._session.open(cpus=self._cpus, host=self._host, resources=self._resources())

    def _resources(self) -> dict[str, float]:
        """What this node offers beside CPUs."""
        return {}

    def _bundle(self, spec: WorkerSpec) -> dict[str, float]:
        """What a worker needs of its node."""
        return demand_of(spec.config.workers)

    def _make_group(self, spec: WorkerSpec) -> Any:
        groups = importlib.import_module("ray.util.placement_group")
        selector = selector_of(labels_of(spec.config.workers), spec.avoid, self._nodes() if spec.avoid else ())
        return groups.placement_group(
            [self._bundle(spec)],
            strategy="STRICT_PACK",
            name=self._group_name(spec.worker_id),
            lifetime=None if self._session.local else "detached",
            bundle_label_selector=[selector] if selector else None,
        )

    def _make_actor(self, spec: WorkerSpec, group: Any) -> Any:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        bundle = self._bundle(spec)
        return (
            self._ray.remote(WorkerActor)
            .options(
                num_cpus=bundle.get("CPU", 0.0),
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=0,
                max_task_retries=0,
                name=spec.worker_id,
                namespace=self._session.namespace,
                lifetime=None if self._session.local else "detached",
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group),
            )
            .remote(spec, self._builder)
        )

    def _no_place(self, spec: WorkerSpec) -> NoCapacity:
        why = f"Waited {self._place_s:g} s: free some, or lower what a worker needs."
        return no_place(
            spec.worker_id, self._bundle(spec), labels_of(spec.config.workers), self._nodes(),
            self._ray.available_resources(), why, spec.avoid,
        )  # fmt: skip

    def _nodes(self) -> tuple[Supply, ...]:
        return supplies(self._ray.nodes())

    def _free_by_node(self) -> dict[str, dict[str, float]]:
        # Ray's public answer is a sum over all nodes; the state API by node needs the dashboard.
        state = importlib.import_module("ray._private.state")
        return dict(state.available_resources_per_node())

    def _names(self) -> list[str]:
        if self._session.local:
            return []
        return list(importlib.import_module("ray.util").list_named_actors())

    def _named(self, name: str) -> _Started:
        """Raises ValueError where there is no such actor any more."""
        groups = importlib.import_module("ray.util.placement_group")
        actor = self._ray.get_actor(name, namespace=self._session.namespace)
        try:
            group = groups.get_placement_group(self._group_name(name))
        except ValueError:
            group = None  # somebody removed it by hand; the actor ends with it or goes on
        return _Started(actor, group)

    def _group_name(self, worker_id: str) -> str:
        return f"{self._session.namespace}:{worker_id}"

    def _kill_named(self, name: str) -> None:
        with contextlib.suppress(ValueError):
            self._end(self._named(name), keep_group=True)

    def _end(self, started: _Started, *, keep_group: bool = False) -> None:
        if started.actor is not None:
            with contextlib.suppress(Exception):
                self._ray.kill(started.actor, no_restart=True)
        if started.group is not None and not keep_group:
            self._remove_group(started.group)

    def _remove_group(self, group: Any) -> None:
        groups = importlib.import_module("ray.util.placement_group")
        with contextlib.suppress(Exception):
            groups.remove_placement_group(group)
