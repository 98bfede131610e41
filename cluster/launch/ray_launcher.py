"""Workers as Ray actors, one placement group each. Ray places, supervises and cleans up; requests and pages never
pass through it. A dead actor is not restarted by Ray: who restarts, and when, is a decision of the cluster.

Ray is blocking, so all calls to it run on one thread of our own; only awaiting results happens on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cluster.launch.launcher import OnLost, ignore_loss, start_timeout, unknown_worker
from cluster.launch.logs import start_logging
from cluster.launch.spec import WorkerBuilder, WorkerSpec
from kvstore.errors import GenlockError, NoCapacity, Unavailable

T = TypeVar("T")
log = logging.getLogger(__name__)

# No objects travel through the store; this is the least that Ray accepts, with some air.
OBJECT_STORE_BYTES = 80 << 20
PLACEMENT_TIMEOUT_S = 10.0
# Beyond a worker's own grace: its server's and engine's closing.
STOP_MARGIN_MS = 15_000
# Ray reads these from the environment alone: no telemetry, no token file in the home folder, loopback only, no
# memory monitor that would kill workers of its choice.
RAY_ENVIRONMENT = (
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_AUTH_MODE", "disabled"),
    ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
    ("RAY_memory_monitor_refresh_ms", "0"),
    ("RAY_DEDUP_LOGS", "0"),
    ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
)


class WorkerActor:
    """Lives in the actor's process. Its errors travel as values, for Ray would wrap what it cannot unpickle."""

    def __init__(self, spec: WorkerSpec, builder: WorkerBuilder) -> None:
        self._spec = spec
        self._worker = builder(spec)

    async def start(self) -> str | GenlockError:
        try:
            start_logging(self._spec.config.log, self._spec.worker_id)
            return await self._worker.start()
        except GenlockError as error:
            await self._worker.stop(0)
            return error

    async def stop(self, grace_ms: int) -> None:
        await self._worker.stop(grace_ms)

    async def until_the_end(self) -> None:
        """Never returns: the caller learns of this process's end."""
        await asyncio.Event().wait()


@dataclass
class _Started:
    actor: Any
    group: Any
    watch: asyncio.Task[None] | None = None


