"""The waiting room: the order (pure), and that whoever waits gets a place that is free and never one that is not."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.queueing import Priority, Room, joined, left, served, turn
from cluster.gateway.waiting import WaitingRoom
from kvstore.errors import GenlockError, NoCapacity, Unavailable

LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


def room_of(*waiting: tuple[str, Priority], limit: int = 99) -> Room:
    room = Room(limit)
    for number, (tenant, priority) in enumerate(waiting):
        room = joined(room, number, tenant, priority, retry_after_ms=7)
    return room


def order(room: Room) -> list[int]:
    out = []
    while (number := turn(room)) is not None:
        out.append(number)
        room = served(room)
    return out


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([], []),
        ([("a", NORMAL), ("a", NORMAL), ("a", NORMAL)], [0, 1, 2]),
        ([("a", LOW), ("a", NORMAL), ("b", HIGH)], [2, 1, 0]),
        # A tenant with many takes turns with one that has few, and its turn is after those who came before it.
        ([("a", NORMAL), ("a", NORMAL), ("a", NORMAL), ("b", NORMAL)], [0, 3, 1, 2]),
        ([("a", NORMAL), ("b", NORMAL), ("a", NORMAL), ("b", NORMAL), ("c", NORMAL)], [0, 1, 4, 2, 3]),
        # Turns are of one priority: a's high request does not cost it its turn among the normal ones.
        ([("a", NORMAL), ("b", NORMAL), ("a", HIGH)], [2, 0, 1]),
    ],
)
def test_whose_turn_it_is(waiting, expected: list[int]):
    assert order(room_of(*waiting)) == expected


def test_a_tenant_that_comes_again_takes_no_turn_before_its_own():
    room = served(room_of(("a", NORMAL), ("a", NORMAL), ("b", NORMAL)))
    assert turn(room) == 2
    assert order(joined(served(room), 3, "b", NORMAL, retry_after_ms=1)) == [1, 3]


def test_who_leaves_moves_nobody():
    room = room_of(("a", NORMAL), ("b", NORMAL), ("a", NORMAL), ("c", LOW))
    assert order(left(room, 1)) == [0, 2, 3]
    assert order(left(room, 0)) == [2, 1, 3]
    assert left(room, 99) is room
    assert len(left(left(left(left(room, 0), 1), 2), 3)) == 0


def test_a_full_room_refuses_with_a_delay():
    with pytest.raises(NoCapacity) as caught:
        room_of(("a", NORMAL), ("a", NORMAL), limit=1)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("waiting_room_full", 7)


events = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from("abc"), st.sampled_from(list(Priority))),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("serve")),
    ),
    max_size=40,
)


@given(events)
def test_the_order_holds_whatever_happens(happens):
    """Highest priority first; within a tenant and priority first come, first served; a tenant that waits is passed by
    another of its priority at most once between two turns of its own; nobody is lost."""
    room, waiting, passed = Room(12), {}, {}
    for number, event in enumerate(happens):
        if event[0] == "join":
            try:
                room = joined(room, number, event[1], event[2], retry_after_ms=1)
            except NoCapacity:
                assert len(waiting) == 12
                continue
            waiting[number] = event[1:]
        elif event[0] == "leave":
            room = left(room, event[1])
            waiting.pop(event[1], None)
        elif waiting:
            chosen = turn(room)
            tenant, priority = waiting.pop(chosen)
            room = served(room)
            assert priority == max([priority, *(p for _, p in waiting.values())])
            assert not any(key < chosen and value == (tenant, priority) for key, value in waiting.items())
            for other in {t for t, p in waiting.values() if p is priority and t != tenant}:
                times = passed.setdefault((other, priority), {})
                times[tenant] = times.get(tenant, 0) + 1
                assert times[tenant] <= 1, f"{tenant} passed {other} twice"
            passed.pop((tenant, priority), None)
        assert len(room) == len(waiting) <= 12
        for key in [key for key in passed if key not in {(t, p) for t, p in waiting.values()}]:
            del passed[key]
    assert sorted(order(room)) == sorted(waiting)


# --- the shell -----------------------------------------------------------------------------------------------------


class Places:
    """`limit` places; the room is told when one is given back."""

    def __init__(self, limit: int, room_limit: int = 99) -> None:
        self.limit = limit
        self.taken = 0
        self.most = 0
        self.room = WaitingRoom(room_limit, 5)
        self.order: list[int] = []

    def take(self, count: int = 1, name: int = 0) -> int:
        if self.taken + count > self.limit:
            raise NoCapacity("decode_full")
        self.taken += count
        self.most = max(self.most, self.taken)
        self.order.append(name)
        return count

    def give_back(self, count: int = 1) -> None:
        self.taken -= count
        self.room.look()

    def ask(self, name: int, priority: Priority = NORMAL, tenant: str = "a", count: int = 1, wait_ms: int = 5000):
        return asyncio.create_task(self.room.place(lambda: self.take(count, name), tenant, priority, wait_ms))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_place_that_is_given_back_goes_to_the_highest_priority():
    places = Places(1)
    first = places.ask(0)
    await first
    tasks = [places.ask(1, LOW), places.ask(2, NORMAL), places.ask(3, HIGH)]
    await turns()
    assert len(places.room) == 3
    for _ in range(3):
        places.give_back()
        await turns()
    assert (places.order, places.most, len(places.room)) == ([0, 3, 2, 1], 1, 0)
    await asyncio.gather(*tasks)


async def test_nobody_takes_a_place_that_another_waits_for():
    places = Places(2)
    await places.ask(0)
    await places.ask(1)
    big = places.ask(2, count=2)
    await turns()
    places.give_back()
    small = places.ask(3)
    await turns()
    assert not big.done()
    assert not small.done()
    places.give_back()
    await turns()
    assert (await big, small.done()) == (2, False)
    places.give_back(2)
    assert await small == 1


async def test_who_leaves_wakes_the_next():
    places = Places(2)
    await places.ask(0)
    big, small = places.ask(1, count=2), places.ask(2)
    await turns()
    assert not small.done()
    big.cancel()
    await asyncio.wait((big,))
    assert (await small, len(places.room)) == (1, 0)


async def test_without_time_it_is_refused_at_once_and_after_its_time_with_the_reason():
    places = Places(0)
    for wait_ms, words in ((0, ""), (1, "waited 1 ms")):
        with pytest.raises(NoCapacity) as caught:
            await places.ask(1, wait_ms=wait_ms)
        assert caught.value.reason == "decode_full"
        assert words in caught.value.message
    assert len(places.room) == 0


async def test_a_failure_is_its_own_and_the_next_goes_on():
    places = Places(1)
    await places.ask(0)

    def gone() -> int:
        if not places.taken:
            raise Unavailable("no_decode_worker")
        raise NoCapacity("decode_full")

    failing = asyncio.create_task(places.room.place(gone, "a", HIGH, 5000))
    good = places.ask(1)
    await turns()
    places.give_back()
    assert await good == 1
    with pytest.raises(Unavailable):
        await failing


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abc"), st.sampled_from(list(Priority)), st.integers(1, 3)),
        st.tuples(st.just("free"), st.integers(0, 9)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("turn")),
    ),
    max_size=30,
)


@given(steps)
def test_never_above_the_limit_and_no_wakeup_is_lost(happens):
    """At rest, whoever's turn it is does not fit; at the end everybody who did not leave has had a place."""

    async def run() -> None:
        places, held, tasks, needs = Places(3, room_limit=8), [], [], {}

        async def one(number: int, tenant: str, priority: Priority, count: int) -> None:
            taken = False

            def attempt() -> None:
                nonlocal taken
                places.take(count, number)
                taken = True

            try:
                await places.room.place(attempt, tenant, priority, 60_000)
                gate = asyncio.Event()
                held.append(gate)
                await gate.wait()
            finally:
                if taken:
                    places.give_back(count)

        def free(at: int) -> None:
            if held:
                held.pop(at % len(held)).set()

        for number, step in enumerate(happens):
            if step[0] == "ask":
                needs[number] = step[3]
                tasks.append(asyncio.create_task(one(number, *step[1:])))
            elif step[0] == "free":
                free(step[1])
            elif step[0] == "cancel" and tasks:
                tasks[step[1] % len(tasks)].cancel()
            else:
                await turns()
                head = turn(places.room._room)
                if head is not None:
                    waiter = places.room._waiters[head]
                    with pytest.raises(NoCapacity):
                        waiter.attempt()
            assert places.taken <= 3
        for _ in range(2 * len(tasks) + 2):
            await turns()
            free(0)
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        refused = [e for e in ended if isinstance(e, GenlockError)]
        assert all(e.reason == "waiting_room_full" for e in refused)
        assert (places.taken, len(places.room), places.room._waiters) == (0, 0, {})

    asyncio.run(run())
