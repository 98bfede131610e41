"""grpc.health.v1 of a worker: `readiness` (may it be sent requests) and `liveness` (should it be killed), asked anew at
each check. Both follow the step loop, not the thread that answers here; liveness gives up much later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genlock.v1 import worker_pb2

READINESS, LIVENESS = "readiness", "liveness"
WATCH_POLL_S = 0.5
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class HealthLimits:
    """How long a step loop may stand still, milliseconds. Load never counts: a loop that is busy turns. And how much of
    the pool may be in quarantine, which no time ends."""

    ready_ms: int = 60_000
    alive_ms: int = 180_000
    quarantined_share: float = 0.5


def ready(status: worker_pb2.WorkerStatus, limits: HealthLimits) -> bool:
    """Steps, takes requests, and has passed an exchange of a page with a peer, where it must and knows of one. Where no
    peer is known, as in a fleet of one role, it waits for nobody. Who has pairs proved asks for the worker's status and
    not for this, so nothing waits for itself. Most of its pool is not in quarantine. Pure."""
    known = bool(status.peers) or status.untried_peers > 0
    proved = not status.proves_peers or not known or any(proof.passed for proof in status.peers)
    fits = status.pool.quarantined <= limits.quarantined_share * status.pool.pages
    return not status.draining and proved and fits and status.step_age_ms <= limits.ready_ms


def alive(status: worker_pb2.WorkerStatus, limits: HealthLimits) -> bool:
    """Pure."""
    return status.step_age_ms <= limits.alive_ms


class WorkerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the library has no types
    """The whole server's name "" is as ready as the worker."""

    def __init__(self, facts: Callable[[], worker_pb2.WorkerStatus], limits: HealthLimits) -> None:
        self._facts = facts
        self._limits = limits

    async def Check(self, request: Any, context: Any) -> Any:
        verdict = self._verdict(request.service)
        if verdict is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {READINESS}, {LIVENESS}")
        return health_pb2.HealthCheckResponse(status=verdict)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Says each change, until the caller ends it."""
        last: int | None = None
        while True:
            verdict = self._verdict(request.service)
            if verdict is None:
                verdict = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if verdict != last:
                last = verdict
                yield health_pb2.HealthCheckResponse(status=verdict)
            await asyncio.sleep(WATCH_POLL_S)

    def _verdict(self, service: str) -> int | None:
        judge = {"": ready, READINESS: ready, LIVENESS: alive}.get(service)
        if judge is None:
            return None
        return int(_SERVING if judge(self._facts(), self._limits) else _NOT_SERVING)
