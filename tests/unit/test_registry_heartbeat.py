"""A worker's heartbeat outlives whatever the registry does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.config import load
from cluster.launch.spec import WorkerSpec
from cluster.launch.telling import heartbeat_of
from cluster.registry.heartbeat import Heartbeat, HeartbeatState, refused, taken
from cluster.registry.make import registry_from
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import WorkerRecord
from cluster.registry.redis import RedisRegistry
from cluster.registry.tell import record_of
from cluster.roles import Role
from genlock.v1 import worker_pb2
from kvstore.errors import InvalidInput, Unavailable

RECORD = WorkerRecord("decode-0", Role.DECODE, "h:1", 11, "aa")


class Breaking(MemoryRegistry):
    error: BaseException | None = None
    puts = 0

    async def put_worker(self, record: WorkerRecord, ttl_ms: int) -> None:
        self.puts += 1
        if self.error is not None:
            raise self.error
        await super().put_worker(record, ttl_ms)


def test_states() -> None:
    state = HeartbeatState()
    assert not state.registered
    state = taken(state, 5.0)
    assert state.registered
    state = refused(refused(state, 7.0, "a"), 9.0, "b")
    assert (state.failing_since_ms, state.failures, state.error, state.registered) == (7.0, 2, "b", False)
    state = taken(state, 11.0)
    assert (state.failing_since_ms, state.last_ok_ms, state.registered) == (0.0, 11.0, True)


@pytest.mark.parametrize("error", [Unavailable("registry_unreachable", "away"), RuntimeError("surprise")])
async def test_it_registers_again_when_the_registry_is_back(error: Exception) -> None:
    now = [0.0]
    registry = Breaking(lambda: now[0])
    beat = Heartbeat(registry, lambda: RECORD, 300, lambda: now[0])
    await beat.beat()
    assert await registry.workers() == (RECORD,)
    registry.error = error
    now[0] = 400
    await beat.beat()
    assert await registry.workers() == ()
    assert not beat.state.registered
    assert str(error) in beat.state.error
    registry.error = None
    await beat.beat()
    assert await registry.workers() == (RECORD,)
    assert beat.state.registered


async def test_facts_that_cannot_be_read_end_nothing() -> None:
    registry = Breaking(lambda: 0.0)

    def broken() -> WorkerRecord:
        raise ZeroDivisionError

    beat = Heartbeat(registry, broken, 300, lambda: 0.0)
    await beat.beat()
    assert beat.state.failures == 1
    assert registry.puts == 0


async def test_it_beats_by_itself_and_takes_its_record_back_at_the_end() -> None:
    registry = Breaking(lambda: 0.0)
    records = iter(range(1000))
    beat = Heartbeat(registry, lambda: replace(RECORD, running=next(records)), 30, lambda: 0.0)
    beat.start()
    async with asyncio.timeout(5):
        while registry.puts < 3:
            await asyncio.sleep(0.005)
    [kept] = await registry.workers()
    assert kept.running >= 2
    await beat.stop()
    assert await registry.workers() == ()


async def test_a_stop_while_the_registry_is_away_ends_too() -> None:
    registry = Breaking(lambda: 0.0)
    registry.error = Unavailable("registry_unreachable")
    beat = Heartbeat(registry, lambda: RECORD, 30, lambda: 0.0)
    beat.start()
    async with asyncio.timeout(5):
        while not beat.state.failures:
            await asyncio.sleep(0.005)
        await beat.stop()


def test_a_record_of_facts() -> None:
    facts = worker_pb2.WorkerStatus(
        worker_id="prefill-1", role="prefill", incarnation=7, layout_fingerprint="ab", draining=True, pid=9,
        running_requests=1, waiting_requests=2, pool=worker_pb2.PoolStatus(pages=10, free=4), step_age_ms=99,
        metrics_endpoint="h:9464",
    )  # fmt: skip
    told = {"node": "n", "pod": "p", "told_ms": 5, "started_ms": 4}
    record = record_of(facts, "h:1", stall_ms=99, **told)
    assert record == WorkerRecord(
        "prefill-1", Role.PREFILL, "h:1", 7, "ab", True, False, True, "", 1, 2, 4, 10, "n", "p", 9, "h:9464", 5, 4
    )
    stalled = record_of(facts, "h:1", stall_ms=98, **told)
    assert not stalled.healthy
    assert "99 ms" in stalled.detail


def test_a_worker_tells_only_a_registry_that_others_see() -> None:
    spec = WorkerSpec(Role.DECODE, "decode-0", load().config)
    assert heartbeat_of(spec, worker_pb2.WorkerStatus, lambda: "h:1") is None
    shared = load(flags={"registry.url": "redis://127.0.0.1:1/0"}).config
    assert heartbeat_of(replace(spec, config=shared), worker_pb2.WorkerStatus, lambda: "h:1") is not None


def test_the_settings_choose_the_registry() -> None:
    assert isinstance(registry_from(load().config, lambda: 0.0), MemoryRegistry)
    for url in ("redis://h:1/2", "rediss://h", "unix:///run/valkey.sock"):
        assert isinstance(registry_from(load(flags={"registry.url": url}).config, lambda: 0.0), RedisRegistry)


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"registry.url": "http://h"}, "registry.url"),
        ({"registry.url": "redis://user:hunter2@h"}, "registry.url"),
        ({"registry.url": "redis://h/first"}, "registry.url"),
        ({"registry.url": "redis://h", "registry.sentinels": "h"}, "registry.sentinels"),
        ({"registry.url": "redis://h", "registry.namespace": "a b"}, "registry.namespace"),
        ({"registry.url": "rediss://h", "registry.ca_file": "/nowhere/ca.pem"}, "registry.ca_file"),
    ],
)
def test_settings_that_cannot_be_are_named(flags: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        registry_from(load(flags=flags).config, lambda: 0.0)
    assert caught.value.field == field
    assert "hunter2" not in caught.value.message
