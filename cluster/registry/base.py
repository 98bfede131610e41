"""The registry's interface. Losing it never makes a stale page valid and never ends a running request: pages are judged
by their tags alone, and readers go on with the last view they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from cluster.registry.records import Desired, Event, GatewayRecord, WorkerRecord


class Registry(Protocol):
    """All methods raise Unavailable (`registry_unreachable`) when the store does not answer in time; none changes
    anything then that a retry would spoil."""

    @property
    def skipped(self) -> int:
        """Records, events and answers that could not be read and were passed over, since the start."""
        ...

    async def open(self) -> None:
        """Connects. Raises Unavailable."""
        ...

    async def close(self) -> None: ...

    async def put_worker(self, record: WorkerRecord, ttl_ms: int) -> None:
        """A heartbeat: keeps the record for `ttl_ms`. Where another life of this name is kept that began later
        (`started_ms`), nothing changes."""
        ...

    async def remove_worker(self, worker_id: str, incarnation: int) -> None:
        """Forgets this life of the worker; another life of the same name stays."""
        ...

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """All records whose time has not run out, by worker id."""
        ...

    async def put_gateway(self, record: GatewayRecord, ttl_ms: int) -> None:
        """Keeps what a gateway tells of its door for `ttl_ms`. Raises NoCapacity (`too_many_gateways`)."""
        ...

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        """All whose time has not run out, by id."""
        ...

    async def desired(self) -> Desired:
        """What is wanted; revision 0 where nobody has asked for anything, also after the store was flushed."""
        ...

    async def replace_desired(self, wanted: Desired, expected_revision: int) -> Desired:
        """Compare and set: keeps `wanted` under the next revision, which is never one that was used before, also not
        before the store was flushed: it is above `expected_revision` and above `wanted.revision`. So a caller that
        finds revision 0 where it has seen a higher one writes its last state again, that revision still in it.

        Raises Conflict (`revision_moved`) naming both revisions when the current one is another.
        """
        ...

    async def append_event(self, event: Event) -> Event:
        """Keeps the event and gives it the next sequence number; the oldest go when the log is full."""
        ...

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """Events with a higher sequence number than `after`, oldest first, at most `limit` and MAX_EVENT_BATCH."""
        ...

    async def last_events(self, limit: int = 100) -> tuple[Event, ...]:
        """The newest events, oldest of them first, at most `limit` and MAX_EVENT_BATCH. Reads no others."""
        ...

    async def append_decision(self, decision: bytes) -> None:
        """Keeps one decision of the autoscaler; the oldest go beyond MAX_DECISIONS. Raises InvalidInput
        (`decision_too_long`)."""
        ...

    async def last_decisions(self, limit: int = 100) -> tuple[bytes, ...]:
        """The newest decisions, newest first, at most `limit` and MAX_DECISIONS."""
        ...

    async def remember(self, key: str, answer: bytes, ttl_ms: int) -> bytes | None:
        """Keeps what was answered under an idempotency key. Returns the earlier answer where the key was known, and
        keeps that one."""
        ...

    async def keys(self) -> Mapping[str, str]:
        """Digests of API keys, 64 hexadecimal digits, and what is known of each: never a key itself."""
        ...

    async def put_key(self, digest: str, record: str) -> None:
        """Raises NoCapacity (`too_many_keys`)."""
        ...

    async def remove_key(self, digest: str) -> bool:
        """False: there was none."""
        ...

    async def recall(self, key: str) -> bytes | None:
        """The answer kept under the key, or None."""
        ...
