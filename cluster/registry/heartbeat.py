"""A worker tells the registry that it is alive, every third of the record's time. What the registry does to that (it is
away, was flushed, came back empty) costs the worker nothing: the next heartbeat registers it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.registry.base import Registry
from cluster.registry.records import WorkerRecord
from kvstore.errors import GenlockError
from wire.ending import end_tasks
from wire.loops import keep_going

BEATS_PER_TTL = 3
STOP_S = 2.0


@dataclass(frozen=True)
class HeartbeatState:
    """How it goes. Times are those of the heartbeat's clock, milliseconds; 0: never."""

    beats: int = 0
    failures: int = 0
    last_ok_ms: float = 0.0
    # Since when the registry has not taken a record; 0: it takes them.
    failing_since_ms: float = 0.0
    error: str = ""

    @property
    def registered(self) -> bool:
        return self.beats > 0 and not self.error


def taken(state: HeartbeatState, now_ms: float) -> HeartbeatState:
    return replace(state, beats=state.beats + 1, last_ok_ms=now_ms, failing_since_ms=0.0, error="")


def refused(state: HeartbeatState, now_ms: float, error: str) -> HeartbeatState:
    since_ms = state.failing_since_ms or now_ms
    return replace(state, failures=state.failures + 1, failing_since_ms=since_ms, error=error[:256] or "unknown")


class Heartbeat:
    """Runs until stopped; raises nothing."""

    def __init__(
        self,
        registry: Registry,
        record: Callable[[], WorkerRecord],
        ttl_ms: int,
        now_ms: Callable[[], float],
    ) -> None:
        """`record` makes the present record; `now_ms` is monotonic."""
        self._registry = registry
        self._record = record
        self._ttl_ms = ttl_ms
        self._now_ms = now_ms
        self._task: asyncio.Task[None] | None = None
        self._last: WorkerRecord | None = None
        self.state = HeartbeatState()
        self.surprises = 0

    def start(self) -> None:
        self._task = asyncio.create_task(keep_going(self._again, "the heartbeat", self._surprised), name="heartbeat")

    async def stop(self) -> None:
        """Takes the record back where the registry answers; else it runs out by itself. Closes the registry."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        with contextlib.suppress(Exception):
            async with asyncio.timeout(STOP_S):
                if self._last is not None:
                    await self._registry.remove_worker(self._last.worker_id, self._last.incarnation)
        with contextlib.suppress(Exception):
            await self._registry.close()

    async def beat(self) -> None:
        """One heartbeat."""
        try:
            record = self._record()
            await self._registry.put_worker(record, self._ttl_ms)
        except GenlockError as error:
            self.state = refused(self.state, self._now_ms(), error.message)
        except Exception as exc:
            # A surprise here must not end the worker, nor its later heartbeats.
            self.state = refused(self.state, self._now_ms(), f"{type(exc).__name__}: {exc}")
        else:
            self._last = record
            self.state = taken(self.state, self._now_ms())

    async def _again(self) -> None:
        await self.beat()
        await asyncio.sleep(self._ttl_ms / BEATS_PER_TTL / 1000)

    def _surprised(self) -> None:
        self.surprises += 1
