"""What every change has in common: its key is its own, its expected revision is judged first, it undoes nobody's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.autoscale.policy import policy_from
from cluster.control.operations import Operations
from cluster.operators.fleet import FLEET_RPCS, FleetOperations
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Desired
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import Conflict
from tests.support.control_world import World
from wire.clocks import now_ms, unix_ms

# RPC -> a request that changes something, and one that does not on a fleet of two and two that has no policy.
CHANGES = {
    "Scale": (pb.ScaleRequest(decode=3), pb.ScaleRequest(decode=2)),
    "Cordon": (pb.CordonRequest(workers=["decode-0"]), pb.CordonRequest(workers=["decode-1"])),
    "Uncordon": (pb.CordonRequest(workers=["decode-1"]), pb.CordonRequest(workers=["decode-0"])),
    "Drain": (pb.DrainWorkersRequest(workers=["decode-0"]), pb.DrainWorkersRequest(workers=["decode-1"])),
    "Restart": (pb.RestartRequest(worker="decode-0"), pb.RestartRequest(worker="decode-1")),
    "Apply": (pb.ApplyRequest(text="decode: 3"), pb.ApplyRequest(text="decode: 2")),
    "SetAutoscale": (pb.SetAutoscaleRequest(policy="mode: slo"), pb.SetAutoscaleRequest(policy="")),
    "PauseAutoscale": (pb.PauseAutoscaleRequest(), pb.PauseAutoscaleRequest()),
    "ResumeAutoscale": (pb.PauseAutoscaleRequest(), pb.PauseAutoscaleRequest()),
}
EACH = pytest.mark.parametrize("rpc", CHANGES)


class NoScaler:
    async def decide(self, view: object, now_ms: float) -> None:
        return None


class Contended(MemoryRegistry):
    """`rival`: what somebody else makes of the wanted state once, in between a change's read and its write."""

    rival = None

    async def replace_desired(self, wanted: Desired, expected_revision: int) -> Desired:
        rival, self.rival = self.rival, None
        if rival is not None:
            await super().replace_desired(rival(self._desired), self._desired.revision)
        return await super().replace_desired(wanted, expected_revision)


class Fleet:
    def __init__(self, world: World) -> None:
        self.world = world
        self._operations = FleetOperations(Operations(world.controller, NoScaler()), unix_ms)

    async def __call__(self, rpc: str, request, actor: str = "ann", **mutation: object):
        asked = type(request)()
        asked.CopyFrom(request)
        asked.mutation.CopyFrom(pb.Mutation(**mutation))
        return await self._operations.call(rpc, asked, actor)

    async def kept(self) -> Desired:
        return await self.world.registry.desired()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with World(seed=(2, 2), registry=Contended(now_ms)) as world:
        await world.settled()
        yield Fleet(world)


def test_every_change_is_looked_at_here() -> None:
    methods = pb.DESCRIPTOR.services_by_name["OperatorService"].methods_by_name
    assert set(CHANGES) == {rpc for rpc in FLEET_RPCS if "mutation" in methods[rpc].input_type.fields_by_name}


@EACH
async def test_a_key_is_one_request_of_one_caller(fleet: Fleet, rpc: str) -> None:
    wants, other = CHANGES[rpc]
    await fleet(rpc, wants, idempotency_key="K1")
    before = await fleet.kept()
    await fleet(rpc, wants, idempotency_key="K1")
    assert await fleet.kept() == before, "the same request again is carried out once"
    stranger = next(name for name in CHANGES if name != rpc)
    wrong = [(rpc, wants, "bob"), (stranger, CHANGES[stranger][0], "ann")]
    if other != wants:
        wrong.append((rpc, other, "ann"))
    for name, request, actor in wrong:
        for dry_run in (False, True):
            with pytest.raises(Conflict) as caught:
                await fleet(name, request, actor, idempotency_key="K1", dry_run=dry_run)
            assert (caught.value.reason, caught.value.field) == ("key_used", "mutation.idempotency_key")
            assert rpc in caught.value.message
    assert await fleet.kept() == before


@EACH
async def test_a_retry_under_its_key_is_answered_though_the_revision_has_moved_by_it(fleet: Fleet, rpc: str) -> None:
    revision = (await fleet.kept()).revision
    await fleet(rpc, CHANGES[rpc][0], idempotency_key="K1", expected_revision=revision)
    before = await fleet.kept()
    await fleet(rpc, CHANGES[rpc][0], idempotency_key="K1", expected_revision=revision)
    assert await fleet.kept() == before


@EACH
@pytest.mark.parametrize("dry_run", [True, False])
async def test_an_expected_revision_is_judged_before_all_else(fleet: Fleet, rpc: str, dry_run: bool) -> None:
    before = await fleet.kept()
    for request in CHANGES[rpc]:  # also one that changes nothing
        with pytest.raises(Conflict) as caught:
            await fleet(rpc, request, expected_revision=before.revision + 7, dry_run=dry_run)
        assert (caught.value.reason, caught.value.field) == ("revision_moved", "expected_revision")
    assert await fleet.kept() == before


async def test_a_key_of_an_earlier_release_is_answered_as_it_was(fleet: Fleet) -> None:
    await fleet.world.registry.remember("K1", b"41", 60_000)
    before = await fleet.kept()
    await fleet("Scale", pb.ScaleRequest(decode=3), idempotency_key="K1")
    assert await fleet.kept() == before


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("PauseAutoscale", pb.PauseAutoscaleRequest()),
        ("ResumeAutoscale", pb.PauseAutoscaleRequest()),
        ("SetAutoscale", pb.SetAutoscaleRequest(policy="slo: {ttft_ms: 1500}", merge=True)),
        ("Scale", pb.ScaleRequest(decode=3)),
        ("Apply", pb.ApplyRequest(text="decode: 3")),
        ("Cordon", pb.CordonRequest(workers=["decode-0"])),
        ("Drain", pb.DrainWorkersRequest(workers=["decode-0"])),
    ],
)
async def test_what_somebody_else_changes_in_between_is_not_undone(fleet: Fleet, rpc: str, request_) -> None:
    await fleet("SetAutoscale", pb.SetAutoscaleRequest(policy="decode: {low: 1, high: 3}"))
    fleet.world.registry.rival = lambda kept: replace(kept, autoscale="decode: {low: 2, high: 7}\n", prefill=4)
    await fleet(rpc, request_)
    kept = await fleet.kept()
    policy = policy_from(kept.autoscale)
    assert (policy.decode.low, policy.decode.high, kept.prefill) == (2, 7, 4)


async def test_what_a_merge_changed_is_told_of_the_policy_that_it_met(fleet: Fleet) -> None:
    await fleet("SetAutoscale", pb.SetAutoscaleRequest(policy="slo: {ttft_ms: 1000}"))
    fleet.world.registry.rival = lambda kept: replace(kept, autoscale="slo: {ttft_ms: 1200}\n")
    view = await fleet("SetAutoscale", pb.SetAutoscaleRequest(policy="slo: {ttft_ms: 1500}", merge=True))
    assert [(one.field, one.before, one.after) for one in view.changes] == [
        ("autoscale.slo.ttft_ms", "1200.0", "1500.0")
    ]


async def test_apply_keeps_all_or_nothing(fleet: Fleet) -> None:
    before = await fleet.kept()
    applied = await fleet("Apply", pb.ApplyRequest(text="decode: 3\nautoscale: {mode: slo}"))
    kept = await fleet.kept()
    assert (kept.decode, bool(kept.autoscale), applied.fleet.revision) == (3, True, kept.revision)
    assert kept.revision == before.revision + 1, "one change"
