"""Which nodes a worker may go to: `{role}` in the settings of workers, and rooms that are counted apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest

from cluster.config import load
from cluster.control.hands import Room
from cluster.launch.controlling import ControllerService, make_ray_service
from cluster.launch.hands import LauncherHands, make_controller, spec_of
from cluster.launch.launcher import Launcher, ignore_loss
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.spec import WorkerBuilder, WorkerSpec
from cluster.registry.memory import MemoryRegistry
from cluster.roles import Role
from cluster.settings import Config
from kvstore.errors import InvalidInput, NoCapacity


def config_with(**workers: str) -> Config:
    return load(flags={f"workers.{key}": value for key, value in workers.items()}).config


def test_a_worker_asks_for_nodes_of_its_role() -> None:
    config = config_with(resources="{role}=1,rack=0.5", labels="genlock-role={role}")
    for role in Role:
        own = spec_of(config, role, f"{role.value}-0").config.workers
        assert own.resources == f"{role.value}=1,rack=0.5"
        assert own.labels == f"genlock-role={role.value}"
    assert spec_of(Config(), Role.DECODE, "decode-0").config == Config()


@pytest.mark.parametrize(("key", "value"), [("resources", "{rank}=1"), ("labels", "a={rank}"), ("labels", "{role}=a")])
def test_other_placeholders_are_refused(key: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"workers.{key}"):
        config_with(**{key: value})


class Rooms:
    """A launcher that remembers what it was asked to have room for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.avoided: set[frozenset[str]] = set()

    async def check_room(self, specs: list[WorkerSpec]) -> None:
        self.asked.append([spec.worker_id for spec in specs])
        self.avoided |= {spec.avoid for spec in specs}


@pytest.mark.parametrize(
    ("resources", "asked"),
    [
        ("", [["prefill-0", "decode-0", "decode-1"]]),
        ("rack=1", [["prefill-0", "decode-0", "decode-1"]]),
        ("{role}=1", [["prefill-0"], ["decode-0", "decode-1"]]),
    ],
)
async def test_room_is_counted_for_those_that_share_nodes(resources: str, asked: list[list[str]]) -> None:
    rooms = Rooms()
    hands = LauncherHands(config_with(resources=resources), cast(Launcher, rooms), ignore_loss)
    await hands.check_room({Role.PREFILL: 1, Role.DECODE: 2}, frozenset({"id-a"}))
    assert rooms.asked == asked
    assert rooms.avoided == {frozenset({"id-a"})}


def test_on_kubernetes_a_place_may_first_have_to_become_a_pod(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.launch.logs.start_logging", lambda *_args: None)
    flags = {
        "registry.url": "redis://127.0.0.1:1/0", "cluster.secret": "0f" * 32, "control.ray_address": "auto",
        "kube.node_timeout_ms": 90_000,
    }  # fmt: skip
    for enabled, place_s in ((False, 10.0), (True, 90.0)):
        config = load(flags={**flags, "kube.enabled": enabled}).config
        service = cast(ControllerService, make_ray_service(config, cast(WorkerBuilder, None), ""))
        assert cast(RayLauncher, service._launcher)._place_s == place_s


async def test_the_controller_has_room_where_it_owns_the_nodes() -> None:
    class Nodes:
        async def check(self, counts: Mapping[Role, int]) -> None:
            raise NoCapacity("above_max_replicas", f"{counts[Role.DECODE]} are too many")

    class Full:
        async def check_room(self, specs: list[WorkerSpec]) -> None:
            raise NoCapacity("no_place")

    config = Config()
    hands = LauncherHands(config, cast(Launcher, Full()), ignore_loss)
    for room, reason in ((None, "no_place"), (cast(Room, Nodes()), "above_max_replicas")):
        controller = make_controller(config, MemoryRegistry(lambda: 0.0), hands, room)
        with pytest.raises(NoCapacity) as raised:
            await controller.check_room({Role.DECODE: 3})
        assert raised.value.reason == reason
