"""OperatorService: what operators ask about the whole cluster."""

from __future__ import annotations

from typing import Any

from cluster.gateway.fleet import WorkerRecord
from cluster.gateway.state import GatewayState
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc as services
from kvstore.errors import PermissionDenied


class OperatorService(services.OperatorServiceServicer):
    def __init__(self, state: GatewayState, version: str) -> None:
        self._state = state
        self._version = version

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        state = self._state
        if not state.authenticator.caller(context.invocation_metadata() or ()).operator:
            raise PermissionDenied("not_an_operator", "this credential may not see the whole cluster")
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
