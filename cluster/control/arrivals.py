"""Requests that came to the fleet's doors, from what all gateways tell the registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from cluster.registry.base import Registry
from cluster.registry.records import GatewayRecord
from cluster.registry.rules import MAX_GATEWAYS
from kvstore.errors import GenlockError

Seen = Mapping[str, int]


def came(seen: Seen | None, records: Iterable[GatewayRecord]) -> tuple[Seen, float]:
    """Pure. What each gateway had told by now, and how many requests came since `seen` or wait now. `seen` None: this
    is the first look, and what came before it is not known to be new."""
    # Those that tell nothing at the moment are kept: back again, all they ever had would look new.
    known = dict(seen or {})
    fresh = waiting = 0
    for record in records:
        before = known.pop(record.gateway_id, record.arrived if seen is None else 0)
        fresh += max(0, record.arrived - before)
        waiting += record.waiting
        known[record.gateway_id] = record.arrived
    for name in list(known)[: max(0, len(known) - 2 * MAX_GATEWAYS)]:
        del known[name]
    return MappingProxyType(known), float(max(fresh, waiting))


class Arrivals:
    """Memory between looks."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen: Seen | None = None

    async def since_last(self) -> float | None:
        """None where nobody tells: no gateway is registered, or the registry does not answer."""
        try:
            records = await self._registry.gateways()
        except GenlockError:
            return None
        self._seen, count = came(self._seen, records)
        return count if records else None
