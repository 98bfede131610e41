"""Which nodes a worker may go to: `{role}` in the settings of workers, and rooms that are counted apart."""

from __future__ import annotations

from typing import cast

import pytest

from cluster.config import load
from cluster.launch.hands import LauncherHands, spec_of
from cluster.launch.launcher import Launcher, ignore_loss
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.settings import Config
from kvstore.errors import InvalidInput


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

    async def check_room(self, specs: list[WorkerSpec]) -> None:
        self.asked.append([spec.worker_id for spec in specs])


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
    await hands.check_room({Role.PREFILL: 1, Role.DECODE: 2})
    assert rooms.asked == asked
