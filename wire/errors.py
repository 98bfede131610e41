"""Typed errors to gRPC statuses and back, by the richer error model (google.rpc.Status in the trailing metadata).

    ErrorInfo    domain "genlock", reason = the error's snake_case cause, metadata: kind (class name), field
    BadRequest   INVALID_ARGUMENT that names a field
    RetryInfo    RESOURCE_EXHAUSTED

A status without these details did not come from Genlock's code: it is the transport's own word and becomes
Unavailable, Cancelled or DeadlineExceeded where it says so.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterable, Iterator
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvstore.errors import (
    Cancelled,
    CorruptPage,
    DeadlineExceeded,
    GenlockError,
    InvalidInput,
    LayoutMismatch,
    NoCapacity,
    NotFound,
    PageFault,
    Unavailable,
)

log = logging.getLogger("genlock.errors")

DOMAIN = "genlock"
DETAILS_KEY = "grpc-status-details-bin"
# Message and details both travel in trailers, which peers limit to 8 KiB by default.
MAX_MESSAGE_CHARS = 1024
MAX_FIELD_CHARS = 256

# How grpc's own words begin for a message over the limit: the one refusal for which coming again is no use.
_TOO_LARGE = "message larger than max"

# What a status means when it carries no details of ours: the class and the reason.
_TRANSPORT: dict[grpc.StatusCode, tuple[type[GenlockError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (Unavailable, "peer_unreachable"),
    grpc.StatusCode.CANCELLED: (Cancelled, "cancelled"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, "deadline_exceeded"),
    grpc.StatusCode.UNIMPLEMENTED: (Unavailable, "peer_unimplemented"),
    grpc.StatusCode.UNAUTHENTICATED: (Unavailable, "peer_unauthenticated"),
    grpc.StatusCode.PERMISSION_DENIED: (Unavailable, "peer_denied"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (NoCapacity, "peer_exhausted"),
    grpc.StatusCode.INVALID_ARGUMENT: (InvalidInput, "peer_refused"),
    grpc.StatusCode.FAILED_PRECONDITION: (LayoutMismatch, "peer_refused"),
    grpc.StatusCode.NOT_FOUND: (NotFound, "peer_not_found"),
    grpc.StatusCode.ABORTED: (PageFault, "peer_aborted"),
    grpc.StatusCode.DATA_LOSS: (CorruptPage, "peer_data_loss"),
}


def error_classes() -> dict[str, type[GenlockError]]:
    """All typed errors of the process by class name."""

    def walk(kind: type[GenlockError]) -> Iterator[type[GenlockError]]:
        yield kind
        for child in kind.__subclasses__():
            yield from walk(child)

    return {kind.__name__: kind for kind in walk(GenlockError)}


def to_status(error: GenlockError) -> status_pb2.Status:
    """The rich status of `error`. Messages longer than `MAX_MESSAGE_CHARS` are cut."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=_clean(error.message, MAX_MESSAGE_CHARS))
    field = _clean(error.field, MAX_FIELD_CHARS)
    info = error_details_pb2.ErrorInfo(domain=DOMAIN, reason=error.reason, metadata={"kind": type(error).__name__})
    if field:
        info.metadata["field"] = field
    status.details.add().Pack(info)
    if isinstance(error, InvalidInput) and field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=status.message, reason=error.reason
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, NoCapacity):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> GenlockError | None:
    """The typed error that `status` was made from; None when it was not made by Genlock."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    has_retry = False
    for detail in status.details:
        try:
            detail.Unpack(info)
            has_retry = detail.Unpack(retry) or has_retry
        except DecodeError:
            return None
    if info.domain != DOMAIN or not info.reason:
        return None
    kind = error_classes().get(info.metadata.get("kind", ""), GenlockError)
    if kind.status != code_pb2.Code.Name(status.code):
        return None
    field = info.metadata.get("field", "")
    if issubclass(kind, NoCapacity) and has_retry:
        delay_ms = retry.retry_delay.ToMilliseconds()
        return kind(info.reason, status.message, field=field, retry_after_ms=delay_ms)
    return kind(info.reason, status.message, field=field)


async def abort_with(context: grpc.aio.ServicerContext, error: GenlockError) -> NoReturn:  # type: ignore[type-arg]  # the class is generic in stubs only
    """Ends the call with the status of `error`; always raises (grpc's AbortError)."""
    status = to_status(error)
    await context.abort(grpc.StatusCode[error.status], status.message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def from_rpc(error: grpc.RpcError) -> GenlockError:
    """The typed error behind a failed call: the peer's own, or what the transport's status means."""
    return _typed(_code_of(error), _message_of(error), _trailers_of(error))


def told_by_peer(error: BaseException | None) -> bool:
    """Whether a failed call ended with the peer's own word. Otherwise it is the transport's: nobody may be there."""
    if not isinstance(error, grpc.RpcError):
        return False
    return any(key == DETAILS_KEY for key, _value in _trailers_of(error))


def _typed(code: grpc.StatusCode, message: str, trailers: Iterable[tuple[str, str | bytes]]) -> GenlockError:
    for key, value in trailers:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            break
        if status.code == code.value[0]:
            typed = from_status(status)
            if typed is not None:
                return typed
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in message:
        return InvalidInput(
            "body_too_large", f"the message is larger than its receiver takes: {message}", field="request"
        )
    kind, reason = _TRANSPORT.get(code, (GenlockError, "peer_internal"))
    return kind(reason, f"peer answered {code.name}: {message}" if message else f"peer answered {code.name}")


def as_genlock_error(exc: BaseException) -> GenlockError:
    """Any exception as a typed error. A surprise becomes reason 'internal' and names only the exception's class: its
    text may quote a prompt."""
    if isinstance(exc, GenlockError):
        return exc
    if isinstance(exc, grpc.RpcError):
        return from_rpc(exc)
    if isinstance(exc, asyncio.CancelledError):
        return Cancelled("cancelled", "the call was cancelled")
    return GenlockError("internal", f"internal error ({type(exc).__name__})")


def surprise(exc: BaseException, where: str) -> GenlockError:
    """`as_genlock_error`, and a log entry for anything untyped: its class and where it was raised, never its text,
    which may quote a prompt."""
    error = as_genlock_error(exc)
    if not isinstance(exc, GenlockError | grpc.RpcError | asyncio.CancelledError):
        frames = "".join(traceback.format_tb(exc.__traceback__))
        log.error("internal error in %s: %s\n%s", where, type(exc).__name__, frames)
    return error


def _clean(text: str, limit: int) -> str:
    """Text that a protobuf string can carry: no lone surrogates, bounded."""
    safe = text.encode("utf-8", "replace").decode("utf-8")
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def _code_of(error: grpc.RpcError) -> grpc.StatusCode:
    code = getattr(error, "code", None)
    value = code() if callable(code) else None
    return value if isinstance(value, grpc.StatusCode) else grpc.StatusCode.UNKNOWN


def _message_of(error: grpc.RpcError) -> str:
    details = getattr(error, "details", None)
    value = details() if callable(details) else None
    return _clean(value, MAX_MESSAGE_CHARS) if isinstance(value, str) else ""


def _trailers_of(error: grpc.RpcError) -> list[tuple[str, str | bytes]]:
    trailers = getattr(error, "trailing_metadata", None)
    value = trailers() if callable(trailers) else None
    return [(str(key), item) for key, item in value] if value is not None else []