class RayLauncher:
    """Starts an isolated local Ray of its own and removes it at the end."""

    def __init__(self, builder: WorkerBuilder, *, cpus: float | None = None, host: str = "127.0.0.1") -> None:
        """`cpus`: what Ray may hand out; by default the CPUs that this process may use. `host`: address of the node."""
        self._builder = builder
        self._cpus = float(len(os.sched_getaffinity(0))) if cpus is None else cpus
        self._host = host
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._started: dict[str, _Started] = {}
        self._folder: Path | None = None
        self._ray: Any = None
        self._closed = False

    async def open(self, specs: list[WorkerSpec]) -> None:
        demand = sum(spec.config.workers.cpus for spec in specs)
        if demand > self._cpus + 1e-9:
            each = specs[0].config.workers.cpus
            raise NoCapacity(
                "too_few_cpus",
                f"{len(specs)} workers need {demand:g} CPUs ({each:g} each), this host offers {self._cpus:g}: "
                "start fewer workers or lower workers.cpus",
                field="workers.cpus",
            )
        await self._call(self._open)

    async def start(self, spec: WorkerSpec, on_lost: OnLost = ignore_loss) -> str:
        started = await self._call(lambda: self._place(spec))
        self._started[spec.worker_id] = started
        timeout_ms = spec.config.workers.start_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                endpoint = await started.actor.start.remote()
            if isinstance(endpoint, GenlockError):
                raise endpoint
        except BaseException as exc:
            await self._remove(spec.worker_id)
            if isinstance(exc, TimeoutError):
                raise start_timeout(spec.worker_id, timeout_ms) from exc
            if isinstance(exc, self._ray.exceptions.RayError):
                raise Unavailable("worker_died", f"{spec.worker_id} died at its start: {_cause(exc)}") from exc
            raise
        started.watch = asyncio.create_task(
            self._watch(spec.worker_id, started, on_lost), name=f"watch {spec.worker_id}"
        )
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
            log.warning("%s had died: %s", worker_id, _first_line(exc))
        finally:
            await self._remove(worker_id)

    async def kill(self, worker_id: str) -> None:
        self._unwatch(self._get(worker_id))
        await self._remove(worker_id)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for started in self._started.values():
            self._unwatch(started)
        self._started.clear()
        await self._call(self._close)
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

    async def _watch(self, worker_id: str, started: _Started, on_lost: OnLost) -> None:
        try:
            await started.actor.until_the_end.remote()
        except self._ray.exceptions.RayError as exc:
            on_lost(worker_id, f"its process ended: {_first_line(exc)}")

    async def _remove(self, worker_id: str) -> None:
        started = self._started.pop(worker_id, None)
        if started is not None:
            self._unwatch(started)
            await self._call(lambda: self._end(started))

    def _unwatch(self, started: _Started) -> None:
        if started.watch is not None:
            started.watch.cancel()

    def _get(self, worker_id: str) -> _Started:
        try:
            return self._started[worker_id]
        except KeyError:
            raise unknown_worker(worker_id, self._started) from None

    # --- on Ray's thread --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        with _environment(RAY_ENVIRONMENT):
            ray = importlib.import_module("ray")
            if ray.is_initialized():
                raise Unavailable("ray_in_use", "this process is already connected to a Ray cluster")
            self._ray = ray
            # Short: the path of a Unix socket has at most 107 bytes.
            self._folder = Path(tempfile.mkdtemp(prefix="genlock-"))
            try:
                ray.init(
                    address="local",
                    num_cpus=self._cpus,
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _node_ip_address=self._host,
                    resources=self._resources(),
                    _temp_dir=str(self._folder),
                )
            except Exception as exc:
                raise Unavailable("ray_failed", f"Ray did not start: {_first_line(exc)}") from exc

    def _resources(self) -> dict[str, float]:
        """What this node offers beside CPUs."""
        return {}

    def _bundle(self, spec: WorkerSpec) -> dict[str, float]:
        """What a worker needs of its node."""
        return {"CPU": spec.config.workers.cpus}

    def _place(self, spec: WorkerSpec) -> _Started:
        groups = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        cpus = spec.config.workers.cpus
        group = groups.placement_group([self._bundle(spec)], strategy="STRICT_PACK", name=spec.worker_id)
        if not group.wait(PLACEMENT_TIMEOUT_S):
            free = self._ray.available_resources().get("CPU", 0.0)
            groups.remove_placement_group(group)
            raise NoCapacity(
                "no_place",
                f"no place for {spec.worker_id}: it needs {cpus:g} CPUs, {free:g} of {self._cpus:g} are free",
                field="workers.cpus",
            )
        actor = (
            self._ray.remote(WorkerActor)
            .options(
                num_cpus=cpus,
                max_restarts=0,
                max_task_retries=0,
                name=spec.worker_id,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(group),
            )
            .remote(spec, self._builder)
        )
        return _Started(actor, group)

    def _end(self, started: _Started) -> None:
        groups = importlib.import_module("ray.util.placement_group")
        with contextlib.suppress(Exception):
            self._ray.kill(started.actor, no_restart=True)
        with contextlib.suppress(Exception):
            groups.remove_placement_group(started.group)

    def _close(self) -> None:
        if self._ray is not None:
            self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


@contextlib.contextmanager
def _environment(values: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Sets variables for a while; processes that are started inside keep them."""
    before = {name: os.environ.get(name) for name, _value in values}
    os.environ.update(dict(values))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cause(exc: BaseException) -> str:
    """Ray quotes the other process's traceback; its last line says what it was."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if any("Traceback" in line or line.startswith('File "') for line in lines):
        return lines[-1][:300]
    return _first_line(exc)


def _first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(exc).__name__
