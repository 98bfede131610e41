"""A gateway tells the registry what came to its door: what wakes a fleet that has gone to zero, which has no workers
that could say so."""

from __future__ import annotations

from cluster.gateway.state import GatewayState
from cluster.registry.base import Registry
from cluster.registry.records import GatewayRecord
from kvstore.errors import GenlockError

# A record lives through that many looks that fail.
LOOKS_PER_TTL = 3


class Teller:
    """One life of a gateway."""

    def __init__(self, state: GatewayState, registry: Registry) -> None:
        self._state = state
        self._registry = registry
        self._gateway_id = state.gateway_id = state.sources.random_bytes(16).hex()
        settings = state.config.registry
        self._ttl_ms = max(settings.ttl_ms, LOOKS_PER_TTL * settings.poll_ms)
        # Why the registry did not take it last time; empty: it did.
        self.error = ""

    async def tell(self) -> None:
        """Raises nothing: what is not told now is told with the next look."""
        record = GatewayRecord(
            self._gateway_id, self._state.arrived, len(self._state.waiting), self._state.peer_endpoint
        )
        try:
            await self._registry.put_gateway(record, self._ttl_ms)
        except GenlockError as error:
            self.error = error.message[:256]
        except Exception as unexpected:
            self.error = f"{type(unexpected).__name__}: {unexpected}"[:256]
        else:
            self.error = ""
