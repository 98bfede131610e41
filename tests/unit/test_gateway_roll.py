"""The roll of running requests: places, labels, and stops that happen once."""

import asyncio

import pytest

from cluster.gateway.roll import Entry, Roll
from cluster.gateway.running import RequestFacts, Running, meant_by
from kvstore.errors import Cancelled, InvalidInput, NoCapacity, Unavailable


class One(Entry):
    """Counts how often its end was begun."""

    def __init__(self, tenant: str, label: str) -> None:
        self.ends = 0
        super().__init__((tenant, label), self._count)

    def _count(self) -> None:
        self.ends += 1


def entered(*keys: tuple[str, str], most: int = 100) -> tuple[Roll[One], list[One]]:
    roll: Roll[One] = Roll(most, 1234)
    entries = [One(*key) for key in keys]
    for entry in entries:
        roll.enter(entry, 0)
    return roll, entries


def test_a_label_names_the_tenants_requests_that_carry_it_and_no_other():
    roll, (first, other_label, other_tenant, second) = entered(("a", "x"), ("a", "y"), ("b", "x"), ("a", "x"))
    assert roll.named("a", "x") == (first, second)
    assert roll.abort("a", "x") == 2
    assert [e.ends for e in (first, second, other_label, other_tenant)] == [1, 1, 0, 0]
    assert isinstance(first.stopped_by, Cancelled)
    assert (first.stopped_by.reason, other_tenant.stopped_by) == ("aborted_by_caller", None)


@pytest.mark.parametrize("key", [("a", "z"), ("c", "x"), ("x", "a"), ("", "x")])
def test_an_unknown_label_names_nobody(key):
    roll, entries = entered(("a", "x"), ("b", "x"))
    assert roll.abort(*key) == 0
    assert not any(entry.ends for entry in entries)


def test_the_empty_label_is_refused_though_requests_carry_it():
    roll, entries = entered(("a", ""), ("a", ""))
    with pytest.raises(InvalidInput) as caught:
        roll.abort("a", "")
    assert (caught.value.reason, caught.value.field) == ("bad_request_id", "request_id")
    assert not any(entry.ends for entry in entries)


def test_a_second_abort_stops_nobody_again_and_is_told_so():
    roll, (one,) = entered(("a", "x"))
    assert (roll.abort("a", "x"), roll.abort("a", "x")) == (1, 0)
    assert one.ends == 1


def test_the_first_stop_is_the_one_that_counts():
    roll, (one,) = entered(("a", "x"))
    assert one.stop(Unavailable("draining"))
    assert roll.abort("a", "x") == 0
    assert (one.ends, one.stopped_by and one.stopped_by.reason) == (1, "draining")


def test_who_leaves_takes_nobody_of_the_same_label_along():
    roll, (first, second) = entered(("a", "x"), ("a", "x"))
    roll.leave(first)
    assert (list(roll), len(roll)) == ([second], 1)
    assert roll.abort("a", "x") == 1
    assert (first.ends, second.ends) == (0, 1)
    with pytest.raises(KeyError):
        roll.leave(first)


def test_a_request_that_leaves_while_its_label_is_aborted_harms_nothing():
    """An end that happens at once, within the stop itself."""
    roll: Roll[Entry] = Roll(10, 1)
    entries: list[Entry] = []
    for number in range(3):
        entry = Entry(("a", "x"), lambda at=number: roll.leave(entries[at]))
        entries.append(entry)
        roll.enter(entry, 0)
    assert roll.abort("a", "x") == 3
    assert len(roll) == 0


def test_places_are_counted_by_tenant_and_in_all():
    roll, (one, *_) = entered(("a", "x"), ("b", "x"), most=3)
    with pytest.raises(NoCapacity) as caught:
        roll.enter(One("a", "y"), 1)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("tenant_full", 1234)
    roll.enter(One("a", "y"), 2)
    with pytest.raises(NoCapacity) as caught:
        roll.enter(One("c", "y"), 0)
    assert caught.value.reason == "gateway_full"
    roll.leave(one)
    roll.enter(One("a", "y"), 2)
    assert len(roll) == 3


async def test_an_operator_who_names_a_servers_id_means_that_request_and_no_label():
    async def sleep() -> None:
        await asyncio.sleep(10)

    tasks = [asyncio.create_task(sleep()) for _ in range(3)]
    keys = (("a", "mine"), ("b", "1d"), ("b", "mine"))
    ids = ("1d", "2d", "3d")
    await asyncio.sleep(0)
    first, masked, third = (
        Running(key, task, RequestFacts(server_id)) for key, task, server_id in zip(keys, tasks, ids, strict=True)
    )
    running = [first, masked, third]
    assert meant_by(running, "1d") == [first]
    assert meant_by(running, "2d") == [masked]
    assert meant_by(running, "mine") == [first, third]
    assert meant_by([Running(("a", ""), tasks[0])], "") == []
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
