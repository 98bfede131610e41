"""What operators ask, over gRPC, of a cluster whose workers are stand-ins."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from cluster.gateway.identity import BearerTenants, Caller
from cluster.launch.doors import Seams
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from genlock.v1 import inference_pb2, inference_pb2_grpc
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc as services
from kvstore.errors import Conflict, InvalidInput, NotFound, PermissionDenied, Refused, Unauthenticated
from tests.support.fake_workers import build_fake, config, load_fake
from wire.calls import answer, responses

SETTLE_S = 20


class Operator:
    """Calls by name; `settled` waits until the fleet is as wanted."""

    def __init__(self, stub, metadata=()) -> None:
        self.stub, self.metadata = stub, metadata

    async def __call__(self, name: str, request):
        return await answer(getattr(self.stub, name)(request, timeout=10, metadata=self.metadata))

    async def fleet(self) -> pb.FleetView:
        return await self("GetFleet", pb.GetFleetRequest())

    async def settled(self, prefill: int, decode: int) -> pb.FleetView:
        async with asyncio.timeout(SETTLE_S):
            while True:
                fleet = await self.fleet()
                ready = [worker.role for worker in fleet.workers if worker.phase == "READY"]
                if fleet.settled and (ready.count("prefill"), ready.count("decode")) == (prefill, decode):
                    return fleet
                await asyncio.sleep(0.05)


@asynccontextmanager
async def cluster(seams: Seams | None = None, metadata=(), **flags) -> AsyncIterator[Operator]:
    running = Cluster(config(**flags), InProcessLauncher(build_fake), load_fake, seams=seams)
    endpoint = await running.start()
    try:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            operator = Operator(services.OperatorServiceStub(channel), metadata)
            operator.channel = channel
            yield operator
    finally:
        await running.stop(0)


async def test_scale_up_down_and_the_log_of_it() -> None:
    async with cluster() as operator:
        before = await operator.settled(1, 1)
        plan = await operator(
            "Scale",
            pb.ScaleRequest(decode=2, mutation=pb.Mutation(reason="more load", expected_revision=before.revision)),
        )
        assert (plan.added_prefill, plan.added_decode, list(plan.removed)) == (0, 1, [])
        assert plan.fleet.revision > before.revision
        grown = await operator.settled(1, 2)
        assert {worker.worker_id for worker in grown.workers} >= {"prefill-0", "decode-0", "decode-1"}
        plan = await operator("Scale", pb.ScaleRequest(decode=1))
        assert len(plan.removed) == 1
        await operator.settled(1, 1)
        events = (await operator("ListEvents", pb.ListEventsRequest())).events
        scales = [event for event in events if event.kind == "scale"]
        assert [event.actor for event in scales if event.actor != "controller"] == ["default", "default"]
        assert scales[0].reason == "more load"
        assert [event.sequence for event in events] == sorted({event.sequence for event in events})


async def test_a_change_against_an_old_view_is_a_conflict_and_changes_nothing() -> None:
    async with cluster() as operator:
        seen = await operator.settled(1, 1)
        with pytest.raises(Conflict) as caught:
            await operator(
                "Scale", pb.ScaleRequest(decode=3, mutation=pb.Mutation(expected_revision=seen.revision + 7))
            )
        assert caught.value.reason == "revision_moved"
        with pytest.raises(Conflict) as caught:
            await operator("Scale", pb.ScaleRequest(decode=3, current_decode=2))
        assert caught.value.reason == "counts_moved"
        assert (await operator.fleet()).desired_decode == 1


async def test_a_key_is_carried_out_once_and_a_dry_run_never() -> None:
    async with cluster() as operator:
        seen = await operator.settled(1, 1)
        dry = await operator("Scale", pb.ScaleRequest(decode=2, mutation=pb.Mutation(dry_run=True)))
        assert dry.added_decode == 1
        assert (await operator.fleet()).revision == seen.revision
        request = pb.ScaleRequest(decode=2, mutation=pb.Mutation(idempotency_key="k1"))
        first, second = await operator("Scale", request), await operator("Scale", request)
        assert not first.fleet.repeated
        assert second.fleet.repeated
        assert second.fleet.revision == first.fleet.revision


async def test_cordon_drain_restart() -> None:
    async with cluster(workers__decode=2) as operator:
        await operator.settled(1, 2)
        fleet = await operator("Cordon", pb.CordonRequest(workers=["decode-0"]))
        assert {worker.worker_id: worker.cordoned for worker in fleet.workers}["decode-0"]
        await operator("Uncordon", pb.CordonRequest(workers=["decode-0"]))
        old = {worker.worker_id: worker.incarnation for worker in (await operator.settled(1, 2)).workers}
        await operator("Restart", pb.RestartRequest(worker="decode-1", deadline_ms=1000))
        async with asyncio.timeout(SETTLE_S):
            while True:
                now = {worker.worker_id: worker for worker in (await operator.fleet()).workers}
                if now["decode-1"].restarts and now["decode-1"].phase == "READY":
                    break
                await asyncio.sleep(0.05)
        assert old.keys() == now.keys()
        await operator("Drain", pb.DrainWorkersRequest(workers=["decode-0"], deadline_ms=1000))
        assert (await operator.settled(1, 1)).desired_decode == 1
        with pytest.raises(Refused) as caught:
            await operator("Drain", pb.DrainWorkersRequest(workers=["decode-1"]))
        assert caught.value.reason == "last_worker"
        described = await operator("DescribeWorker", pb.DescribeWorkerRequest(worker_id="decode-1"))
        assert described.worker.phase == "READY"
        assert any(event.kind == "restart" for event in described.events)


@pytest.mark.parametrize(
    ("name", "request_", "error", "field"),
    [
        ("Scale", pb.ScaleRequest(), InvalidInput, "prefill"),
        ("Scale", pb.ScaleRequest(decode=-1), InvalidInput, "decode"),
        ("Scale", pb.ScaleRequest(decode=10**6), InvalidInput, "decode"),
        ("Scale", pb.ScaleRequest(decode=0), Refused, "decode"),
        ("Scale", pb.ScaleRequest(decode=1, mutation=pb.Mutation(reason="x" * 600)), InvalidInput, "mutation.reason"),
        ("Cordon", pb.CordonRequest(), InvalidInput, "workers"),
        ("Cordon", pb.CordonRequest(workers=["no"]), NotFound, "workers"),
        ("Drain", pb.DrainWorkersRequest(workers=["decode-0"], deadline_ms=-1), InvalidInput, "deadline_ms"),
        ("Restart", pb.RestartRequest(worker=""), InvalidInput, "worker"),
        ("DescribeWorker", pb.DescribeWorkerRequest(worker_id="no"), NotFound, "worker_id"),
        ("DescribeRequest", pb.DescribeRequestRequest(request_id="no"), NotFound, "request_id"),
        ("Explain", pb.ExplainRequest(code="no_such_code"), NotFound, "code"),
        ("Apply", pb.ApplyRequest(text="decode: many"), InvalidInput, "decode"),
        ("Apply", pb.ApplyRequest(text="workers: 3"), InvalidInput, "workers"),
        ("Apply", pb.ApplyRequest(text="[1]"), InvalidInput, "text"),
        ("SetAutoscale", pb.SetAutoscaleRequest(policy="slo: {ttft_ms: no}"), InvalidInput, "autoscale.slo.ttft_ms"),
        ("ListEvents", pb.ListEventsRequest(limit=-1), InvalidInput, "limit"),
    ],
)
async def test_bad_requests_name_the_field(name: str, request_, error: type, field: str) -> None:
    async with cluster() as operator:
        with pytest.raises(error) as caught:
            await operator(name, request_)
        assert caught.value.field == field
        assert (await operator.settled(1, 1)).desired_decode == 1


async def test_apply_tells_what_differs_then_makes_it_so() -> None:
    text = "decode: 2\nautoscale:\n  decode: {low: 1, high: 3}\n"
    async with cluster() as operator:
        await operator.settled(1, 1)
        dry = await operator("Apply", pb.ApplyRequest(text=text, mutation=pb.Mutation(dry_run=True)))
        assert [(change.field, change.before, change.after) for change in dry.changes] == [
            ("decode", "1", "2"), ("autoscale", "off", "on"),
        ]  # fmt: skip
        assert (await operator.fleet()).desired_decode == 1
        await operator("Apply", pb.ApplyRequest(text=text))
        again = await operator("Apply", pb.ApplyRequest(text=text))
        assert not again.changes
        view = await operator("GetAutoscale", pb.GetAutoscaleRequest())
        assert view.enabled
        assert "high: 3" in view.policy
        merged = await operator("SetAutoscale", pb.SetAutoscaleRequest(policy="decode: {low: 2, high: 3}", merge=True))
        assert [(change.field, change.after) for change in merged.changes] == [("autoscale.decode.low", "2")]
        assert (await operator("PauseAutoscale", pb.PauseAutoscaleRequest())).paused
        assert not (await operator("ResumeAutoscale", pb.PauseAutoscaleRequest())).paused
        off = await operator("SetAutoscale", pb.SetAutoscaleRequest(policy=""))
        assert not off.enabled


async def test_decisions_are_kept_and_explained() -> None:
    async with cluster(control__autoscale_ms=100) as operator:
        await operator.settled(1, 1)
        await operator("SetAutoscale", pb.SetAutoscaleRequest(policy="decode: {low: 2, high: 3}\nup: {delay_ms: 0}"))
        grown = await operator.settled(1, 2)
        assert grown.desired_decode == 2
        told = await operator("ExplainAutoscale", pb.ExplainAutoscaleRequest(limit=200))
        moved = next(one for one in told.decisions if not one.held)
        assert (moved.before.decode, moved.target.decode) == (1, 2)
        assert any("bounds" in reason for reason in moved.reasons)
        assert "decode.running" in moved.inputs
        events = (await operator("ListEvents", pb.ListEventsRequest())).events
        assert any(event.kind == "scale" and event.actor == "autoscaler" for event in events)


async def test_events_can_be_watched() -> None:
    async with cluster() as operator:
        await operator.settled(1, 1)
        kinds = []
        call = operator.stub.WatchEvents(pb.ListEventsRequest(), timeout=10)
        async for event in responses(call):
            kinds.append(event.kind)
            if kinds == ["controller"] or (kinds and "cordon" not in kinds and len(kinds) == 1):
                await operator("Cordon", pb.CordonRequest(workers=["decode-0"]))
            if event.kind == "cordon":
                call.cancel()
                break
        assert "cordon" in kinds


async def test_requests_are_listed_while_they_run_and_described_after() -> None:
    async with cluster() as operator:
        await operator.settled(1, 1)
        stub = inference_pb2_grpc.InferenceServiceStub(operator.channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="hello", request_id="mine"), timeout=10)
        messages = [message async for message in responses(call)]
        described = await operator("DescribeRequest", pb.DescribeRequestRequest(request_id="mine"))
        assert described.outcome == "ok"
        assert described.request.server_id == messages[-1].server_id
        assert described.request.prompt_tokens == 5
        assert described.request.decode_worker == "decode-0"
        by_id = await operator("DescribeRequest", pb.DescribeRequestRequest(request_id=messages[-1].server_id))
        assert by_id == described
        assert (await operator("ListRequests", pb.ListRequestsRequest())).total == 0


async def test_explain_answers_over_the_wire() -> None:
    async with cluster() as operator:
        told = await operator("Explain", pb.ExplainRequest(code="digest_mismatch"))
        assert (told.status, told.http_status, told.retry) == ("DATA_LOSS", 500, True)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


CALLERS = {
    hashlib.sha256(b"op").digest(): Caller("ops", operator=True),
    hashlib.sha256(b"app").digest(): Caller("acme"),
}
READS = ("GetFleet", "ListNodes", "ListEvents", "ListRequests", "ListLeases", "GetAutoscale", "ExplainAutoscale")


async def test_only_operators_see_and_change_the_fleet() -> None:
    seams = Seams(authenticator=BearerTenants(CALLERS))
    async with cluster(seams, bearer("op")) as operator:
        await operator.settled(1, 1)
        method_names = [method.name for method in pb.DESCRIPTOR.services_by_name["OperatorService"].methods]
        for method in pb.DESCRIPTOR.services_by_name["OperatorService"].methods:
            request = getattr(pb, method.input_type.name)()
            for metadata, error in ((bearer("app"), PermissionDenied), ((), Unauthenticated)):
                call = getattr(operator.stub, method.name)(request, timeout=10, metadata=metadata)
                reply = anext(responses(call)) if method.server_streaming else answer(call)
                with pytest.raises(error):
                    await reply
        assert set(READS) < set(method_names)
        await operator("Cordon", pb.CordonRequest(workers=["decode-0"]))
        events = (await operator("ListEvents", pb.ListEventsRequest())).events
        assert next(event for event in events if event.kind == "cordon").actor == "ops"
