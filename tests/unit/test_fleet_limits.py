"""How many workers there may be: one number, which whoever names, keeps or asks workers derives its own from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cluster.autoscale.policy import policy_from
from cluster.control.api import Change, FleetView, WorkerRow
from cluster.gateway import fleet as fleet_module
from cluster.gateway.fleet import Fleet
from cluster.gateway.watch import View, follow
from cluster.kube.client import MAX_PODS
from cluster.operators.convert import fleet_message, names_of
from cluster.operators.fleet import FleetOperations
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Desired, WorkerRecord
from cluster.roles import MAX_FLEET, MAX_WORKERS, Role
from cluster.router import route
from cluster.settings import Config
from decode.peers import MAX_PEERS
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.errors import InvalidInput
from tests.support.control_world import World
from wire.dial import MAX_CHANNELS
from wire.options import MAX_MESSAGE_BYTES

ROOT = Path(__file__).resolve().parents[2]
# As many again surge while the wanted ones drain.
RECORDS = tuple(
    WorkerRecord(f"{role.value}-{number}", role, f"host-{role.value}-{number}:7001", number + 1, "aa")
    for role in Role
    for number in range(2 * MAX_WORKERS)
)


def status_of(record: WorkerRecord) -> worker_pb2.WorkerStatus:
    peers = [other for other in RECORDS if other.role is Role.PREFILL] if record.role is Role.DECODE else []
    return worker_pb2.WorkerStatus(
        worker_id=record.worker_id, role=record.role.value, incarnation=record.incarnation, layout_fingerprint="aa",
        peers=[
            worker_pb2.PeerProof(worker_id=peer.worker_id, incarnation=(1 << 63) - peer.incarnation, passed=True)
            for peer in peers
        ],
    )  # fmt: skip


async def test_a_gateway_takes_as_many_workers_as_a_controller_may_name() -> None:
    assert len(RECORDS) == MAX_FLEET
    registry = MemoryRegistry(lambda: 0.0)
    for record in RECORDS:
        await registry.put_worker(record, 60_000)
    names = frozenset(names_of([record.worker_id for record in RECORDS], "workers"))
    assert len(names) == MAX_FLEET
    fleet = follow(Fleet(), View(), await registry.workers(), Desired()).fleet
    for record in RECORDS:
        fleet = fleet.answered(record.worker_id, record.endpoint, status_of(record))
    assert fleet.workers.keys() == names
    assert fleet.serving()
    assert route(fleet.view({})).decode.role is Role.DECODE


def test_what_is_kept_of_each_worker_has_room_for_all() -> None:
    assert MAX_PEERS >= 2 * MAX_WORKERS, "prefill workers that a decode worker knows"
    assert MAX_CHANNELS >= MAX_FLEET, "workers that a controller asks again and again"
    assert MAX_PODS > MAX_FLEET, "each in a pod of its own, and the head"


def test_the_largest_fleet_is_told_in_one_message() -> None:
    statuses = {record.worker_id: status_of(record) for record in RECORDS}
    rows = tuple(
        WorkerRow(r.worker_id, r.role, "READY", "", 0, endpoint=r.endpoint, status=statuses[r.worker_id])
        for r in RECORDS
    )
    assert fleet_message(FleetView(Desired(), rows, True)).ByteSize() < MAX_MESSAGE_BYTES


def test_settings_policies_and_charts_name_the_same_number() -> None:
    sections = {section.name: section for section in dataclasses.fields(Config)}
    assert {"workers", "control"} <= sections.keys()
    defaults = Config()
    for section, field in (("workers", "prefill"), ("workers", "decode"), ("control", "surge")):
        specs = {spec.name: spec for spec in dataclasses.fields(getattr(defaults, section))}
        assert specs[field].metadata["high"] == MAX_WORKERS, field
    schema = json.loads((ROOT / "deploy/helm/genlock/values.schema.json").read_text())
    group = schema["definitions"]["group"]["properties"]
    assert {group[name]["maximum"] for name in ("replicas", "minReplicas", "maxReplicas")} == {MAX_WORKERS}


@pytest.mark.parametrize("field", ["prefill.low", "prefill.high", "decode.low", "decode.high"])
def test_a_policy_wants_no_more(field: str) -> None:
    section, leaf = field.split(".")
    others = f", high: {MAX_WORKERS}" if leaf == "low" else ""
    policy_from(f"{section}: {{{leaf}: {MAX_WORKERS}{others}}}")
    with pytest.raises(InvalidInput) as raised:
        policy_from(f"{section}: {{{leaf}: {MAX_WORKERS + 1}{others}}}")
    assert raised.value.field == f"autoscale.{field}"


async def test_an_operator_asks_for_no_more() -> None:
    async with World() as world:
        await world.settled()
        world.fleet.room = MAX_FLEET
        asked = FleetOperations(world.operations, lambda: 0.0)
        dry = pb.Mutation(dry_run=True)
        for count in (MAX_WORKERS, MAX_WORKERS + 1):
            calls = (
                lambda count=count: asked.scale(pb.ScaleRequest(decode=count, mutation=dry), "me"),
                lambda count=count: asked.apply(pb.ApplyRequest(text=f"decode: {count}", mutation=dry), "me"),
                lambda count=count: world.operations.scale(None, count, Change("me", dry_run=True)),
            )
            for call in calls:
                if count == MAX_WORKERS:
                    await call()
                    continue
                with pytest.raises(InvalidInput, match=str(MAX_WORKERS)) as raised:
                    await call()
                assert raised.value.field == "decode"


def test_whether_a_fleet_serves_is_known_at_the_first_pair_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked with every answer of every worker: all pairs each time would take a gateway's whole core."""
    fleet = Fleet()
    for record in RECORDS[:: MAX_WORKERS // 8]:
        fleet = fleet.added(record.worker_id, record.role, record.endpoint)
    for record in RECORDS[:: MAX_WORKERS // 8]:
        status = worker_pb2.WorkerStatus(worker_id=record.worker_id, role=record.role.value, layout_fingerprint="aa")
        fleet = fleet.answered(record.worker_id, record.endpoint, status)
    looked: list[int] = []
    real = fleet_module.layouts_fit
    monkeypatch.setattr(fleet_module, "layouts_fit", lambda *pair: looked.append(1) or real(*pair))
    assert fleet.serving()
    assert len(looked) == 1
    assert len(fleet.workers) == 32
