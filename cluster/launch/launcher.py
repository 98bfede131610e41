"""How workers come to life: one interface, in this process or as Ray actors."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.launch.spec import Worker, WorkerBuilder, WorkerSpec
from cluster.roles import Role
from kvstore.errors import DeadlineExceeded, NotFound

# Called with the worker's id and what is known about its end; never for a worker that was asked to stop.
OnLost = Callable[[str, str], None]


def ignore_loss(_worker_id: str, _detail: str) -> None:
    """For callers that find out by themselves."""


@dataclass(frozen=True)
class Adopted:
    """A live worker that this launcher had not started itself. `endpoint` "": it is still starting."""

    worker_id: str
    role: Role
    endpoint: str
    node: str = ""
    node_id: str = ""


@dataclass(frozen=True)
class NodeFacts:
    node: str
    alive: bool
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float
    workers: tuple[str, ...]
    node_id: str = ""


class Launcher(Protocol):
    """Owns the workers that it started. `close` ends and removes everything, also after a failure half way."""

    async def open(self, specs: list[WorkerSpec]) -> None:
        """Makes room for these workers. Raises NoCapacity (`too_few_cpus`) naming demand and supply."""
        ...

    async def start(self, spec: WorkerSpec, on_lost: OnLost = ignore_loss) -> str:
        """Starts one worker and returns its endpoint. Raises DeadlineExceeded (`start_timeout`), NoCapacity, or what
        the worker's start raised; nothing of the worker is left then."""
        ...

    async def stop(self, worker_id: str, grace_ms: int) -> None:
        """Drains for at most `grace_ms`, then ends the worker. Raises NotFound."""
        ...

    async def kill(self, worker_id: str) -> None:
        """Ends the worker at once. Raises NotFound."""
        ...

    async def adopt(self, on_lost: OnLost) -> list[Adopted]:
        """Takes over live workers of this cluster that an earlier process started."""
        ...

    async def check_room(self, specs: list[WorkerSpec]) -> None:
        """Raises NoCapacity (`no_place`) naming demand and supply where these could never all have a
        place."""
        ...

    async def node_of(self, worker_id: str) -> tuple[str, str]:
        """Name and id of the node that a started worker is on; "" where that is not known."""
        ...

    async def nodes(self) -> list[NodeFacts]: ...

    async def close(self) -> None: ...


class InProcessLauncher:
    """Workers as objects of this process, on this event loop: for tests and for looking at them."""

    def __init__(self, builder: WorkerBuilder) -> None:
        self._builder = builder
        self.workers: dict[str, Worker] = {}

    async def open(self, specs: list[WorkerSpec]) -> None:
        return None

    async def start(self, spec: WorkerSpec, on_lost: OnLost = ignore_loss) -> str:
        worker = self._builder(spec)
        self.workers[spec.worker_id] = worker
        timeout_ms = spec.config.workers.start_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await worker.start()
        except BaseException as exc:
            del self.workers[spec.worker_id]
            await worker.stop(0)
            if isinstance(exc, TimeoutError):
                raise start_timeout(spec.worker_id, timeout_ms) from exc
            raise

    async def stop(self, worker_id: str, grace_ms: int) -> None:
        await self._pop(worker_id).stop(grace_ms)

    async def kill(self, worker_id: str) -> None:
        await self._pop(worker_id).stop(0)

    async def adopt(self, on_lost: OnLost) -> list[Adopted]:
        return []

    async def check_room(self, specs: list[WorkerSpec]) -> None:
        return None

    async def node_of(self, worker_id: str) -> tuple[str, str]:
        # No id: there is no other node that a worker could be placed on.
        return socket.gethostname(), ""

    async def nodes(self) -> list[NodeFacts]:
        cpus = float(len(os.sched_getaffinity(0)))
        return [NodeFacts(socket.gethostname(), True, cpus, cpus, 0.0, 0.0, tuple(sorted(self.workers)))]

    async def close(self) -> None:
        workers, self.workers = list(self.workers.values()), {}
        results = await asyncio.gather(*(worker.stop(0) for worker in workers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _pop(self, worker_id: str) -> Worker:
        try:
            return self.workers.pop(worker_id)
        except KeyError:
            raise unknown_worker(worker_id, self.workers) from None


def unknown_worker(worker_id: str, known: object) -> NotFound:
    names = ", ".join(sorted(known)) if isinstance(known, dict) and known else "none"
    return NotFound("unknown_worker", f"no worker {worker_id[:64]!r}; started: {names}")


def start_timeout(worker_id: str, timeout_ms: int) -> DeadlineExceeded:
    return DeadlineExceeded(
        "start_timeout",
        f"{worker_id} did not start within {timeout_ms} ms: see its log, or raise workers.start_timeout_ms",
        field="workers.start_timeout_ms",
    )
