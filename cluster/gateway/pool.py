"""Work that would keep the event loop: a few threads, a bounded line before them, and tenants that take turns in it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.gateway.queueing import Priority, Room, joined, left, served, turn
from kvstore.errors import NoCapacity

T = TypeVar("T")

# Parsing less than this takes no time worth a thread.
INLINE_BYTES = 64 << 10


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    through: asyncio.Future[Any]


class FairPool:
    """Belongs to one event loop; made outside of one."""

    def __init__(self, name: str, *, threads: int = 2, max_jobs: int = 64) -> None:
        """`max_jobs`: that wait or run."""
        self._threads = threads
        self._max_jobs = max_jobs
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._room = Room(max_jobs)
        self._jobs: dict[int, _Job] = {}
        self._numbers = itertools.count()
        # Counted until a thread is through: a caller that left does not stop it.
        self._busy = 0

    def __len__(self) -> int:
        return self._busy + len(self._room)

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done on a thread when it is the tenant's turn. Raises NoCapacity
        (`tokenizer_busy`)."""
        if len(self) >= self._max_jobs:
            raise NoCapacity("tokenizer_busy", f"{len(self)} long texts wait to be read and tokenized")
        number = next(self._numbers)
        self._room = joined(self._room, number, tenant, Priority.NORMAL, retry_after_ms=0)
        job = self._jobs[number] = _Job(work, asyncio.get_running_loop().create_future())
        self._look()
        try:
            result: T = await job.through
        finally:
            # Without effect once a thread has it.
            self._jobs.pop(number, None)
            self._room = left(self._room, number)
        return result

    def close(self) -> None:
        """Who waits is cancelled."""
        self._room = Room(self._max_jobs)
        for job in self._jobs.values():
            job.through.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        while self._busy < self._threads and (number := turn(self._room)) is not None:
            self._room = served(self._room)
            job = self._jobs[number]
            done = asyncio.get_running_loop().run_in_executor(self._pool, job.work)
            self._busy += 1
            done.add_done_callback(lambda future, job=job: self._done(future, job))  # type: ignore[misc]  # bound now

    def _done(self, done: asyncio.Future[Any], job: _Job) -> None:
        self._busy -= 1
        # Looked at here, also where the caller has left: an error that nobody sees is logged as lost.
        error = None if done.cancelled() else done.exception()
        if not job.through.done():
            if done.cancelled():
                job.through.cancel()
            elif error is not None:
                job.through.set_exception(error)
            else:
                job.through.set_result(done.result())
        self._look()
