"""A gateway and its doors: opened together, and closed together whatever fails."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from cluster.gateway.state import GatewayState
from cluster.launch.doors import Door
from cluster.launch.front import Front
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from cluster.registry.memory import MemoryRegistry
from kvstore.errors import Unavailable
from tests.support.fake_workers import build_fake, config, load_fake


class Creaking:
    """A door that keeps the gateway's state, and fails where it is told to."""

    def __init__(self, fails_at: str) -> None:
        self.fails_at = fails_at
        self.did: list[str] = []

    def __call__(self, state: GatewayState) -> Door:
        self.state = state
        return self

    async def start(self) -> str:
        self._step("start")
        return "http://here"

    async def stop(self) -> None:
        # A door is closed last: what runs behind it still has to be answered through it.
        self._step(f"stop, draining: {self.state.draining}")

    def _step(self, what: str) -> None:
        self.did.append(what)
        if what.startswith(self.fails_at):
            raise Unavailable("stuck", "the door is stuck")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def cluster_with(door: Creaking, port: int, launcher: InProcessLauncher) -> Cluster:
    return Cluster(config(api__port=port), launcher, load_fake, make_door=door)


def front_with(door: Creaking, port: int, _launcher: InProcessLauncher) -> Front:
    return Front(config(api__port=port), load_fake, make_door=door, registry=MemoryRegistry(lambda: 0.0))


@pytest.mark.parametrize("make", [cluster_with, front_with])
@pytest.mark.parametrize("fails_at", ["start", "stop", "nothing"])
async def test_whatever_door_is_stuck_nothing_is_left_open(
    make: Callable[[Creaking, int, InProcessLauncher], Cluster | Front], fails_at: str
) -> None:
    door, port, launcher = Creaking(fails_at), free_port(), InProcessLauncher(build_fake)
    running = make(door, port, launcher)
    if fails_at == "start":
        with pytest.raises(Unavailable, match="stuck"):
            await running.start()
    else:
        assert await running.start() == f"127.0.0.1:{port}"
        assert running.url == "http://here"
        assert running.gateway.endpoint == f"127.0.0.1:{port}"
        if fails_at == "stop":
            with pytest.raises(Unavailable, match="stuck"):
                await running.stop(0)
        else:
            await running.stop(0)
    assert door.did == ["start", "stop, draining: True"]
    assert launcher.workers == {}
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", port)) != 0, "the gateway still listens"
    if isinstance(running, Cluster):
        assert running._controller is None, "the controller would start workers again"
    await running.stop(0)
    assert door.did == ["start", "stop, draining: True"], "closed once"
