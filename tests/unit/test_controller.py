"""The controller's shell over workers that the test holds in its hands."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from dataclasses import replace

import pytest

from cluster.control.api import Change
from cluster.control.hands import Verdict
from cluster.control.operations import Operations
from cluster.control.scaling import PolicyScaler
from cluster.control.state import Drain, Kill, Phase, Start, Stop
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Desired
from cluster.roles import Role
from genlock.v1 import operator_pb2
from kvstore.errors import Conflict, InvalidInput, NoCapacity, NotFound, Refused, Unavailable
from tests.support.control_world import POLICY, FakeFleet, World, now_ms
from wire.clocks import unix_ms
from wire.ending import end_tasks

ME = Change("me", "because")


async def test_a_fleet_starts_settles_and_is_registered():
    async with World(seed=(1, 2)) as world:
        await world.settled()
        view = await world.operations.view()
        assert [row.worker_id for row in view.workers] == ["decode-0", "decode-1", "prefill-0"]
        assert all(row.phase == "READY" and row.node == "node-a" for row in view.workers)
        assert all(row.status is not None and row.status.worker_id == row.worker_id for row in view.workers)
        assert (view.desired.controller_starts, view.settled, view.reason) == (1, True, "")
        await world.until(lambda _s: len(world.registry._workers) == 3, "records")
        events = await world.operations.events()
        assert {"controller", "phase"} <= {event.kind for event in events}
        assert all(event.at_ms > 1_600_000_000_000 for event in events)


async def test_a_worker_that_dies_comes_back_as_another_life_under_its_name():
    async with World() as world:
        await world.settled()
        before = world.controller.state.rows["decode-0"]
        world.fleet.die("decode-0")
        after = (
            await world.until(
                lambda s: s.rows["decode-0"].life > before.life and s.rows["decode-0"].phase is Phase.READY
            )
        ).rows["decode-0"]
        assert after.incarnation != before.incarnation
        assert after.restarts == 1
        assert world.fleet.done.count(("start", "decode-0")) == 2


async def test_a_start_that_fails_is_tried_again_and_its_reason_is_seen():
    fleet = FakeFleet()
    fleet.refuse = [NoCapacity("no_place", "8 GPUs wanted, 0 free"), Unavailable("x", "port taken")]
    async with World(fleet) as world:
        await world.until(lambda s: any("8 GPUs" in row.reason for row in s.rows.values()), "the reason")
        assert not (await world.operations.view()).settled
        await world.settled()


async def test_a_restarted_controller_finds_target_and_workers_and_starts_nobody():
    fleet, registry = FakeFleet(), MemoryRegistry(now_ms)
    async with World(fleet, registry, (1, 1)) as world:
        await world.settled()
        await world.operations.scale(None, 2, ME)
        await world.settled()
    fleet.done.clear()
    async with World(fleet, registry, (1, 1)) as world:
        await world.settled()
        view = await world.operations.view()
        assert (view.desired.decode, view.desired.controller_starts) == (2, 2)
        assert fleet.done == []


async def test_a_drain_survives_the_controller_that_was_asked():
    """The target is kept before the answer, so the next controller carries it out."""
    fleet, registry = FakeFleet(), MemoryRegistry(now_ms)
    async with World(fleet, registry, (1, 2)) as world:
        await world.settled()
        # This controller never gets to its next turn.
        world.controller._heard = None  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            await world.operations.drain(["decode-0"], [], ME)
    assert (await registry.desired()).decode == 1
    async with World(fleet, registry) as world:
        await world.settled()
        assert set(fleet.workers) == {"prefill-0", "decode-1"}
        assert ("kill", "decode-0") not in fleet.done


async def test_scale_down_drains_and_waits_for_the_last_request():
    async with World(seed=(1, 2)) as world:
        await world.settled()
        world.fleet.workers["decode-0"].running_requests = 3
        world.fleet.workers["decode-1"].running_requests = 1
        await world.until(lambda s: s.rows["decode-1"].load == 1 and s.rows["decode-0"].load == 3)
        plan = await world.operations.scale(None, 1, ME, current=(1, 2))
        assert (plan.removed, plan.added_decode) == (("decode-1",), 0)
        await world.until(lambda _s: ("drain", "decode-1") in world.fleet.done)
        await world.until(lambda s: s.rows["decode-1"].told_ms > s.rows["decode-1"].open_until_ms)
        assert ("stop", "decode-1") not in world.fleet.done
        world.fleet.workers["decode-1"].running_requests = 0
        await world.until(lambda s: "decode-1" not in s.rows)
        assert world.fleet.done[-1] == ("stop", "decode-1")


async def test_a_frozen_step_loop_is_degraded_then_killed_and_a_busy_one_is_not():
    policy = replace(POLICY, healthy_ms=10_000)
    async with World(seed=(1, 2), policy=policy) as world:
        await world.settled()
        busy = world.fleet.workers["decode-1"]
        busy.running_requests, busy.waiting_requests, busy.step_age_ms = 4096, 4096, 499
        world.fleet.workers["decode-0"].step_age_ms = 501
        await world.until(lambda s: s.rows["decode-0"].phase is Phase.DEGRADED)
        await world.until(lambda s: s.rows["decode-0"].restarts == 1 and s.rows["decode-0"].phase is Phase.READY)
        assert ("kill", "decode-0") in world.fleet.done
        assert not [what for what in world.fleet.done if what[1] == "decode-1" and what[0] != "start"]


async def test_a_registry_that_was_flushed_gets_back_what_is_wanted():
    async with World(seed=(1, 2)) as world:
        await world.settled()
        revision = world.controller.state.desired.revision
        world.registry._desired = Desired()
        await world.until(lambda s: s.desired.revision > revision or world.registry._desired.revision > 0)
        assert (await world.registry.desired()).decode == 2
        await world.settled()
        assert len(world.fleet.workers) == 3
        kept = await world.registry.desired()
        assert kept.refills == world.controller.tally.refills == 1
        assert abs(kept.refilled_ms - unix_ms()) < 60_000
        async with asyncio.timeout(5):
            while not (told := [one for one in await world.operations.events(0, 1000) if one.kind == "registry"]):
                await asyncio.sleep(0.01)
        assert [one.message for one in told] == [f"lost revision {revision}, had 0: written again as {kept.revision}"]


async def test_a_registry_that_is_away_stops_changes_and_nothing_else():
    async with World() as world:
        await world.settled()
        real = world.registry.desired

        async def away() -> Desired:
            raise Unavailable("registry_unreachable", "away")

        world.registry.desired = away
        with pytest.raises(Unavailable, match="away"):
            await world.operations.scale(None, 2, ME)
        world.fleet.die("decode-0")
        await world.until(lambda s: s.rows["decode-0"].restarts == 1 and s.rows["decode-0"].phase is Phase.READY)
        assert "cannot be read" in (await world.operations.view()).reason
        world.registry.desired = real
        await world.settled()
        assert len(world.fleet.workers) == 2


async def test_an_earlier_life_of_the_controller_that_still_runs_decides_nothing():
    fleet, registry = FakeFleet(), MemoryRegistry(now_ms)
    async with World(fleet, registry) as old:
        await old.settled()
        async with World(FakeFleet(), registry) as new:
            async with asyncio.timeout(10):
                while not old.controller.superseded:
                    await asyncio.sleep(0.005)
            fleet.done.clear()
            fleet.die("decode-0")
            await asyncio.sleep(0.1)
            assert fleet.done == []
            with pytest.raises(Unavailable, match="later life"):
                await old.operations.scale(None, 2, ME)
            await new.operations.scale(None, 2, ME)
            await new.settled()


async def test_a_turn_that_raises_is_survived():
    async with World() as world:
        await world.settled()
        world.controller.hear(object())  # type: ignore[arg-type]
        await world.until(lambda _s: world.controller.surprises == 1)
        world.fleet.die("decode-0")
        await world.until(lambda s: s.rows["decode-0"].restarts == 1)


async def test_a_start_that_hangs_is_cancelled_by_the_kill():
    fleet = FakeFleet()
    fleet.hang = asyncio.Event()
    async with World(fleet, policy=replace(POLICY, start_ms=50)) as world:
        await world.until(lambda _s: ("kill", "decode-0") in fleet.done)
        fleet.hang = None
        await world.settled()


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "reason", "field"),
    [
        (lambda o: o.scale(None, 257, ME), InvalidInput, "bad_count", "decode"),
        (lambda o: o.scale(-1, None, ME), InvalidInput, "bad_count", "prefill"),
        (lambda o: o.scale(None, 0, ME), Refused, "last_worker", "decode"),
        (lambda o: o.scale(None, 2, ME, current=(1, 3)), Conflict, "counts_moved", "current_decode"),
        (
            lambda o: o.scale(None, 2, replace(ME, expected_revision=99)),
            Conflict,
            "revision_moved",
            "expected_revision",
        ),
        (lambda o: o.scale(None, 9, ME), NoCapacity, "no_place", ""),
        (lambda o: o.drain(["decode-9"], [], ME), NotFound, "unknown_worker", "workers"),
        (lambda o: o.drain([], ["node-z"], ME), NotFound, "unknown_node", "nodes"),
        (lambda o: o.drain([], [], ME), InvalidInput, "nothing_named", "workers"),
        (lambda o: o.drain(["decode-0"], [], ME), Refused, "last_worker", "workers"),
        (lambda o: o.drain([], ["node-a"], ME), Refused, "last_worker", "workers"),
        (lambda o: o.drain(["decode-0"], [], ME, deadline_ms=-1), InvalidInput, "bad_deadline", "deadline_ms"),
        (lambda o: o.restart("prefill-0", ME), Refused, "last_worker", "workers"),
        (lambda o: o.cordon(["x"], [], True, ME), NotFound, "unknown_worker", "workers"),
        (lambda o: o.set_autoscale(lambda _kept: "bounds: {}", None, ME), Refused, "no_autoscaler", "policy"),
    ],
)
async def test_refusals_change_nothing(call, kind: type, reason: str, field: str):
    fleet = FakeFleet()
    fleet.room = 5
    async with World(fleet) as world:
        await world.settled()
        before = await world.registry.desired()
        with pytest.raises(kind) as caught:
            await call(world.operations)
        assert (caught.value.reason, caught.value.field) == (reason, field)
        assert await world.registry.desired() == before
        assert len(fleet.done) == 2


async def test_the_same_key_twice_is_carried_out_once_and_a_dry_run_not_at_all():
    async with World(seed=(1, 2)) as world:
        await world.settled()
        dry = await world.operations.scale(None, 1, replace(ME, dry_run=True))
        assert (dry.removed, dry.fleet.desired.decode) == (("decode-1",), 2)
        keyed = replace(ME, idempotency_key="k1")
        first = await world.operations.drain(["decode-0"], [], keyed)
        assert (first.desired.decode, first.repeated) == (1, False)
        second = await world.operations.drain(["decode-0"], [], keyed)
        assert (second.desired.decode, second.repeated) == (1, True)
        await world.until(lambda s: "decode-0" not in s.rows)
        await world.settled()
        assert "decode-1" in world.fleet.workers


async def test_a_restart_keeps_the_name_and_a_forced_drain_may_leave_nobody():
    async with World(seed=(1, 2)) as world:
        await world.settled()
        old = world.fleet.workers["decode-1"].incarnation
        await world.operations.restart("decode-1", ME)
        await world.until(
            lambda s: s.rows["decode-1"].incarnation not in (0, old) and s.rows["decode-1"].phase is Phase.READY
        )
        assert world.controller.state.desired.decode == 2
        await world.operations.drain(["prefill-0"], [], ME, force=True)
        await world.until(lambda s: not s.of(Role.PREFILL))
        kinds = [
            (event.kind, event.subject, event.actor, event.reason) for event in await world.operations.events(0, 1000)
        ]
        assert ("restart", "decode-1", "me", "because") in kinds


async def test_cordon_is_kept_and_taken_back():
    async with World() as world:
        await world.settled()
        view = await world.operations.cordon(["decode-0", "prefill-0"], [], True, ME)
        assert all(row.cordoned for row in view.workers)
        kept = await world.registry.desired()
        assert (kept.cordoned, kept.avoided) == ({"decode-0", "prefill-0"}, frozenset())
        view = await world.operations.cordon(["decode-0"], [], False, ME)
        assert [row.worker_id for row in view.workers if row.cordoned] == ["prefill-0"]


async def test_the_autoscaler_scales_on_the_same_path_and_not_while_paused():
    asked = asyncio.Event()
    record = operator_pb2.AutoscaleDecision(reasons=["backlog"])

    class Scaler:
        async def decide(self, view, now_ms):
            asked.set()
            return Verdict(None, 3, "backlog", record)

    async with World() as world:
        await world.settled()
        operations = Operations(world.controller, Scaler(), autoscale_ms=5)
        operations.start()
        await asyncio.sleep(0.03)
        assert not asked.is_set(), "no policy, no question"
        await operations.set_autoscale(lambda _kept: "bounds: {}", True, ME)
        await asyncio.sleep(0.03)
        assert not asked.is_set(), "paused"
        await operations.set_autoscale(lambda _kept: "bounds: {}", False, ME)
        await world.until(lambda s: len(s.of(Role.DECODE)) == 3)
        await world.settled()
        assert (await operations.decisions(1)) == (record,)
        events = await operations.events(0, 1000)
        assert [(e.actor, e.reason) for e in events if e.kind == "scale" and e.subject == "fleet"] == [
            ("autoscaler", "backlog")
        ]
        await operations.stop()


async def test_answers_that_do_not_come_any_more_get_old_for_the_autoscaler(monkeypatch) -> None:
    async def nobody() -> None:
        return None

    async with World() as world:
        await world.settled()

        async def hangs(_endpoint: str, _timeout_ms: int) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(world.fleet, "status", hangs)
        await asyncio.sleep(0.05)
        view = replace(await world.operations.view(), desired=Desired(1, 1, 1, autoscale="stale_ms: 1000"))
        scaler, asked_ms = PolicyScaler(unix_ms, nobody), min(row.asked_ms for row in view.workers)
        assert 0 < now_ms() - asked_ms < 10_000
        for age_ms, stale in ((1000, False), (1001, True)):
            verdict = await scaler.decide(view, asked_ms + age_ms)
            assert ("metrics are" in verdict.reason) is stale


async def test_a_cancellation_that_is_swallowed_is_repeated() -> None:
    begun = asyncio.Event()

    async def deaf_once() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(deaf_once())
    await begun.wait()
    await end_tasks([task])
    assert task.cancelled()


async def test_what_is_stopped_before_its_first_step_leaves_nothing_that_nobody_awaits() -> None:
    world = World()
    actions = [
        Start("decode-0", Role.DECODE, 1),
        Drain("decode-0", 1, deadline_ms=now_ms() + 1000),
        Stop("decode-0", 1),
        Kill("decode-0", 1),
    ]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for action in actions:
            world.controller._perform(action)
        await world.controller.stop()
        del world
        await asyncio.sleep(0)  # the loop lets go of the tasks' last steps
        gc.collect()
    assert [str(one.message) for one in seen] == []
