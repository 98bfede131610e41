"""Nodes that take no worker, drained or cordoned, over workers that the test holds in its hands."""

from __future__ import annotations

import asyncio

import pytest

from cluster.control.api import Change
from cluster.control.closing import MAX_CLOSED, closed_with, with_id
from cluster.control.state import Phase
from cluster.registry.memory import MemoryRegistry
from kvstore.errors import NoCapacity
from tests.support.control_world import FakeFleet, World, now_ms

ME = Change("me", "because")


def on(world: World) -> dict[str, str]:
    return {name: row.node for name, row in world.controller.state.rows.items() if row.phase is Phase.READY}


async def test_what_replaces_the_workers_of_a_drained_node_waits_for_another_one():
    fleet = FakeFleet()
    async with World(fleet) as world:
        await world.settled()
        await world.operations.drain([], ["node-a"], ME, force=True, replace=True)
        await world.until(lambda s: all("no_place" in row.reason or "avoid" in row.reason for row in s.rows.values()))
        assert (await world.registry.desired()).closed == {"node-a": "id-a"}
        assert not fleet.workers, "nothing was started on the node that is to end"
        fleet.nodes_there["node-b"] = "id-b"
        await world.settled()
        assert on(world) == {"decode-0": "node-b", "prefill-0": "node-b"}
        # Also what crashes later, and what is wanted more.
        fleet.die("decode-0")
        await world.operations.scale(2, None, ME)
        await world.until(lambda _s: len(on(world)) == 3)
        assert set(on(world).values()) == {"node-b"}
        said = [event.message for event in await world.operations.events(0, 1000) if event.kind == "drain"]
        assert any("node-a takes no worker until it is uncordoned" in message for message in said)


async def test_a_drained_node_is_open_again_when_it_was_uncordoned_or_came_back():
    fleet = FakeFleet()
    async with World(fleet) as world:
        await world.settled()
        for again in ("uncordon", "restart of the host"):
            await world.operations.drain([], ["node-a"], ME, force=True, replace=True)
            await world.until(lambda _s: not fleet.workers)
            if again == "uncordon":
                await world.operations.cordon([], ["node-a"], False, ME)
                assert not (await world.registry.desired()).closed
            else:
                fleet.nodes_there["node-a"] = "id-a2"
            await world.settled()
            assert set(on(world).values()) == {"node-a"}, again


async def test_a_node_without_workers_can_be_drained_too():
    fleet = FakeFleet()
    fleet.nodes_there["node-b"] = "id-b"
    async with World(fleet) as world:
        await world.settled()
        await world.operations.drain([], ["node-b"], ME)
        assert (await world.registry.desired()).closed == {"node-b": "id-b"}
        assert {row.node: row.drained for row in await world.operations.nodes()} == {"node-a": False, "node-b": True}
        fleet.nodes_there = {"node-b": "id-b"}
        fleet.die("decode-0")
        await world.until(lambda s: "avoid" in s.rows["decode-0"].reason)


async def test_a_drained_node_has_no_room_for_more():
    fleet = FakeFleet()
    async with World(fleet) as world:
        await world.settled()
        await world.operations.drain([], ["node-a"], ME, force=True, replace=True)
        with pytest.raises(NoCapacity) as caught:
            await world.operations.scale(None, 2, ME)
        assert caught.value.reason == "no_place"
        fleet.nodes_there["node-b"] = "id-b"
        await world.operations.scale(None, 2, ME)
        await world.settled()


async def test_a_restart_of_a_worker_closes_nothing():
    async with World() as world:
        await world.settled()
        await world.operations.restart("decode-0", ME, force=True)
        assert not (await world.registry.desired()).avoided


async def test_a_cordoned_node_keeps_its_workers_and_takes_none_until_it_is_uncordoned():
    fleet = FakeFleet()
    async with World(fleet) as world:
        await world.settled()
        lives = {name: row.incarnation for name, row in world.controller.state.rows.items()}
        await world.operations.cordon([], ["node-a"], True, ME)
        kept = await world.registry.desired()
        assert (kept.cordoned_nodes, kept.cordoned_lives, kept.cordoned) == ({"node-a": "id-a"}, lives, frozenset())
        assert [(row.drained, row.cordoned) for row in await world.operations.nodes()] == [(False, True)]
        with pytest.raises(NoCapacity):
            await world.operations.scale(None, 2, ME)
        fleet.nodes_there["node-b"] = "id-b"
        await world.operations.scale(None, 2, ME)
        await world.settled()
        assert on(world) == {"decode-0": "node-a", "prefill-0": "node-a", "decode-1": "node-b"}
        # Who follows on another node serves.
        fleet.die("decode-0")
        await world.until(lambda s: s.rows["decode-0"].restarts == 1 and len(on(world)) == 3)
        rows = {row.worker_id: (row.node, row.cordoned) for row in (await world.operations.view()).workers}
        assert rows == {
            "decode-0": ("node-b", False), "prefill-0": ("node-a", True), "decode-1": ("node-b", False),
        }  # fmt: skip
        await world.operations.cordon([], ["node-a"], False, ME)
        after = await world.registry.desired()
        assert (after.cordoned_nodes, after.cordoned_lives.keys()) == ({}, {"decode-0"})
        await world.operations.scale(2, None, ME)
        await world.until(lambda _s: len(on(world)) == 4)
        assert on(world)["prefill-1"] == "node-a"
        said = [event.message for event in await world.operations.events(0, 1000) if event.subject == "fleet"]
        assert "node node-a takes no worker until it is uncordoned" in said
        assert "node node-a takes workers again" in said


