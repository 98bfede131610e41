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
# Trailing metadata of an answer that says NOT_SERVING.
REASON_KEY = "genlock-reason"
# Failed exchanges that a reason names.
MAX_NAMED = 4
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


def unready(status: worker_pb2.WorkerStatus, limits: HealthLimits) -> str:
    """Why it may not be sent requests; "": it may. It steps, takes requests, most of its pool is not in quarantine, and
    it has passed an exchange of a page with a peer, where it must: a decode worker alone can answer nobody. Who has
    pairs proved asks for the worker's status and not for this, so nothing waits for itself. Pure."""
    if status.step_age_ms > limits.ready_ms:
        return _still(status)
    if status.draining:
        return "draining"
    if status.pool.quarantined > limits.quarantined_share * status.pool.pages:
        return f"{status.pool.quarantined} of {status.pool.pages} pages are in quarantine"
    if not status.proves_peers or any(proof.passed for proof in status.peers):
        return ""
    failed = "; ".join(f"{proof.worker_id}: {proof.reason}" for proof in status.peers[-MAX_NAMED:])
    if failed:
        return f"no exchange of a page has passed: {failed}"
    if status.untried_peers:
        return "its first exchange of a page is under way"
    return "has exchanged a page with nobody yet"


def stuck(status: worker_pb2.WorkerStatus, limits: HealthLimits) -> str:
    """Why it should be killed; "": it should not. Pure."""
    return _still(status) if status.step_age_ms > limits.alive_ms else ""


def _still(status: worker_pb2.WorkerStatus) -> str:
    return f"its step loop has stood still for {status.step_age_ms} ms"


class WorkerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the library has no types
    """The whole server's name "" is as ready as the worker."""

    def __init__(self, facts: Callable[[], worker_pb2.WorkerStatus], limits: HealthLimits) -> None:
        self._facts = facts
        self._limits = limits

    async def Check(self, request: Any, context: Any) -> Any:
        why = self._why_not(request.service)
        if why is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {READINESS}, {LIVENESS}")
        if why:
            context.set_trailing_metadata(((REASON_KEY, why),))
        return health_pb2.HealthCheckResponse(status=_NOT_SERVING if why else _SERVING)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Says each change, until the caller ends it."""
        last: int | None = None
        while True:
            why = self._why_not(request.service)
            verdict = _NOT_SERVING if why else _SERVING
            if why is None:
                verdict = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if verdict != last:
                last = verdict
                yield health_pb2.HealthCheckResponse(status=verdict)
            await asyncio.sleep(WATCH_POLL_S)

    def _why_not(self, service: str) -> str | None:
        """None: there is no such service."""
        judge = {"": unready, READINESS: unready, LIVENESS: stuck}.get(service)
        return None if judge is None else judge(self._facts(), self._limits)
