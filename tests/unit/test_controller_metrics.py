"""What the controller tells Prometheus is what happened."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, generate_latest

from cluster.control.api import Change
from cluster.control.hands import Verdict
from cluster.control.metrics import ControllerCollector, controller_registry, read_controller
from cluster.control.operations import Operations
from cluster.control.state import Phase
from kvstore.errors import NoCapacity, Unavailable
from tests.support.control_world import World
from tests.support.scrape import Scrape

ME = Change("test")


def told(world: World, operations: Operations | None = None) -> Scrape:
    registry = CollectorRegistry()
    known = operations or world.operations
    registry.register(ControllerCollector(lambda: read_controller(world.controller, known)))
    return Scrape.of(generate_latest(registry).decode())


async def test_phases_counts_and_settling() -> None:
    async with World(seed=(1, 2)) as world:
        await world.settled()
        seen = told(world)
        phases = seen.by("genlock_fleet_workers", "role", "phase")
        assert {key: count for key, count in phases.items() if count} == {
            ("prefill", "ready"): 1,
            ("decode", "ready"): 2,
        }
        assert len(phases) == 2 * len(Phase)
        assert seen.by("genlock_fleet_desired_workers", "role") == {("prefill",): 1, ("decode",): 2}
        assert seen.value("genlock_fleet_settled") == 1
        assert seen.value("genlock_controller_registry_up") == 1
        assert seen.value("genlock_controller_registry_refills_total") == 0
        assert 0 <= seen.value("genlock_controller_loop_age_seconds") < 60
        assert seen.value("genlock_controller_events_total") > 0
        world.fleet.workers["decode-1"].running_requests = 1
        await world.operations.drain(["decode-1"], [], ME)
        await world.until(lambda state: state.rows["decode-1"].phase is Phase.DRAINING)
        seen = told(world)
        assert seen.value("genlock_fleet_drains") == 1
        assert seen.value("genlock_fleet_workers", role="decode", phase="draining") == 1
        assert seen.value("genlock_fleet_settled") == 0


async def test_restarts_and_failed_starts_are_counted_by_role() -> None:
    async with World(seed=(1, 1)) as world:
        await world.settled()
        assert told(world).value("genlock_fleet_restarts_total") == 0
        # It dies, its next start fails, the one after that works.
        world.fleet.refuse.append(NoCapacity("no_place", "no node"))
        world.fleet.die("decode-0")
        await world.until(lambda state: state.rows["decode-0"].restarts == 2)
        await world.settled()
        seen = told(world)
        assert seen.by("genlock_fleet_restarts_total", "role") == {("prefill",): 0, ("decode",): 2}
        # That it died when it was ready is no failed start.
        assert seen.by("genlock_fleet_failed_starts_total", "role") == {("prefill",): 0, ("decode",): 1}


class Says:
    def __init__(self, *verdicts: Verdict | Exception) -> None:
        self.verdicts = list(verdicts)

    async def decide(self, _view, _now_ms):
        if not self.verdicts:
            return None
        verdict = self.verdicts.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


async def test_decisions_by_outcome_and_what_went_wrong_with_them() -> None:
    async with World(seed=(1, 2)) as world:
        await world.settled()
        says = Says(
            Verdict(None, None, "enough"), Verdict(2, 1, "moves"), ZeroDivisionError(), Verdict(999, 1, "cannot be"),
        )  # fmt: skip
        operations = Operations(world.controller, says, autoscale_ms=1)
        await operations.set_autoscale(lambda _kept: "{}", None, ME)
        operations.start()
        async with asyncio.timeout(10):
            while says.verdicts:
                await asyncio.sleep(0.005)
        await operations.stop()
        seen = told(world, operations)
        counts = seen.by("genlock_autoscale_decisions_total", "role", "outcome")
        assert {key: count for key, count in counts.items() if count} == {
            ("prefill", "held"): 1, ("decode", "held"): 1, ("prefill", "up"): 1, ("decode", "down"): 1,
        }  # fmt: skip
        assert len(counts) == 6
        assert seen.value("genlock_controller_surprises_total") == 1


async def test_a_registry_that_is_away_and_a_loop_that_stands_show(monkeypatch) -> None:
    async with World() as world:
        await world.settled()
        kept = told(world).value("genlock_controller_events_total")

        async def away(*_args) -> None:
            raise Unavailable("registry_unreachable", "away")

        monkeypatch.setattr(world.registry, "desired", away)
        monkeypatch.setattr(world.registry, "append_event", away)
        async with asyncio.timeout(10):
            while not world.controller.registry_error:
                await asyncio.sleep(0.005)
        world.controller.record("note", "fleet", "while it is away")
        seen = told(world)
        assert seen.value("genlock_controller_registry_up") == 0
        assert seen.value("genlock_controller_events_waiting") == 1
        assert seen.value("genlock_controller_events_total") == kept
        now_ms = world.controller.clocks.now_ms
        world.controller.clocks.now_ms = lambda: now_ms() + 90_000
        world.controller.tally.turned_ms = now_ms()
        assert 90 <= told(world).value("genlock_controller_loop_age_seconds") < 91


async def test_one_that_was_superseded_tells_its_process_alone() -> None:
    async with World() as world:
        await world.settled()
        world.controller.superseded = True
        registry = controller_registry(lambda: read_controller(world.controller, world.operations), "1.2")
        seen = Scrape.of(generate_latest(registry).decode())
        own = {name for name in seen.names() if name.startswith("genlock_")}
        assert own == {"genlock_build_info"}
        assert seen.by("genlock_build_info", "role", "version") == {("controller", "1.2"): 1}
