"""The controller's actor without Ray: it begins by itself, waits for what is away, and survives surprises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cluster.config import load
from cluster.control import actor
from cluster.control.actor import ControllerActor, Pulse
from cluster.launch.controlling import check_alone
from kvstore.errors import InvalidInput, Unavailable


class FakeService:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.stopped = threading.Event()

    async def start(self) -> str:
        if self.error is not None:
            raise self.error
        return "h:1"

    async def stop(self) -> None:
        self.stopped.set()


def until(pulse: Callable[[], Pulse], true: Callable[[Pulse], bool]) -> Pulse:
    deadline = time.monotonic() + 10
    while not true(found := pulse()):
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return found


def test_it_tries_until_it_serves_and_stops_in_good_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actor, "FIRST_RETRY_S", 0.01)
    services = [FakeService(Unavailable("x", "the registry is away")), FakeService(ValueError("?")), FakeService(None)]
    coming = iter(services)
    controller = ControllerActor(lambda: next(coming), "label")
    found = until(controller.pulse, lambda pulse: bool(pulse.endpoint))
    assert (found.endpoint, found.attempts, found.error, found.label) == ("h:1", 3, "", "label")
    assert [service.stopped.is_set() for service in services] == [True, True, False]
    controller.stop()
    assert services[2].stopped.is_set()


def test_what_keeps_it_is_told():
    controller = ControllerActor(lambda: FakeService(Unavailable("x", "the registry is away")))
    assert until(controller.pulse, lambda pulse: "away" in pulse.error).endpoint == ""
    controller.stop()


GOOD = {"registry.url": "redis://127.0.0.1:1/0", "cluster.secret": "ab" * 16, "control.ray_address": "auto"}


@pytest.mark.parametrize("missing", sorted(GOOD))
def test_a_controller_on_its_own_names_the_setting_that_is_missing(missing: str):
    check_alone(load(flags=GOOD).config)
    with pytest.raises(InvalidInput) as caught:
        check_alone(load(flags={key: value for key, value in GOOD.items() if key != missing}).config)
    assert caught.value.field == missing
