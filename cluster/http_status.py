"""gRPC statuses and reasons as HTTP statuses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# The client cancelled; not in the standard, but what proxies write in their logs.
CLIENT_CLOSED_REQUEST = 499

_STATUS: Mapping[str, int] = MappingProxyType(
    {
        "INVALID_ARGUMENT": 400,
        "UNAUTHENTICATED": 401,
        "PERMISSION_DENIED": 403,
        "NOT_FOUND": 404,
        "RESOURCE_EXHAUSTED": 429,
        "CANCELLED": CLIENT_CLOSED_REQUEST,
        "UNAVAILABLE": 503,
        "DEADLINE_EXCEEDED": 504,
    }
)
# Reasons that HTTP says more precisely than their class does.
_STATUS_OF_REASON: Mapping[str, int] = MappingProxyType(
    {
        "unknown_model": 404,
        "unknown_path": 404,
        "method_not_allowed": 405,
        "body_timeout": 408,
        "body_too_large": 413,
        "bad_content_type": 415,
    }
)


def status_of(status: str, reason: str) -> int:
    """The HTTP status of a gRPC status' name with a reason."""
    return _STATUS_OF_REASON.get(reason) or _STATUS.get(status, 500)
