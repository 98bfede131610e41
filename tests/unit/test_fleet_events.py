"""The operators' view of a long event log: the last ones, without reading what came before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from cluster.control.api import FleetControl, FleetView, WorkerRow
from cluster.operators.fleet import DEFAULT_LIMIT, MAX_LIMIT, FleetOperations
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Desired, Event
from cluster.roles import Role
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import InvalidInput

LONG = MAX_LIMIT + 500
NOW_MS = 1_800_000_000_000


class Log:
    """A control that has nothing but its log and one worker, and counts what is read."""

    def __init__(self) -> None:
        self.registry = MemoryRegistry(lambda: 0.0, event_limit=2 * LONG)
        self.read = 0

    async def view(self) -> FleetView:
        return FleetView(Desired(), (WorkerRow("decode-0", Role.DECODE, "READY", "", 0),), True)

    async def events(self, after: int = 0, limit: int = 100) -> Sequence[Event]:
        return self._counted(await self.registry.events(after, limit))

    async def last_events(self, limit: int = 100) -> Sequence[Event]:
        return self._counted(await self.registry.last_events(limit))

    async def add(self, count: int, subject: str = "fleet", age_ms: int = 0) -> None:
        for _ in range(count):
            await self.registry.append_event(Event(NOW_MS - age_ms, "phase", subject, "controller", ""))

    def _counted(self, events: Sequence[Event]) -> Sequence[Event]:
        self.read += len(events)
        return events


@pytest.fixture
async def log() -> Log:
    """Its events are an hour old, one a millisecond."""
    made = Log()
    await made.add(LONG, age_ms=3_600_000)
    return made


def operations(log: Log) -> FleetOperations:
    return FleetOperations(cast(FleetControl, log), lambda: NOW_MS)


async def listed(log: Log, **request: int) -> list[int]:
    answer = await operations(log).list_events(pb.ListEventsRequest(**request), "me")
    return [event.sequence for event in answer.events]


async def test_the_last_events_of_a_long_log_are_listed_and_no_others_read(log: Log) -> None:
    assert await listed(log, limit=3) == [LONG - 2, LONG - 1, LONG]
    assert log.read == 3
    assert await listed(log) == list(range(LONG - DEFAULT_LIMIT + 1, LONG + 1))
    assert await listed(log, limit=1 << 30) == list(range(LONG - MAX_LIMIT + 1, LONG + 1))
    with pytest.raises(InvalidInput):
        await listed(log, limit=-1)


async def test_only_events_that_are_young_enough(log: Log) -> None:
    await log.add(2, age_ms=1000)
    assert await listed(log, since_ms=60_000) == [LONG + 1, LONG + 2]
    assert await listed(log, since_ms=60_000, limit=1) == [LONG + 2]
    assert await listed(log, since_ms=500) == []
    assert await listed(log, since_ms=60_000, after=LONG - 10, limit=1) == [LONG + 1]


async def test_a_start_that_is_named_is_where_a_page_begins(log: Log) -> None:
    assert await listed(log, after=5, limit=2) == [6, 7]
    assert await listed(log, after=LONG) == []


async def test_the_last_events_of_a_worker_are_described(log: Log) -> None:
    await log.add(DEFAULT_LIMIT + 1, "decode-0")
    answer = await operations(log).describe_worker(pb.DescribeWorkerRequest(worker_id="decode-0"), "me")
    last = LONG + DEFAULT_LIMIT + 1
    assert [event.sequence for event in answer.events] == list(range(last - DEFAULT_LIMIT + 1, last + 1))


async def watched(log: Log, count: int, **request: int) -> list[int]:
    seen = []
    async with asyncio.timeout(10):
        async for event in operations(log).watch(pb.ListEventsRequest(**request), "me"):
            seen.append(event.sequence)
            if len(seen) == count:
                break
    return seen


async def test_a_watch_begins_with_the_oldest_or_after_a_start(log: Log) -> None:
    assert await watched(log, LONG) == list(range(1, LONG + 1))
    assert await watched(log, 2, after=LONG - 2) == [LONG - 1, LONG]


async def test_a_watch_goes_on_past_events_that_are_too_old(log: Log) -> None:
    await log.add(2, age_ms=1000)
    assert await watched(log, 2, since_ms=60_000) == [LONG + 1, LONG + 2]
    # Each once.
    assert log.read == LONG + 2
