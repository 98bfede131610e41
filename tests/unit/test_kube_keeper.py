"""The loop that keeps nodes fitting: when it looks, and what it says where it cannot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from cluster.control.hands import Need
from cluster.control.room import RoomKeeper
from cluster.control.state import State
from cluster.registry.memory import MemoryRegistry
from cluster.roles import Role
from kvstore.errors import Unavailable
from wire.loops import keep_going


class Rooms:
    """A room that counts looks. `fails`: what the next looks raise; `changes`: what the next one tells."""

    def __init__(self) -> None:
        self.looks: list[Mapping[Role, Need]] = []
        self.asked = 0
        self.fails: list[Exception] = []
        self.changes: list[str] = []

    async def check(self, counts: Mapping[Role, int]) -> None:
        raise AssertionError("nobody asks")

    async def fit(self, look) -> Sequence[str]:
        self.asked += 1
        if self.fails:
            raise self.fails.pop(0)
        self.looks.append(await look())
        told, self.changes = self.changes, []
        return told

    async def close(self) -> None:
        return None


@contextlib.asynccontextmanager
async def running(room: Rooms, look=State, every_ms: int = 3_600_000) -> AsyncIterator[tuple[RoomKeeper, list[str]]]:
    told: list[str] = []
    keeper = RoomKeeper(room, MemoryRegistry(lambda: 0.0), look, told.append, every_ms)
    task = asyncio.create_task(keep_going(keeper.turn, "nodes", lambda: None))
    try:
        yield keeper, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_it_looks_only_after_the_first_turn_has_told_which_workers_there_are():
    room = Rooms()
    async with running(room) as (keeper, _told):
        await turns()
        assert room.asked == 0
        keeper.wake()
        await until(lambda: len(room.looks) == 1)


async def test_a_controller_that_was_superseded_leaves_the_nodes_alone():
    room = Rooms()
    async with running(room, lambda: None) as (keeper, told):
        keeper.wake()
        await turns()
        assert (room.asked, keeper.error, told) == (0, "", [])


async def test_it_looks_again_by_itself_and_after_a_change():
    room = Rooms()
    room.changes = ["decode replicas 2 to 3"]
    async with running(room) as (keeper, told):
        keeper.wake()
        await until(lambda: len(room.looks) == 2)
        assert told == ["decode replicas 2 to 3"]
    room = Rooms()
    async with running(room, every_ms=1) as (keeper, told):
        keeper.wake()
        await until(lambda: len(room.looks) == 3)


async def test_a_failure_is_told_once_and_so_is_its_end():
    room = Rooms()
    room.fails = [Unavailable("kube_unreachable", "away"), Unavailable("kube_unreachable", "away"), ValueError("odd")]
    async with running(room, every_ms=1) as (keeper, told):
        keeper.wake()
        await until(lambda: room.looks)
        await turns()
        assert [line.split(":")[0] for line in told] == [
            "nodes do not follow the fleet", "nodes do not follow the fleet", "nodes follow the fleet again",
        ]  # fmt: skip
        assert "kube_unreachable: away" in told[0]
        assert keeper.error == ""


async def test_a_registry_that_is_away_stops_changes_of_nodes():
    class Away(MemoryRegistry):
        async def workers(self):
            raise Unavailable("registry_unreachable", "no answer")

    room, told = Rooms(), []
    keeper = RoomKeeper(room, Away(lambda: 0.0), State, told.append, 1)
    task = asyncio.create_task(keep_going(keeper.turn, "nodes", lambda: None))
    keeper.wake()
    await until(lambda: "registry_unreachable" in keeper.error)
    assert room.looks == []
    task.cancel()