async def test_a_cordoned_node_outlives_the_controller_and_a_drain_of_it_is_undone_with_it():
    fleet, registry = FakeFleet(), MemoryRegistry(now_ms)
    async with World(fleet, registry) as world:
        await world.settled()
        await world.operations.cordon([], ["node-a"], True, ME)
    async with World(fleet, registry) as world:
        await world.until(lambda s: len(s.rows) == 2 and all(row.phase is Phase.READY for row in s.rows.values()))
        assert all(row.cordoned for row in (await world.operations.view()).workers)
        await world.operations.drain([], ["node-a"], ME, force=True, replace=True)
        assert [(row.drained, row.cordoned) for row in await world.operations.nodes()] == [(True, True)]
        await world.until(lambda s: all("avoid" in row.reason for row in s.rows.values()))
        await world.operations.cordon([], ["node-a"], False, ME)
        await world.settled()
        assert set(on(world).values()) == {"node-a"}
        assert not any(row.cordoned for row in (await world.operations.view()).workers)


async def test_a_worker_that_has_told_nothing_yet_leaves_the_node_that_is_cordoned():
    fleet = FakeFleet()
    async with World(fleet) as world:
        await world.settled()
        fleet.silent = {"decode-1"}
        await world.operations.scale(None, 2, ME)
        await world.until(lambda s: "decode-1" in s.rows and s.rows["decode-1"].node == "node-a")
        fleet.nodes_there["node-b"] = "id-b"
        await world.operations.cordon([], ["node-a"], True, ME)
        fleet.silent = set()
        await world.until(lambda _s: on(world).get("decode-1") == "node-b")
        assert on(world)["decode-0"] == "node-a"


async def test_the_workers_of_a_node_without_an_id_are_cordoned_by_their_names():
    fleet = FakeFleet()
    fleet.nodes_there = {"node-a": ""}
    async with World(fleet) as world:
        await world.settled()
        await world.operations.cordon([], ["node-a"], True, ME)
        kept = await world.registry.desired()
        assert (kept.cordoned, kept.cordoned_lives) == ({"decode-0", "prefill-0"}, {})
        fleet.die("decode-0")
        await world.until(lambda s: s.rows["decode-0"].restarts == 1 and s.rows["decode-0"].phase is Phase.READY)
        assert all(row.cordoned for row in (await world.operations.view()).workers)
        await world.operations.cordon([], ["node-a"], False, ME)
        assert not any(row.cordoned for row in (await world.operations.view()).workers)


async def test_the_only_node_shows_its_cordon_and_closes_for_nobody():
    fleet = FakeFleet()
    fleet.nodes_there = {"node-a": ""}
    async with World(fleet) as world:
        await world.settled()
        for on_or_off in (True, False):
            await world.operations.cordon([], ["node-a"], on_or_off, ME)
            assert [(row.drained, row.cordoned) for row in await world.operations.nodes()] == [(False, on_or_off)]
            assert not (await world.registry.desired()).avoided
        await world.operations.drain([], ["node-a"], ME, force=True, replace=True)
        assert [(row.drained, row.cordoned) for row in await world.operations.nodes()] == [(False, False)]


async def test_a_cordon_of_the_only_node_and_its_end_reach_a_worker_that_is_still_starting():
    fleet = FakeFleet()
    fleet.nodes_there = {"node-a": ""}
    async with World(fleet) as world:
        await world.settled()
        fleet.hang = asyncio.Event()
        fleet.die("decode-0")
        await world.until(lambda s: s.rows["decode-0"].phase is Phase.STARTING and not s.rows["decode-0"].node)
        await world.operations.cordon([], ["node-a"], True, ME)
        assert (await world.registry.desired()).cordoned == {"decode-0", "prefill-0"}
        await world.operations.cordon([], ["node-a"], False, ME)
        assert not (await world.registry.desired()).cordoned
        fleet.hang.set()
        await world.settled()


async def test_the_end_of_a_cordon_of_the_only_node_is_one_for_names_that_come_back_later():
    fleet = FakeFleet()
    fleet.nodes_there = {"node-a": ""}
    async with World(fleet, seed=(1, 2)) as world:
        await world.settled()
        await world.operations.cordon([], ["node-a"], True, ME)
        await world.operations.scale(None, 1, ME)
        await world.until(lambda s: len(s.rows) == 2)
        await world.operations.cordon([], ["node-a"], False, ME)
        await world.operations.scale(None, 2, ME)
        await world.settled()
        assert not any(row.cordoned for row in (await world.operations.view()).workers)


def test_only_so_many_drained_nodes_are_remembered():
    before = {f"node-{number}": f"id-{number}" for number in range(MAX_CLOSED)}
    after = closed_with(before, with_id({"node-0": "id-new", "unknown": ""}))
    assert len(after) == MAX_CLOSED
    assert list(after.items())[-1] == ("node-0", "id-new")
    assert "node-1" not in closed_with(after, {"one": "more"})
