"""Typed errors of the whole system. Every error a client can see derives from one of these.

    GenlockError
    ├── InvalidInput            bad field in a request or a configuration       INVALID_ARGUMENT
    ├── NoCapacity              no pages, no queue room; retry later            RESOURCE_EXHAUSTED
    ├── Unavailable             a worker or a peer is gone, draining, too late  UNAVAILABLE
    ├── Unauthenticated         no credential, or one that is not known         UNAUTHENTICATED
    ├── PermissionDenied        the caller may not ask this                     PERMISSION_DENIED
    ├── NotFound                an id that this process does not know           NOT_FOUND
    ├── Cancelled               the caller went away                            CANCELLED
    ├── DeadlineExceeded        the caller's deadline passed                    DEADLINE_EXCEEDED
    ├── Conflict                the state is not the one the caller saw         ABORTED
    ├── Refused                 allowed in form, refused by a policy            FAILED_PRECONDITION
    ├── LayoutMismatch          two pools do not describe pages alike           FAILED_PRECONDITION
    ├── PageFault               a page could not be proved                      (abstract)
    │   ├── StalePage           right bytes of the wrong owner or time          ABORTED
    │   └── CorruptPage         bytes that are not what was sealed              DATA_LOSS
    ├── LifecycleError          an event that a page's state does not allow     INTERNAL
    │   └── PagePinned          a free of a page that others still use          INTERNAL
    └── TransferError           an engine could not move bytes                  UNAVAILABLE
        └── TransferTimeout     the engine did not finish in time               UNAVAILABLE

`status` is the gRPC status name; the gateway maps it one to one, so no room below it needs to import grpc.
"""

from __future__ import annotations

from typing import ClassVar


class GenlockError(Exception):
    """Base of all typed errors. `reason` is a stable snake_case cause used as a metric label and in tests."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, reason: str, message: str = "", *, field: str = "") -> None:
        self.reason = reason
        self.field = field
        self.message = message or reason
        super().__init__(self.message)

    def __reduce__(self) -> tuple[object, ...]:
        # A copy, also in another process, has all that the original had, what a subclass adds as well.
        return (_rebuild, (type(self), self.reason, self.message, dict(self.__dict__)))


def _rebuild(kind: type[GenlockError], reason: str, message: str, more: dict[str, object]) -> GenlockError:
    error = kind(reason, message)
    error.__dict__.update(more)
    return error


class InvalidInput(GenlockError):
    """A request or a configuration names something that cannot be served; `field` says which."""

    status = "INVALID_ARGUMENT"


class NoCapacity(GenlockError):
    """Nothing was taken; the caller may retry after `retry_after_ms`."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, reason: str, message: str = "", *, field: str = "", retry_after_ms: int = 500) -> None:
        super().__init__(reason, message, field=field)
        self.retry_after_ms = retry_after_ms


class Unavailable(GenlockError):
    status = "UNAVAILABLE"


class Unauthenticated(GenlockError):
    status = "UNAUTHENTICATED"


class PermissionDenied(GenlockError):
    status = "PERMISSION_DENIED"


class NotFound(GenlockError):
    status = "NOT_FOUND"


class Cancelled(GenlockError):
    status = "CANCELLED"


class DeadlineExceeded(GenlockError):
    status = "DEADLINE_EXCEEDED"


class Conflict(GenlockError):
    """A change was made against a revision that is no longer the current one; nothing was changed."""

    status = "ABORTED"


class Refused(GenlockError):
    """A policy forbids the change, such as draining the last ready worker of a role; nothing was changed."""

    status = "FAILED_PRECONDITION"


class LayoutMismatch(GenlockError):
    """The two ends differ; `field` names the first layout field that does."""

    status = "FAILED_PRECONDITION"


class PageFault(GenlockError):
    """A page could not be proved to belong to the request that asked for it."""

    status = "ABORTED"


class StalePage(PageFault):
    status = "ABORTED"


class CorruptPage(PageFault):
    status = "DATA_LOSS"


class LifecycleError(GenlockError):
    """An event that a page's state does not allow. Nothing was changed."""


class PagePinned(LifecycleError):
    """A page with sharers or leases was asked to be freed. Nothing was changed."""


class TransferError(GenlockError):
    status = "UNAVAILABLE"


class TransferTimeout(TransferError):
    pass
