"""What a caller says about how its request is to be placed: an affinity and a priority. Pure.

A field of the request goes before the metadata (or HTTP header) of the same meaning: libraries set metadata for all
calls, a field is this request's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cluster.gateway.identity import Caller
from cluster.gateway.queueing import PRIORITIES, Priority
from cluster.router import affinity_of
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput, PermissionDenied

AFFINITY_KEY = "x-session-affinity"
PRIORITY_KEY = "x-priority"
MAX_AFFINITY_CHARS = 256

_OF_FIELD: Mapping[int, Priority] = MappingProxyType(
    {
        pb.PRIORITY_LOW: Priority.LOW,
        pb.PRIORITY_NORMAL: Priority.NORMAL,
        pb.PRIORITY_HIGH: Priority.HIGH,
    }
)


@dataclass(frozen=True)
class Steering:
    """`affinity`: empty for none."""

    affinity: bytes = b""
    priority: Priority = Priority.NORMAL


def steering(request: pb.GenerateRequest, metadata: Iterable[tuple[str, str | bytes]], caller: Caller) -> Steering:
    """A request that names no priority gets the normal one, or the tenant's highest where that is less. Raises
    InvalidInput, or PermissionDenied (`priority_not_allowed`) for a priority above the tenant's."""
    told = [(key, value) for key, value in metadata if key in (AFFINITY_KEY, PRIORITY_KEY)]
    key, field = request.session_affinity, "session_affinity"
    if not key:
        key, field = _one(told, AFFINITY_KEY), AFFINITY_KEY
    if len(key) > MAX_AFFINITY_CHARS:
        raise InvalidInput(
            "bad_session_affinity", f"{field} must have at most {MAX_AFFINITY_CHARS} characters", field=field
        )
    return Steering(affinity_of(caller.tenant, key) if key else b"", _priority(request, told, caller))


def _priority(request: pb.GenerateRequest, told: list[tuple[str, str | bytes]], caller: Caller) -> Priority:
    wanted, field = _OF_FIELD.get(request.priority), "priority"
    if wanted is None:
        if request.priority != pb.PRIORITY_UNSPECIFIED:
            raise InvalidInput("bad_priority", f"priority {request.priority} is none of this API", field=field)
        name, field = _one(told, PRIORITY_KEY), PRIORITY_KEY
        if not name:
            return min(Priority.NORMAL, caller.max_priority)
        wanted = PRIORITIES.get(name.lower())
    if wanted is None:
        raise InvalidInput("bad_priority", f"{field} must be one of {', '.join(PRIORITIES)}", field=field)
    if wanted > caller.max_priority:
        raise PermissionDenied(
            "priority_not_allowed",
            f"{field} may be at most {caller.max_priority.name.lower()} for this tenant",
            field=field,
        )
    return wanted


def _one(told: list[tuple[str, str | bytes]], name: str) -> str:
    values = [value for key, value in told if key == name]
    if len(values) > 1 or not all(isinstance(value, str) for value in values):
        raise InvalidInput(f"bad_{name[2:].replace('-', '_')}", f"{name} must be given once, as text", field=name)
    return str(values[0]) if values else ""
