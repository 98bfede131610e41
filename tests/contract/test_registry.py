"""Both registries keep one contract; the Redis one against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import pytest_asyncio

from cluster.registry import memory, redis
from cluster.registry.base import Registry
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Desired, Event, GatewayRecord, WorkerRecord
from cluster.registry.redis import RedisRegistry
from cluster.registry.rules import MAX_DECISION_BYTES
from cluster.roles import Role
from kvstore.errors import Conflict, InvalidInput, NoCapacity
from tests.support.valkey import Valkey

EVENT_LIMIT = 20
RECORD = WorkerRecord(
    "decode-0", Role.DECODE, "127.0.0.1:7001", (1 << 63) - 1, "00ff", True, True, False, "détail 😀 \x00 \"'",
    1, 2, 3, 4, "node", "pod", 5, "127.0.0.1:9", 1_764_000_000_000, 1_763_000_000_000,
)  # fmt: skip
EVENT = Event(1_764_000_000_000, "scale", "fleet", "alice", "2 → 3 decode workers", "load", 7)


@dataclass
class World:
    """A registry, and a way to let time pass."""

    registry: Registry
    server: Valkey | None
    now_ms: float = 0.0

    async def wait(self, ms: int) -> None:
        self.now_ms += ms
        if self.server is not None:
            await asyncio.sleep(ms / 1000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Valkey]:
    valkey = Valkey(tmp_path_factory.mktemp("valkey"))
    await valkey.start()
    yield valkey
    valkey.kill()


@pytest.fixture(params=["memory", "redis"])
async def world(request: pytest.FixtureRequest, server: Valkey) -> AsyncIterator[World]:
    if request.param == "memory":
        made = World(None, None)  # type: ignore[arg-type]  # set below: its clock is the world's
        made.registry = MemoryRegistry(lambda: made.now_ms, EVENT_LIMIT)
        yield made
        return
    await server.flush()
    registry = RedisRegistry(server.settings(event_limit=EVENT_LIMIT, timeout_ms=5000))
    await registry.open()
    yield World(registry, server)
    await registry.close()


async def test_an_empty_registry(world: World) -> None:
    registry = world.registry
    assert await registry.workers() == ()
    assert await registry.desired() == Desired()
    assert await registry.events() == ()
    assert await registry.recall("k") is None
    assert registry.skipped == 0


async def test_a_worker_comes_back_as_it_was_put(world: World) -> None:
    other = replace(RECORD, worker_id="a-first", incarnation=2)
    await world.registry.put_worker(RECORD, 60_000)
    await world.registry.put_worker(other, 60_000)
    assert await world.registry.workers() == (other, RECORD)


async def test_a_heartbeat_keeps_a_record_and_silence_ends_it(world: World) -> None:
    await world.registry.put_worker(RECORD, 300)
    quiet = replace(RECORD, worker_id="quiet", incarnation=9)
    await world.registry.put_worker(quiet, 300)
    await world.wait(150)
    told = replace(RECORD, running=7)
    await world.registry.put_worker(told, 60_000)
    await world.wait(250)
    assert await world.registry.workers() == (told,)
    await world.registry.put_worker(quiet, 60_000)
    assert await world.registry.workers() == (told, quiet)


async def test_a_new_life_replaces_the_old_and_is_not_replaced_by_it(world: World) -> None:
    new = replace(RECORD, incarnation=77, endpoint="127.0.0.1:7002", started_ms=RECORD.started_ms + 1)
    await world.registry.put_worker(RECORD, 60_000)
    await world.registry.put_worker(new, 60_000)
    await world.registry.put_worker(RECORD, 60_000)
    assert await world.registry.workers() == (new,)


async def test_an_equal_start_lets_the_last_one_win(world: World) -> None:
    new = replace(RECORD, incarnation=77)
    await world.registry.put_worker(RECORD, 60_000)
    await world.registry.put_worker(new, 60_000)
    assert await world.registry.workers() == (new,)


async def test_only_this_life_is_removed(world: World) -> None:
    await world.registry.put_worker(RECORD, 60_000)
    await world.registry.remove_worker(RECORD.worker_id, RECORD.incarnation - 1)  # differs only in the 63rd bit's tail
    assert await world.registry.workers() == (RECORD,)
    await world.registry.remove_worker(RECORD.worker_id, RECORD.incarnation)
    await world.registry.remove_worker(RECORD.worker_id, RECORD.incarnation)
    assert await world.registry.workers() == ()


@pytest.mark.parametrize("field", ["worker_id", "endpoint", "incarnation"])
async def test_a_record_that_names_nothing_is_refused(world: World, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await world.registry.put_worker(replace(RECORD, **{field: 0 if field == "incarnation" else ""}), 1000)
    assert caught.value.field == field
    assert await world.registry.workers() == ()


async def test_what_gateways_tell_is_kept_while_they_tell_it(world: World) -> None:
    assert await world.registry.gateways() == ()
    await world.registry.put_gateway(GatewayRecord("b", 3, 1), 60_000)
    await world.registry.put_gateway(GatewayRecord("a", 1), 300)
    told = GatewayRecord("b", 7, 0)
    await world.registry.put_gateway(told, 60_000)
    assert await world.registry.gateways() == (GatewayRecord("a", 1), told)
    assert await world.registry.workers() == (), "they are no workers"
    await world.wait(350)
    assert await world.registry.gateways() == (told,)


@pytest.mark.parametrize("name", ["", "x" * 257])
async def test_a_gateway_without_a_name_is_refused(world: World, name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await world.registry.put_gateway(GatewayRecord(name), 60_000)
    assert caught.value.field == "gateway_id"


async def test_there_are_only_so_many_gateways(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, redis):
        monkeypatch.setattr(module, "MAX_GATEWAYS", 2)
    await world.registry.put_gateway(GatewayRecord("one"), 300)
    await world.registry.put_gateway(GatewayRecord("two"), 60_000)
    with pytest.raises(NoCapacity) as caught:
        await world.registry.put_gateway(GatewayRecord("three"), 60_000)
    assert caught.value.reason == "too_many_gateways"
    await world.registry.put_gateway(GatewayRecord("two", 5), 60_000)
    await world.wait(350)
    await world.registry.put_gateway(GatewayRecord("three"), 60_000)
    assert [record.gateway_id for record in await world.registry.gateways()] == ["three", "two"]


async def test_the_last_decisions_are_kept_newest_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "MAX_DECISIONS", 3)
    if isinstance(world.registry, MemoryRegistry):
        monkeypatch.setattr(memory, "MAX_DECISIONS", 3)
        world.registry = MemoryRegistry(lambda: 0.0, EVENT_LIMIT)
    assert await world.registry.last_decisions() == ()
    texts = [bytes([number, 0, 255]) for number in range(5)]
    for text in texts:
        await world.registry.append_decision(text)
    newest_first = tuple(reversed(texts))
    assert await world.registry.last_decisions(100) == newest_first[:3]
    assert await world.registry.last_decisions(2) == newest_first[:2]
    assert await world.registry.last_decisions(0) == await world.registry.last_decisions(-1) == ()
    with pytest.raises(InvalidInput) as caught:
        await world.registry.append_decision(bytes(MAX_DECISION_BYTES + 1))
    assert caught.value.reason == "decision_too_long"
    assert await world.registry.events() == (), "they are no events"


async def test_a_registry_that_is_full_takes_no_new_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, redis):
        monkeypatch.setattr(module, "MAX_RECORDS", 2)
    one, two, three = (replace(RECORD, worker_id=name) for name in ("one", "two", "three"))
    await world.registry.put_worker(one, 300)
    await world.registry.put_worker(two, 60_000)
    with pytest.raises(NoCapacity) as caught:
        await world.registry.put_worker(three, 60_000)
    assert caught.value.reason == "too_many_workers"
    told = replace(two, running=7)
    await world.registry.put_worker(told, 60_000)
    assert await world.registry.workers() == (one, told)
    await world.wait(350)
    await world.registry.put_worker(three, 60_000)
    assert await world.registry.workers() == (three, told)


async def test_what_is_wanted_is_kept_whole(world: World) -> None:
    wanted = Desired(
        0, 2, 3, frozenset({"decode-1", "prefill-0"}), "prefill: {min: 1}", True, 4, "10.0.0.1:7",
        MappingProxyType({"decode-0": 2}),
    )  # fmt: skip
    kept = await world.registry.replace_desired(wanted, 0)
    assert kept.revision > 0
    assert kept == replace(wanted, revision=kept.revision)
    assert await world.registry.desired() == kept


async def test_a_change_against_another_revision_changes_nothing(world: World) -> None:
    first = await world.registry.replace_desired(Desired(prefill=1), 0)
    second = await world.registry.replace_desired(replace(first, prefill=2), first.revision)
    assert second.revision > first.revision
    for expected in (0, first.revision, second.revision + 1):
        with pytest.raises(Conflict) as caught:
            await world.registry.replace_desired(replace(first, prefill=9), expected)
        assert caught.value.reason == "revision_moved"
        assert str(second.revision) in caught.value.message
        assert str(expected) in caught.value.message
    assert await world.registry.desired() == second


async def test_of_many_writers_at_once_one_wins(world: World) -> None:
    async def write(number: int) -> int:
        try:
            await world.registry.replace_desired(Desired(prefill=number), 0)
        except Conflict:
            return 0
        return number

    won = [number for number in await asyncio.gather(*(write(number) for number in range(1, 21))) if number]
    assert len(won) == 1
    assert (await world.registry.desired()).prefill == won[0]


async def test_a_carried_revision_is_never_used_again(world: World) -> None:
    high = 1 << 42  # above any clock
    kept = await world.registry.replace_desired(Desired(revision=high, prefill=2), 0)
    assert kept.revision == high + 1


async def test_events_are_numbered_bounded_and_read_in_order(world: World) -> None:
    kept = [await world.registry.append_event(replace(EVENT, message=str(n))) for n in range(EVENT_LIMIT + 5)]
    numbers = [event.sequence for event in kept]
    assert numbers == sorted(set(numbers))
    assert numbers[0] > 0
    held = await world.registry.events(limit=1000)
    assert held == tuple(kept[5:])
    assert await world.registry.events(after=numbers[10], limit=3) == tuple(kept[11:14])
    assert await world.registry.events(after=numbers[-1]) == ()
    assert await world.registry.events(limit=0) == ()


async def test_the_last_events_are_read_without_those_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await world.registry.last_events() == ()
    kept = [await world.registry.append_event(replace(EVENT, message=str(n))) for n in range(EVENT_LIMIT + 5)]
    assert await world.registry.last_events(3) == tuple(kept[-3:])
    assert await world.registry.last_events(1000) == tuple(kept[5:])
    assert await world.registry.last_events(0) == ()
    assert await world.registry.last_events(-1) == ()
    for module in (memory, redis):
        monkeypatch.setattr(module, "MAX_EVENT_BATCH", 4)
    assert await world.registry.last_events(1000) == tuple(kept[-4:])
    assert await world.registry.events(limit=1000) == tuple(kept[5:9])


async def test_an_event_comes_back_as_it_was(world: World) -> None:
    kept = await world.registry.append_event(EVENT)
    assert kept == replace(EVENT, sequence=kept.sequence)
    assert await world.registry.events() == (kept,)
    assert await world.registry.last_events() == (kept,)


async def test_the_first_answer_under_a_key_stays(world: World) -> None:
    key = "tenant/\ud800 key"  # half a character: callers send anything
    assert await world.registry.remember(key, b"\x00first", 300) is None
    assert await world.registry.remember(key, b"second", 60_000) == b"\x00first"
    assert await world.registry.recall(key) == b"\x00first"
    assert await world.registry.recall("another") is None
    await world.wait(350)
    assert await world.registry.recall(key) is None
    assert await world.registry.remember(key, b"third", 60_000) is None


async def test_limits_of_answers(world: World) -> None:
    for key, answer in (("", b""), ("k" * 300, b""), ("k", b"x" * ((1 << 20) + 1))):
        with pytest.raises(InvalidInput):
            await world.registry.remember(key, answer, 1000)
    with pytest.raises(InvalidInput):
        await world.registry.remember("k", b"", 0)


async def test_keys_are_kept_listed_and_revoked(world: World) -> None:
    registry = world.registry
    assert dict(await registry.keys()) == {}
    await registry.put_key("ab" * 32, '{"tenant": "détail"}')
    await registry.put_key("cd" * 32, "{}")
    await registry.put_key("cd" * 32, '{"v": 2}')
    assert dict(await registry.keys()) == {"ab" * 32: '{"tenant": "détail"}', "cd" * 32: '{"v": 2}'}
    assert await registry.remove_key("ab" * 32)
    assert not await registry.remove_key("ab" * 32)
    assert set(await registry.keys()) == {"cd" * 32}
