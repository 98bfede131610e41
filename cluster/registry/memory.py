"""The registry in this process: the default on one machine. It lives and dies with its cluster."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from cluster.registry.base import Registry
from cluster.registry.records import Desired, Event, GatewayRecord, WorkerRecord
from cluster.registry.rules import (
    MAX_ANSWERS,
    MAX_DECISIONS,
    MAX_EVENT_BATCH,
    MAX_GATEWAYS,
    MAX_KEYS,
    MAX_RECORDS,
    check_answer,
    check_decision,
    check_gateway,
    check_ttl,
    check_worker,
    next_revision,
    revision_moved,
    takes_over,
    too_many_gateways,
    too_many_keys,
    too_many_workers,
)


class MemoryRegistry(Registry):
    """`now_ms`: any clock that does not go back, in milliseconds."""

    def __init__(self, now_ms: Callable[[], float], event_limit: int = 10_000) -> None:
        self._now_ms = now_ms
        self._event_limit = event_limit
        # Each value with the time when it goes.
        self._workers: dict[str, tuple[WorkerRecord, float]] = {}
        self._gateways: dict[str, tuple[GatewayRecord, float]] = {}
        self._answers: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._desired = Desired()
        self._events: list[Event] = []
        self._sequence = 0
        self._decisions: deque[bytes] = deque(maxlen=MAX_DECISIONS)
        self._keys: dict[str, str] = {}

    @property
    def skipped(self) -> int:
        """Records that could not be read: none here."""
        return 0

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def put_worker(self, record: WorkerRecord, ttl_ms: int) -> None:
        check_worker(record)
        check_ttl(ttl_ms)
        self._prune()
        kept = self._workers.get(record.worker_id)
        if kept is not None and not takes_over(record, kept[0]):
            return
        if kept is None and len(self._workers) >= MAX_RECORDS:
            raise too_many_workers()
        self._workers[record.worker_id] = (record, self._now_ms() + ttl_ms)

    async def remove_worker(self, worker_id: str, incarnation: int) -> None:
        kept = self._workers.get(worker_id)
        if kept is not None and kept[0].incarnation == incarnation:
            del self._workers[worker_id]

    async def workers(self) -> tuple[WorkerRecord, ...]:
        self._prune()
        return tuple(self._workers[worker_id][0] for worker_id in sorted(self._workers))

    async def put_gateway(self, record: GatewayRecord, ttl_ms: int) -> None:
        check_gateway(record)
        check_ttl(ttl_ms)
        self._prune()
        if record.gateway_id not in self._gateways and len(self._gateways) >= MAX_GATEWAYS:
            raise too_many_gateways()
        self._gateways[record.gateway_id] = (record, self._now_ms() + ttl_ms)

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        self._prune()
        return tuple(self._gateways[key][0] for key in sorted(self._gateways))

    async def desired(self) -> Desired:
        return self._desired

    async def replace_desired(self, wanted: Desired, expected_revision: int) -> Desired:
        current = self._desired.revision
        if current != expected_revision:
            raise revision_moved(current, expected_revision)
        self._desired = replace(wanted, revision=next_revision(current, expected_revision, wanted.revision))
        return self._desired

    async def keys(self) -> Mapping[str, str]:
        return dict(self._keys)

    async def put_key(self, digest: str, record: str) -> None:
        if digest not in self._keys and len(self._keys) >= MAX_KEYS:
            raise too_many_keys()
        self._keys[digest] = record

    async def remove_key(self, digest: str) -> bool:
        return self._keys.pop(digest, None) is not None

    async def append_event(self, event: Event) -> Event:
        self._sequence += 1
        kept = replace(event, sequence=self._sequence)
        self._events.append(kept)
        del self._events[: -self._event_limit]
        return kept

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        newer = [event for event in self._events if event.sequence > after]
        return tuple(newer[: max(0, min(limit, MAX_EVENT_BATCH))])

    async def last_events(self, limit: int = 100) -> tuple[Event, ...]:
        count = min(limit, MAX_EVENT_BATCH)
        return tuple(self._events[-count:]) if count > 0 else ()

    async def append_decision(self, decision: bytes) -> None:
        check_decision(decision)
        self._decisions.appendleft(decision)

    async def last_decisions(self, limit: int = 100) -> tuple[bytes, ...]:
        return tuple(self._decisions)[: max(0, limit)]

    async def remember(self, key: str, answer: bytes, ttl_ms: int) -> bytes | None:
        check_answer(key, answer)
        check_ttl(ttl_ms)
        earlier = await self.recall(key)
        if earlier is None:
            self._answers[key] = (answer, self._now_ms() + ttl_ms)
            self._answers.move_to_end(key)
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return earlier

    async def recall(self, key: str) -> bytes | None:
        kept = self._answers.get(key)
        if kept is None:
            return None
        if kept[1] <= self._now_ms():
            del self._answers[key]
            return None
        return kept[0]

    def _prune(self) -> None:
        now_ms = self._now_ms()
        for worker_id in [key for key, (_, until_ms) in self._workers.items() if until_ms <= now_ms]:
            del self._workers[worker_id]
        for gateway_id in [key for key, (_, until_ms) in self._gateways.items() if until_ms <= now_ms]:
            del self._gateways[gateway_id]
