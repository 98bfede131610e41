"""The roll of the requests that run in one gateway: who may enter, and which of them a caller's label names (pure).

A label is the caller's own word for a request. It may be empty, and several requests may carry one at a time: a retry
beside the first try, another tenant's request. So nothing is kept by label: a place on the roll is the entry itself,
and a label is looked for among the entries of one tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvstore.errors import Cancelled, GenlockError, InvalidInput, NoCapacity


class Entry:
    """One running request. `stopped_by` is the error with which it was ended from outside: the caller's Abort, or the
    end of a drain."""

    def __init__(self, key: tuple[str, str], end: Callable[[], object]) -> None:
        """`key`: tenant and the client's label. `end` begins the end of the request; called at most once."""
        self.key = key
        self.stopped_by: GenlockError | None = None
        self._end = end

    def stop(self, error: GenlockError) -> bool:
        """Whether this call stopped it. That happens once: a later stop changes neither its end nor its error."""
        if self.stopped_by is not None:
            return False
        self.stopped_by = error
        self._end()
        return True


E = TypeVar("E", bound=Entry)


class Roll(Generic[E]):
    """At most `most` entries, in the order in which they came."""

    def __init__(self, most: int, retry_after_ms: int) -> None:
        self._most = most
        self._retry_after_ms = retry_after_ms
        self._entries: dict[E, None] = {}
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[E]:
        return iter(self._entries)

    def enter(self, entry: E, tenant_most: int) -> None:
        """`tenant_most`: how many the entry's tenant may have; 0 for no limit. Raises NoCapacity."""
        tenant = entry.key[0]
        if tenant_most and self._by_tenant[tenant] >= tenant_most:
            raise NoCapacity(
                "tenant_full",
                f"tenant {tenant} has {tenant_most} requests running in this gateway, and may have no more",
                retry_after_ms=self._retry_after_ms,
            )
        if len(self._entries) >= self._most:
            raise NoCapacity(
                "gateway_full",
                f"{self._most} requests are running in this gateway",
                retry_after_ms=self._retry_after_ms,
            )
        self._entries[entry] = None
        self._by_tenant[tenant] += 1

    def leave(self, entry: E) -> None:
        """The request has ended; called once for each that has entered. Others of the same label stay."""
        del self._entries[entry]
        tenant = entry.key[0]
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def named(self, tenant: str, label: str) -> tuple[E, ...]:
        """All entries of one tenant that carry a label."""
        return tuple(entry for entry in self._entries if entry.key == (tenant, label))

    def abort(self, tenant: str, label: str) -> int:
        """Ends a tenant's requests of one label. Returns how many this call has stopped: those that were stopping
        already are not counted. Raises InvalidInput for the empty label: it names nothing, though many may carry it."""
        if not label:
            raise InvalidInput("bad_request_id", "request_id must not be empty", field="request_id")
        error = Cancelled("aborted_by_caller", "the caller aborted this request")
        return sum(entry.stop(error) for entry in self.named(tenant, label))
