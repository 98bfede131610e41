"""Whether JSON Schemas of requests can be followed, learnt before any worker hears of them.

Compiling one may take seconds, or for ever: a process beside the gateway does it (schema_process.py), one at a time.
Tenants take turns at it, one schema each, however many they have waiting. What came out is remembered for the tenant
that asked, and for no other: how soon an answer comes tells nobody which schemas another tenant uses.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import itertools
from collections import OrderedDict
from dataclasses import dataclass

from cluster.gateway.queueing import Priority, Room, joined, left, served, turn, waiting_of
from cluster.gateway.schema_process import COMMAND, FIELD, SchemaProcess
from kvstore.errors import GenlockError, InvalidInput, NoCapacity, Unavailable
from wire.ending import end_tasks
from wire.errors import surprise

KEPT = 128
KEPT_TENANTS = 256
# Schemas that nobody has looked at yet: of one tenant, of all.
MAX_WAITING = 64
MAX_WAITING_OF_ALL = 4096
# The process itself bounds the processor's time of one schema; this is for turns of others before it, and for a host
# that gives the process none.
WAIT_S = 20.0

Key = tuple[str, bytes]  # tenant, digest of the schema


class KnownSchemas:
    """What came out of the last checks, by tenant: one tenant's schemas put none of another out. None: can be
    followed."""

    def __init__(self, kept: int = KEPT, kept_tenants: int = KEPT_TENANTS) -> None:
        self._kept = kept
        self._kept_tenants = kept_tenants
        self._tenants: OrderedDict[str, OrderedDict[bytes, InvalidInput | None]] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key[1] in self._tenants.get(key[0], ())

    def problem(self, key: Key) -> InvalidInput | None:
        """Raises KeyError for one that is not known."""
        known = self._tenants[key[0]]
        self._tenants.move_to_end(key[0])
        known.move_to_end(key[1])
        return known[key[1]]

    def add(self, key: Key, problem: InvalidInput | None) -> None:
        known = self._tenants.setdefault(key[0], OrderedDict())
        self._tenants.move_to_end(key[0])
        known[key[1]] = problem
        if len(known) > self._kept:
            known.popitem(last=False)
        if len(self._tenants) > self._kept_tenants:
            self._tenants.popitem(last=False)


@dataclass
class _Job:
    """A schema that waits for its turn or has it. `callers`: who still wants to know."""

    number: int
    key: Key
    schema: str
    done: asyncio.Future[GenlockError | None]
    callers: int = 0


class SchemaCheck:
    """Made outside of an event loop; `check` and `close` belong to one."""

    def __init__(
        self,
        *,
        command: tuple[str, ...] = COMMAND,
        wait_s: float = WAIT_S,
        kept: int = KEPT,
        max_waiting: int = MAX_WAITING,
        retry_after_ms: int = 500,
    ) -> None:
        self._process = SchemaProcess(command, wait_s, retry_after_ms)
        self._wait_s = wait_s
        self._max_waiting = max_waiting
        self._retry_after_ms = retry_after_ms
        self._known = KnownSchemas(kept)
        self._room = Room(MAX_WAITING_OF_ALL)
        self._numbers = itertools.count()
        self._jobs: dict[Key, _Job] = {}
        self._waiting: dict[int, _Job] = {}  # and the one whose turn it is
        self._asked: _Job | None = None
        self._task: asyncio.Task[None] | None = None

    async def check(self, tenant: str, schema: str) -> None:
        """Raises InvalidInput for a schema that cannot be followed, NoCapacity (`schema_check_busy`) where too many of
        the tenant's wait or no answer comes in time, Unavailable where this host cannot check any."""
        key = (tenant, hashlib.blake2b(schema.encode(), digest_size=16).digest())
        problem = self._known.problem(key) if key in self._known else await self._answer(key, schema)
        if problem is not None:
            raise copy.copy(problem)  # tracebacks gather in an error that is raised

    async def close(self) -> None:
        """Who waits still ends as Unavailable."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        await self._process.close()
        self._room = Room(MAX_WAITING_OF_ALL)
        for job in list(self._waiting.values()):
            self._end(job, Unavailable("draining", "this gateway stopped before a schema was checked", field=FIELD))

    async def _answer(self, key: Key, schema: str) -> GenlockError | None:
        job = self._jobs.get(key) or self._join(key, schema)
        job.callers += 1
        try:
            # Not cancelled with this caller: others may wait for the same.
            await asyncio.wait((job.done,), timeout=self._wait_s)
        finally:
            job.callers -= 1
            if not job.callers and job is not self._asked and not job.done.done():
                self._room = left(self._room, job.number)
                self._forget(job)
        if not job.done.done():
            raise self._busy(f"{FIELD} was not checked within {self._wait_s:.0f} s")
        return job.done.result()

    def _join(self, key: Key, schema: str) -> _Job:
        tenant = key[0]
        if waiting_of(self._room, tenant) >= self._max_waiting or len(self._room) >= self._room.limit:
            raise self._busy(f"{FIELD}: {self._max_waiting} schemas of this tenant wait to be checked already")
        job = _Job(next(self._numbers), key, schema, asyncio.get_running_loop().create_future())
        self._room = joined(self._room, job.number, tenant, Priority.NORMAL, retry_after_ms=self._retry_after_ms)
        self._jobs[key] = self._waiting[job.number] = job
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve(), name="schemas")
        return job

    async def _serve(self) -> None:
        """Until nobody waits. Whose turn it is stays first in its line until it has its answer, so that a tenant that
        comes meanwhile is next."""
        while (number := turn(self._room)) is not None:
            job = self._asked = self._waiting[number]
            error: GenlockError | None
            try:
                error = problem = await self._process.problem(job.schema)
                self._known.add(job.key, problem)
            except Exception as unexpected:
                error = surprise(unexpected, "a check of a schema")
            finally:
                self._asked = None
            self._room = served(self._room)
            self._end(job, error)

    def _end(self, job: _Job, error: GenlockError | None) -> None:
        self._forget(job)
        job.done.set_result(error)

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.key], self._waiting[job.number]

    def _busy(self, message: str) -> NoCapacity:
        return NoCapacity("schema_check_busy", message, field=FIELD, retry_after_ms=self._retry_after_ms)
