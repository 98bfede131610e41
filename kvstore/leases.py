"""Leases: prefill's promises to keep the pages of a handoff. Pure; times are milliseconds of the owner's clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.errors import InvalidInput, LifecycleError, NoCapacity, NotFound
from kvstore.ids import PageRef


@dataclass(frozen=True)
class Lease:
    handoff_id: bytes
    deadline_ms: int
    refs: tuple[PageRef, ...] = ()
    granted_ms: int = 0
    renewals: int = 0  # that decode asked for; promised pages move the deadline too and do not count


class LeaseTable:
    """Live leases by handoff. An unknown id is NotFound and changes nothing."""

    def __init__(self, lease_ms: int, max_leases: int) -> None:
        for name, value in (("lease_ms", lease_ms), ("max_leases", max_leases)):
            if value < 1:
                raise InvalidInput("bad_lease", f"leases.{name} must be at least 1", field=f"leases.{name}")
        self.lease_ms = lease_ms
        self._max = max_leases
        self._leases: dict[bytes, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, handoff_id: bytes) -> bool:
        return handoff_id in self._leases

    def grant(self, handoff_id: bytes, now_ms: int) -> None:
        """Opens an empty lease. Raises NoCapacity('too_many_leases'), LifecycleError('handoff_exists')."""
        if handoff_id in self._leases:  # a second grant would forget the pages that the first one promised
            raise LifecycleError("handoff_exists", "a live lease has this handoff id already")
        if len(self._leases) >= self._max:
            raise NoCapacity("too_many_leases", f"{self._max} handoffs already wait to be pulled")
        self._leases[handoff_id] = Lease(handoff_id, now_ms + self.lease_ms, granted_ms=now_ms)

    def add(self, handoff_id: bytes, refs: tuple[PageRef, ...], now_ms: int) -> None:
        """Promises more pages; moves the deadline."""
        lease = self._get(handoff_id)
        self._leases[handoff_id] = replace(lease, refs=lease.refs + refs, deadline_ms=self._moved(lease, now_ms))

    def renew(self, handoff_id: bytes, now_ms: int) -> None:
        """Moves the deadline, never back."""
        lease = self._get(handoff_id)
        renewals = lease.renewals + 1
        self._leases[handoff_id] = replace(lease, deadline_ms=self._moved(lease, now_ms), renewals=renewals)

    def end(self, handoff_id: bytes) -> tuple[PageRef, ...]:
        """Removes a lease and returns the pages that it kept."""
        lease = self._get(handoff_id)
        del self._leases[handoff_id]
        return lease.refs

    def expired(self, now_ms: int) -> tuple[bytes, ...]:
        """Handoffs whose deadline has passed."""
        return tuple(h for h, lease in self._leases.items() if now_ms >= lease.deadline_ms)

    def ages_ms(self, now_ms: int) -> tuple[int, ...]:
        """How long each live lease has been there. Safe from any thread."""
        return tuple(max(0, now_ms - lease.granted_ms) for lease in tuple(self._leases.values()))

    def oldest(self, limit: int) -> tuple[Lease, ...]:
        """At most so many live leases, in the order of their grants. Safe from any thread."""
        return tuple(self._leases.values())[: max(0, limit)]

    def _moved(self, lease: Lease, now_ms: int) -> int:
        """The deadline of a lease that is wanted for longer: never one that is nearer."""
        return max(lease.deadline_ms, now_ms + self.lease_ms)

    def _get(self, handoff_id: bytes) -> Lease:
        lease = self._leases.get(handoff_id)
        if lease is None:
            raise NotFound("unknown_handoff", "no live lease has this handoff id")
        return lease
