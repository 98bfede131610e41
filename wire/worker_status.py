"""WorkerService: the facts of one worker, cheap enough to be polled; its leases, for who asks; and its drain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.guard import Guard

DRAIN_POLL_S = 0.05
DRAIN_MAX_S = 3600.0
DEFAULT_LEASES = 100
MAX_LEASES = 10_000


def pool_status(guard: Guard, cached_pages: int = 0) -> worker_pb2.PoolStatus:
    counts = guard.counts()
    return worker_pb2.PoolStatus(
        pages=counts.total,
        free=counts.free,
        open=counts.open,
        sealed=counts.sealed,
        quarantined=counts.quarantined,
        page_bytes=guard.layout.slot_bytes,
        cached=cached_pages,
        spares=guard.spares,
        spares_used=guard.spares - guard.free_spares,
    )


def no_leases(_limit: int) -> worker_pb2.WorkerLeases:
    """Of a worker that promises no pages."""
    return worker_pb2.WorkerLeases()


class WorkerStatusService(worker_pb2_grpc.WorkerServiceServicer):
    """`facts` makes the answer; `drain(open_ms)` stops admission after a while; `idle` says
    whether anything is running or may still come; `leases(limit)` tells the oldest."""

    def __init__(
        self,
        facts: Callable[[], worker_pb2.WorkerStatus],
        drain: Callable[[int], None],
        idle: Callable[[], bool],
        leases: Callable[[int], worker_pb2.WorkerLeases] = no_leases,
    ) -> None:
        self._facts = facts
        self._drain = drain
        self._idle = idle
        self._leases = leases

    async def Status(self, request: worker_pb2.WorkerStatusRequest, context: Any) -> worker_pb2.WorkerStatus:
        return self._facts()

    async def Leases(self, request: worker_pb2.WorkerLeasesRequest, context: Any) -> worker_pb2.WorkerLeases:
        return self._leases(min(MAX_LEASES, max(0, request.limit) or DEFAULT_LEASES))

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        remaining = context.time_remaining()
        open_ms = min(max(0, request.open_ms), int(DRAIN_MAX_S * 1000))
        limit_s = DRAIN_MAX_S if remaining is None else remaining
        return worker_pb2.DrainResponse(drained=await self.drained(limit_s, open_ms))

    async def drained(self, limit_s: float, open_ms: int = 0) -> bool:
        """Stops admission, `open_ms` later for requests on their way, and waits until idle, at most `limit_s`."""
        self._drain(open_ms)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while not self._idle():
            if loop.time() + DRAIN_POLL_S >= deadline:
                return False
            await asyncio.sleep(DRAIN_POLL_S)
        return True
