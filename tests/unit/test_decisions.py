"""Decisions of the autoscaler outlive the controller that made them."""

from __future__ import annotations

from cluster.control.decisions import MAX_HELD, Decisions
from cluster.registry.memory import MemoryRegistry
from genlock.v1.operator_pb2 import AutoscaleDecision
from kvstore.errors import Unavailable


def decision(number: int) -> AutoscaleDecision:
    return AutoscaleDecision(at_ms=number, inputs={"decode.running": number}, reasons=[f"because of {number}"])


class Breaking(MemoryRegistry):
    away = False

    async def append_decision(self, decision: bytes) -> None:
        self._check()
        await super().append_decision(decision)

    async def last_decisions(self, limit: int = 100) -> tuple[bytes, ...]:
        self._check()
        return await super().last_decisions(limit)

    def _check(self) -> None:
        if self.away:
            raise Unavailable("registry_unreachable", "away")


async def test_the_next_life_of_the_controller_explains_what_the_last_one_decided() -> None:
    registry = MemoryRegistry(lambda: 0.0)
    first = Decisions(registry)
    for number in (1, 2):
        first.add(decision(number))
        await first.keep()
    second = Decisions(registry)
    second.add(decision(3))
    assert await second.last(10) == (decision(3), decision(2), decision(1)), "one of them not kept yet"
    await second.keep()
    assert await second.last(10) == (decision(3), decision(2), decision(1))
    assert await second.last(2) == (decision(3), decision(2))
    assert await second.last(0) == await second.last(-1) == ()


async def test_a_registry_that_is_away_gets_them_later_and_meanwhile_those_of_this_life_are_shown() -> None:
    registry = Breaking(lambda: 0.0)
    earlier = Decisions(registry)
    earlier.add(decision(1))
    await earlier.keep()
    registry.away = True
    made = Decisions(registry)
    for number in range(2, 5):
        made.add(decision(number))
        await made.keep()
    assert await made.last(10) == (decision(4), decision(3), decision(2))
    registry.away = False
    await made.keep()
    assert await Decisions(registry).last(10) == (decision(4), decision(3), decision(2), decision(1))


async def test_what_is_held_is_bounded_and_what_nobody_can_keep_or_read_is_passed_over() -> None:
    registry = Breaking(lambda: 0.0)
    registry.away = True
    made = Decisions(registry)
    for number in range(MAX_HELD + 5):
        made.add(decision(number))
    assert len(await made.last(10_000)) == MAX_HELD
    registry.away = False
    await made.keep()
    assert len(await registry.last_decisions(10_000)) == MAX_HELD
    made.add(AutoscaleDecision(reasons=["x" * 20_000]))
    made.add(decision(9_999))
    await made.keep()
    await registry.append_decision(b"\xff\xff")
    assert (await made.last(1), await made.last(2)) == ((), (decision(9_999),))
