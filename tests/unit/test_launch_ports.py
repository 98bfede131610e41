"""Where a worker listens: its host's address, and the first free port of a range that others can name."""

from __future__ import annotations

import socket

import pytest

from cluster.config import load
from cluster.gateway.served import ServedModel
from cluster.launch import build, ports
from cluster.launch.build import build_worker
from cluster.launch.doors import Doors, Seams
from cluster.launch.launcher import InProcessLauncher, OnLost, ignore_loss
from cluster.launch.ports import PORTS_TO_TRY, check_free, first_free, own_address
from cluster.launch.spec import WorkerSpec
from cluster.launch.up import Cluster
from cluster.openai.server import HttpDoor
from cluster.roles import Role
from cluster.settings import Config
from kvstore.errors import InvalidInput, Unavailable


class Host:
    """Ports of one host, some of them taken."""

    def __init__(self, *taken: int) -> None:
        self.taken = set(taken)
        self.asked: list[str] = []

    def add(self, address: str) -> int:
        self.asked.append(address)
        port = int(address.rpartition(":")[2]) or 50_123
        if port in self.taken:
            raise RuntimeError("taken")
        self.taken.add(port)
        return port


def test_workers_of_one_host_take_one_after_the_other() -> None:
    host = Host(20_001)
    assert [first_free(host.add, "10.0.0.1", 20_000) for _ in range(3)] == [20_000, 20_002, 20_003]
    assert host.asked[0] == "10.0.0.1:20000"


def test_any_port() -> None:
    host = Host()
    assert first_free(host.add, "10.0.0.1", 0) == 50_123
    assert host.asked == ["10.0.0.1:0"]


def test_a_full_range_is_a_typed_error() -> None:
    host = Host(*range(20_000, 20_000 + PORTS_TO_TRY))
    with pytest.raises(Unavailable, match="ports 20000 to 20063") as caught:
        first_free(host.add, "10.0.0.1", 20_000)
    assert (caught.value.reason, caught.value.field) == ("port_taken", "workers.port")
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1:0"):
        first_free(Host(50_123).add, "10.0.0.1", 0)


def test_a_range_ends_with_the_ports() -> None:
    host = Host(*range(65_472, 65_536))
    with pytest.raises(Unavailable, match="to 65535"):
        first_free(host.add, "10.0.0.1", 65_472)


class Probe:
    """A datagram socket that knows a route, or none."""

    route = ""

    def __init__(self, *_kind: object) -> None: ...

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_exc: object) -> None: ...

    def connect(self, _address: tuple[str, int]) -> None:
        if not self.route:
            raise OSError("Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.route, 1234


def test_a_named_address_stays() -> None:
    assert own_address("10.0.0.1") == "10.0.0.1"


def test_auto_is_the_address_of_the_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports.socket, "socket", Probe)
    with pytest.raises(InvalidInput, match="no route") as caught:
        own_address("auto")
    assert caught.value.field == "workers.host"
    monkeypatch.setattr(Probe, "route", "10.0.0.7")
    assert own_address("auto") == "10.0.0.7"


def test_a_worker_tells_the_address_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to Prometheus: metrics that listen everywhere are told at the worker's own address."""
    monkeypatch.setattr(build, "own_address", lambda setting: {"auto": "10.0.0.7"}[setting])
    config = load(flags={"workers.host": "auto", "metrics.host": "0.0.0.0", "metrics.worker_port": "0"}).config
    worker = build.build_worker(WorkerSpec(Role.DECODE, "decode-0", config, host=config.workers.host))
    assert worker.spec.host == "10.0.0.7"
    try:
        worker.telemetry.start()
        assert worker.telemetry.endpoint.startswith("10.0.0.7:")
    finally:
        worker.telemetry.stop()


@pytest.mark.parametrize("setting", ["api.port", "api.http_port", "metrics.port"])
async def test_a_port_that_is_taken_is_told_before_anything_is_started(setting: str) -> None:
    started: list[str] = []

    class Recording(InProcessLauncher):
        async def open(self, specs: list[WorkerSpec]) -> None:
            started.append("room")

        async def start(self, spec: WorkerSpec, on_lost: OnLost = ignore_loss) -> str:
            started.append(spec.worker_id)
            raise AssertionError("a worker is started for nothing")

    async def served(_config: Config) -> ServedModel:
        raise AssertionError("a tokenizer is loaded for nothing")

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        config = load(flags={"api.port": 0, "api.http_port": 0, "metrics.port": 0, setting: taken}).config
        cluster = Cluster(config, Recording(build_worker), served, make_door=HttpDoor)
        with pytest.raises(Unavailable, match=f"127.0.0.1:{taken} .*choose another {setting}") as caught:
            await cluster.start()
    assert (caught.value.reason, caught.value.field, started) == ("port_taken", setting, [])


def test_a_door_that_is_not_opened_needs_no_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        config = load(flags={"api.port": 0, "api.http_port": taken, "metrics.port": -1}).config
        Doors(config, Seams(), None).check()
        with pytest.raises(Unavailable):
            Doors(config, Seams(), HttpDoor).check()


def test_a_host_without_an_address_is_left_to_the_door_that_names_it() -> None:
    check_free([("api.port", "no.such.host.invalid", 50_051)])
