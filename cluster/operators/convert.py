"""The controller's dataclasses as messages, and requests as changes. Pure."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from cluster.control.api import Change, FleetView, NodeRow, WorkerRow
from cluster.registry.records import Event
from cluster.roles import MAX_FLEET
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import InvalidInput

MAX_KEY_CHARS = 128
MAX_REASON_CHARS = 512
MAX_NAMES = MAX_FLEET
MAX_NAME_CHARS = 128


class Changing(Protocol):
    """A request that changes something."""

    @property
    def mutation(self) -> pb.Mutation: ...


def change_of(rpc: str, request: Changing, actor: str) -> Change:
    """Raises InvalidInput naming the field."""
    mutation = request.mutation
    if mutation.expected_revision < 0:
        raise _bad("mutation.expected_revision", "must be a revision that was seen, or 0 for any")
    if len(mutation.idempotency_key) > MAX_KEY_CHARS:
        raise _bad("mutation.idempotency_key", f"has {len(mutation.idempotency_key)} characters, at most "
                   f"{MAX_KEY_CHARS} are kept")  # fmt: skip
    if len(mutation.reason) > MAX_REASON_CHARS:
        raise _bad("mutation.reason", f"has {len(mutation.reason)} characters, at most {MAX_REASON_CHARS} are kept")
    return Change(
        actor=actor,
        reason=mutation.reason,
        expected_revision=mutation.expected_revision,
        idempotency_key=mutation.idempotency_key,
        dry_run=mutation.dry_run,
        asked=_asked(rpc, request),
    )


def _asked(rpc: str, request: Any) -> str:
    """The RPC and a digest of all fields but the mutation's own: a retry may expect another revision."""
    rest = type(request)()
    rest.CopyFrom(request)
    rest.ClearField("mutation")
    return f"{rpc} {hashlib.sha256(rest.SerializeToString(deterministic=True)).hexdigest()}"


def names_of(values: object, field: str) -> tuple[str, ...]:
    """Worker or node names. Raises InvalidInput."""
    names = tuple(str(value) for value in values)  # type: ignore[attr-defined]  # protobuf's repeated field
    if len(names) > MAX_NAMES:
        raise _bad(field, f"names {len(names)}, at most {MAX_NAMES} are taken at once")
    for name in names:
        if not name or len(name) > MAX_NAME_CHARS:
            raise _bad(field, f"has a name of {len(name)} characters, 1 to {MAX_NAME_CHARS} are possible")
    return names


def at_least(value: int, low: int, field: str) -> int:
    """Raises InvalidInput."""
    if value < low:
        raise _bad(field, f"= {value} must be at least {low}")
    return value


def _bad(field: str, wrong: str) -> InvalidInput:
    return InvalidInput("bad_request", f"{field} {wrong}", field=field)


def fleet_message(view: FleetView) -> pb.FleetView:
    return pb.FleetView(
        revision=view.desired.revision,
        desired_prefill=view.desired.prefill,
        desired_decode=view.desired.decode,
        workers=[worker_message(row) for row in view.workers],
        settled=view.settled,
        reason=view.reason,
        repeated=view.repeated,
        controller_endpoint=view.endpoint,
        controller_starts=view.desired.controller_starts,
    )


def worker_message(row: WorkerRow) -> pb.FleetWorker:
    message = pb.FleetWorker(
        worker_id=row.worker_id,
        role=row.role.value,
        phase=row.phase,
        reason=row.reason,
        phase_age_ms=row.phase_age_ms,
        cordoned=row.cordoned,
        endpoint=row.endpoint,
        incarnation=row.incarnation,
        node=row.node,
        restarts=row.restarts,
        drain_left_ms=row.drain_left_ms,
    )
    if row.status is not None:
        message.status.CopyFrom(row.status)
    return message


def event_message(event: Event) -> pb.FleetEvent:
    return pb.FleetEvent(
        sequence=event.sequence,
        at_ms=event.at_ms,
        kind=event.kind,
        subject=event.subject,
        actor=event.actor,
        message=event.message,
        reason=event.reason,
        revision=event.revision,
    )


def node_message(row: NodeRow) -> pb.Node:
    return pb.Node(
        node=row.node,
        alive=row.alive,
        cpus=row.cpus,
        cpus_free=row.cpus_free,
        gpus=row.gpus,
        gpus_free=row.gpus_free,
        drained=row.drained,
        cordoned=row.cordoned,
        workers=row.workers,
    )
