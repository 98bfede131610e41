"""The door of a worker that drains."""

from __future__ import annotations

import pytest

from kvstore.errors import Unavailable
from wire.admission import Admission


class Clock:
    now = 100

    def __call__(self) -> int:
        return self.now


def test_late_requests_are_taken_until_the_door_closes():
    clock = Clock()
    door = Admission("decode", clock)
    door.require()
    assert not door.draining
    door.drain(50)
    clock.now += 49
    door.require()
    assert (door.draining, door.closed) == (True, False)
    clock.now += 1
    with pytest.raises(Unavailable) as caught:
        door.require()
    assert (caught.value.reason, door.closed) == ("draining", True)


@pytest.mark.parametrize(("first", "second"), [(50, 10), (10, 50)])
def test_the_earlier_close_counts(first: int, second: int):
    clock = Clock()
    door = Admission("prefill", clock)
    door.drain(first)
    door.drain(second)
    clock.now += 10
    assert door.closed


def test_without_an_opening_it_closes_at_once():
    door = Admission("prefill", Clock())
    door.drain(-5)
    assert door.closed
