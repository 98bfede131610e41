"""The autoscaler's decisions: kept in the registry, so that the next life of the controller can explain them."""

from __future__ import annotations

from collections import deque

from google.protobuf.message import DecodeError

from cluster.registry.base import Registry
from genlock.v1.operator_pb2 import AutoscaleDecision
from kvstore.errors import GenlockError, InvalidInput

# In this process: for as long as the registry is away.
MAX_HELD = 1000


class Decisions:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # Newest first; those that the registry does not have yet are the first `_unkept` of them.
        self._held: deque[AutoscaleDecision] = deque(maxlen=MAX_HELD)
        self._unkept = 0

    def add(self, decision: AutoscaleDecision) -> None:
        self._held.appendleft(decision)
        self._unkept = min(self._unkept + 1, MAX_HELD)

    async def keep(self) -> None:
        """Gives the registry what it lacks, oldest first. Raises nothing: what it does not take now it is given with
        the next decision."""
        while self._unkept:
            decision = self._held[self._unkept - 1]
            try:
                await self._registry.append_decision(decision.SerializeToString())
            except InvalidInput:
                pass  # it is shown while this process lives, and stands in nobody's way
            except GenlockError:
                return
            self._unkept -= 1

    async def last(self, limit: int) -> tuple[AutoscaleDecision, ...]:
        """Newest first, also those of earlier lives. While the registry is away: those of this one."""
        limit = max(0, limit)
        unkept = tuple(self._held)[: min(limit, self._unkept)]
        try:
            kept = await self._registry.last_decisions(limit - len(unkept))
        except GenlockError:
            return tuple(self._held)[:limit]
        return (*unkept, *(found for text in kept if (found := _read(text)) is not None))


def _read(text: bytes) -> AutoscaleDecision | None:
    try:
        return AutoscaleDecision.FromString(text)
    except DecodeError:
        return None
