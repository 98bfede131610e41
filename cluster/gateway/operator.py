"""OperatorService: what operators ask. This gateway answers for itself; the fleet's part goes to the controller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.gateway.fleet import WorkerRecord
from cluster.gateway.identity import operator
from cluster.gateway.leases import list_leases
from cluster.gateway.peers import ask_peers
from cluster.gateway.running import meant_by, running_message
from cluster.gateway.state import GatewayState
from cluster.operators.explain import explain
from cluster.operators.service import FleetService, Metadata
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc as services
from kvstore.errors import NotFound, Unavailable
from wire.worker_status import DEFAULT_LEASES, MAX_LEASES

DEFAULT_REQUESTS = 100
MAX_REQUESTS = 10_000


class OperatorService(FleetService):
    def __init__(self, state: GatewayState, version: str) -> None:
        super().__init__(lambda: state.backend, self._operator)
        self._state = state
        self._version = version

    def _operator(self, metadata: Metadata) -> str:
        """The name of the operator who asks. Raises Unauthenticated, PermissionDenied."""
        return operator(self._state.authenticator.caller(metadata))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        state = self._state
        self._operator(context.invocation_metadata() or ())
        response = pb.GetStatusResponse(
            version=self._version,
            model=state.served.info.name,
            uptime_ms=int(state.sources.now_ms() - state.started_ms),
            running_requests=len(state.running),
            outcomes=dict(state.outcomes),
            registry=state.registry_health(),
        )
        ordered = sorted(state.fleet.workers.values(), key=lambda record: (record.role, record.worker_id))
        cordoned = state.fleet.cordoned
        response.workers.extend(_entry(record, record.worker_id in cordoned) for record in ordered)
        return response

    async def ListRequests(self, request: pb.ListRequestsRequest, context: Any) -> pb.ListRequestsResponse:
        metadata = tuple(context.invocation_metadata() or ())
        self._operator(metadata)
        state, limit = self._state, min(MAX_REQUESTS, max(0, request.limit) or DEFAULT_REQUESTS)
        now_ms = state.sources.now_ms()
        oldest = sorted(state.running, key=lambda running: running.facts.received_ms)
        shown = [running_message(running, now_ms, state.peer_endpoint) for running in oldest[:limit]]
        own = pb.ListRequestsResponse(requests=shown, total=len(oldest))
        if request.local:
            return own
        asked = pb.ListRequestsRequest(limit=limit, local=True)
        heard = await ask_peers(state, lambda to: services.OperatorServiceStub(to).ListRequests, asked, metadata)
        return merged_lists((own, *heard.answers), heard.unreached, limit)

    async def ListLeases(self, request: pb.ListLeasesRequest, context: Any) -> pb.ListLeasesResponse:
        self._operator(context.invocation_metadata() or ())
        return await list_leases(self._state, min(MAX_LEASES, max(0, request.limit) or DEFAULT_LEASES))

    async def DescribeRequest(self, request: pb.DescribeRequestRequest, context: Any) -> pb.DescribeRequestResponse:
        metadata = tuple(context.invocation_metadata() or ())
        self._operator(metadata)
        wanted = request.request_id
        own = self._described(wanted)
        if own is not None:
            return own
        if request.local:
            raise unknown_request(wanted, "this gateway")
        asked = pb.DescribeRequestRequest(request_id=wanted, local=True)
        heard = await ask_peers(
            self._state, lambda to: services.OperatorServiceStub(to).DescribeRequest, asked, metadata,
            unknown=("unknown_request",),
        )  # fmt: skip
        return one_described(wanted, heard.answers, heard.unreached)

    def _described(self, wanted: str) -> pb.DescribeRequestResponse | None:
        """None: this gateway does not know it. Raises NotFound for a label of several."""
        state = self._state
        found = meant_by(state.running, wanted)
        if len(found) > 1:
            raise ambiguous(wanted, len(found))
        if found:
            now_ms = state.sources.now_ms()
            message = running_message(found[0], now_ms, state.peer_endpoint)
            return pb.DescribeRequestResponse(request=message, recomputes=found[0].facts.recomputes)
        ended = state.ended_requests.get(wanted)
        if ended is None:
            return None
        told = pb.DescribeRequestResponse()
        told.CopyFrom(ended)
        told.request.gateway = state.peer_endpoint
        return told

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        self._operator(context.invocation_metadata() or ())
        told = explain(request.code)
        return pb.ExplainResponse(
            code=told.code,
            status=told.status,
            http_status=told.http_status,
            meaning=told.meaning,
            action=told.action,
            retry=told.retry,
        )


def _entry(record: WorkerRecord, cordoned: bool) -> pb.WorkerEntry:
    entry = pb.WorkerEntry(
        worker_id=record.worker_id,
        role=record.role.value,
        endpoint=record.endpoint,
        state=record.state.value,
        detail="; ".join(filter(None, ("cordoned: not chosen for new requests" if cordoned else "", record.detail))),
    )
    if record.status is not None:
        entry.status.CopyFrom(record.status)
    return entry


def merged_lists(
    lists: Iterable[pb.ListRequestsResponse], unreached: Iterable[pb.UnreachedGateway], limit: int
) -> pb.ListRequestsResponse:
    """The oldest of all gateways. Pure."""
    every = tuple(lists)
    requests = sorted((one for part in every for one in part.requests), key=lambda one: -one.age_ms)
    total = sum(part.total for part in every)
    return pb.ListRequestsResponse(requests=requests[:limit], total=total, unreached=unreached)


def one_described(
    wanted: str, found: Sequence[pb.DescribeRequestResponse], unreached: Sequence[pb.UnreachedGateway]
) -> pb.DescribeRequestResponse:
    """Pure. One that runs goes before one that has ended. Raises NotFound, or Unavailable (`gateways_unreached`) where
    it may be at one that did not answer."""
    running = [one for one in found if not one.outcome]
    if len(running) > 1:
        raise ambiguous(wanted, len(running))
    if found:
        return running[0] if running else min(found, key=lambda one: one.request.age_ms)
    if unreached:
        names = ", ".join(f"{one.gateway} ({one.reason})" for one in unreached[:8])
        raise Unavailable(
            "gateways_unreached",
            f"no gateway that answered knows request {wanted[:64]!r}; these did not answer: {names}",
        )
    raise unknown_request(wanted, "any gateway")


def unknown_request(wanted: str, where: str) -> NotFound:
    return NotFound(
        "unknown_request", f"no running or lately ended request {wanted[:64]!r} in {where}", field="request_id"
    )


def ambiguous(wanted: str, count: int) -> NotFound:
    return NotFound("ambiguous_request", f"{count} requests run under the label {wanted[:64]!r}", field="request_id")
