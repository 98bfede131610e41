"""What a launcher is told about a worker, and what it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cluster.roles import Role
from cluster.settings import Config


@dataclass(frozen=True)
class WorkerSpec:
    """One worker to start; picklable. `config` carries the cluster secret. `port` 0: any free one. `avoid`:
    ids of nodes that it must not be placed on."""

    role: Role
    worker_id: str
    config: Config
    host: str = "127.0.0.1"
    port: int = 0
    avoid: frozenset[str] = frozenset()


class Worker(Protocol):
    """A worker of either role: its gRPC server, pool, step loop and transfer engine."""

    @property
    def worker_id(self) -> str: ...

    @property
    def role(self) -> Role: ...

    async def start(self) -> str:
        """Loads, listens and returns the endpoint `host:port`; when it returns, the worker serves."""
        ...

    async def stop(self, grace_ms: int) -> None:
        """Drains for at most `grace_ms`, then ends everything. May be called twice and after a failed start."""
        ...


# Makes a worker from its spec without starting it; picklable (a module's function) when another process calls it.
WorkerBuilder = Callable[[WorkerSpec], Worker]
