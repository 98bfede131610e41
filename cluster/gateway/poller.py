"""Asks every worker for its status, all at once, again and again, each question with a deadline."""

from __future__ import annotations

import asyncio

from cluster.gateway.state import GatewayState
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError
from wire.calls import answer


class Poller:
    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._loop(), name="worker poller")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def look(self) -> None:
        """One round over all workers."""
        workers = list(self._state.fleet.workers.values())
        await asyncio.gather(*(self._ask(record.worker_id, record.endpoint) for record in workers))

    async def _loop(self) -> None:
        while True:
            await self.look()
            await self._state.pause(self._state.config.workers.status_poll_ms)

    async def _ask(self, worker_id: str, endpoint: str) -> None:
        state = self._state
        timeout_s = state.config.workers.status_timeout_ms / 1000
        try:
            call = state.worker_stub(endpoint).Status(worker_pb2.WorkerStatusRequest(), timeout=timeout_s)
            status = await answer(call)
        except GenlockError as error:
            state.set_fleet(state.fleet.failed(worker_id, endpoint, error))
        else:
            state.set_fleet(state.fleet.answered(worker_id, endpoint, status))
