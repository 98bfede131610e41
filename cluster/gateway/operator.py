"""OperatorService: what operators ask. This gateway answers for itself; the fleet's part goes to the controller."""

from __future__ import annotations

from typing import Any

from cluster.gateway.fleet import WorkerRecord
from cluster.gateway.identity import operator
from cluster.gateway.running import meant_by, running_message
from cluster.gateway.state import GatewayState
from cluster.operators.explain import explain
from cluster.operators.service import FleetService, Metadata
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import NotFound

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
        self._operator(context.invocation_metadata() or ())
        limit = min(MAX_REQUESTS, max(0, request.limit) or DEFAULT_REQUESTS)
        now_ms = self._state.sources.now_ms()
        oldest = sorted(self._state.running, key=lambda running: running.facts.received_ms)
        shown = [running_message(running, now_ms) for running in oldest[:limit]]
        return pb.ListRequestsResponse(requests=shown, total=len(oldest))

    async def DescribeRequest(self, request: pb.DescribeRequestRequest, context: Any) -> pb.DescribeRequestResponse:
        self._operator(context.invocation_metadata() or ())
        state, wanted = self._state, request.request_id
        found = meant_by(state.running, wanted)
        if len(found) == 1:
            return pb.DescribeRequestResponse(request=running_message(found[0], state.sources.now_ms()))
        ended = state.ended_requests.get(wanted)
        if ended is None:
            many = f"; {len(found)} run under that label" if found else ""
            raise NotFound(
                "unknown_request",
                f"no running or lately ended request {wanted[:64]!r} in this gateway{many}",
                field="request_id",
            )
        return ended

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
