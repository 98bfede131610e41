"""Typed errors as HTTP statuses and OpenAI's error objects. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from cluster.http_status import status_of
from kvstore.errors import GenlockError, NoCapacity, Unauthenticated

MAX_MESSAGE_CHARS = 1024

_TYPE: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 499: "cancelled"}
)
# Codes that OpenAI's users look for.
_CODE_OF_REASON: Mapping[str, str] = MappingProxyType(
    {"unknown_model": "model_not_found", "no_credential": "invalid_api_key", "bad_credential": "invalid_api_key"}
)


def http_status(error: GenlockError) -> int:
    return status_of(error.status, error.reason)


def error_object(error: GenlockError) -> dict[str, object]:
    """`{"error": {message, type, param, code}}`; `code` is the stable reason."""
    status = http_status(error)
    kind = _TYPE.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": error.message.encode("utf-8", "replace").decode()[:MAX_MESSAGE_CHARS],
            "type": kind,
            "param": error.field or None,
            "code": _CODE_OF_REASON.get(error.reason, error.reason),
        }
    }


def error_headers(error: GenlockError) -> dict[str, str]:
    """When to come again, and whether at all: clients of OpenAI's API repeat every 5xx unless they are told."""
    if isinstance(error, NoCapacity):
        wait_ms = max(error.retry_after_ms, 1)
        return {"retry-after": str(math.ceil(wait_ms / 1000)), "retry-after-ms": str(wait_ms)}
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    # A page that could not be proved is never papered over; a surprise or a lack of time is not cured by asking again.
    if http_status(error) in (500, 504):
        return {"x-should-retry": "false"}
    return {}
