"""What all gateways tell of their doors, as one number: only what is new, or waits."""

from __future__ import annotations

from cluster.control.arrivals import Arrivals, came
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import GatewayRecord
from cluster.registry.rules import MAX_GATEWAYS
from kvstore.errors import Unavailable


def test_only_what_came_since_the_last_look_counts() -> None:
    seen, count = came(None, [GatewayRecord("a", 900)])
    assert count == 0, "before the first look: an earlier controller has heard of it"
    seen, count = came(seen, [GatewayRecord("a", 903), GatewayRecord("b", 2)])
    assert count == 5, "a gateway that is new since then counts from its start"
    assert came(seen, [GatewayRecord("a", 903), GatewayRecord("b", 2)])[1] == 0


def test_what_waits_counts_as_long_as_it_waits() -> None:
    seen, count = came(None, [GatewayRecord("a", 7, waiting=2)])
    assert count == 2
    assert came(seen, [GatewayRecord("a", 7, waiting=2)])[1] == 2


def test_a_gateway_that_was_silent_for_a_while_brings_nothing_new() -> None:
    seen, _ = came(None, [GatewayRecord("a", 900)])
    seen, _ = came(seen, [])
    assert came(seen, [GatewayRecord("a", 900)])[1] == 0


def test_gateways_that_are_gone_are_forgotten_at_last() -> None:
    seen = None
    for number in range(4 * MAX_GATEWAYS):
        seen, _ = came(seen, [GatewayRecord(f"g{number}", 1)])
    assert len(seen or {}) == 2 * MAX_GATEWAYS
    assert f"g{4 * MAX_GATEWAYS - 1}" in (seen or {})


async def test_where_nobody_tells_nothing_is_known(monkeypatch) -> None:
    registry = MemoryRegistry(lambda: 0.0)
    arrivals = Arrivals(registry)
    assert await arrivals.since_last() is None
    await registry.put_gateway(GatewayRecord("a", 1), 1000)
    assert await arrivals.since_last() == 1

    async def away() -> None:
        raise Unavailable("registry_unreachable", "away")

    monkeypatch.setattr(registry, "gateways", away)
    assert await arrivals.since_last() is None
