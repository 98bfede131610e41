"""A controller of its own, with the metrics port of its own."""

from __future__ import annotations

import asyncio
import datetime
import socket
from pathlib import Path

import grpc.aio
import pytest

from cluster.control.state import Phase
from cluster.devca import make
from cluster.launch.controlling import ControllerService
from cluster.launch.launcher import InProcessLauncher
from cluster.tls import dialer_of
from genlock.v1 import operator_pb2, operator_pb2_grpc
from kvstore.errors import Unavailable
from tests.support.fake_workers import build_fake, config
from tests.support.scrape import Scrape, scrape
from tests.support.valkey import Valkey
from wire.calls import answer

WAIT_S = 20


def service(valkey: Valkey, launcher: InProcessLauncher, metrics_port: int) -> ControllerService:
    flags = {
        "registry__url": valkey.url, "cluster__secret": "ab" * 16, "control__ray_address": "auto",
        "metrics__controller_port": metrics_port, "workers__decode": 2,
    }  # fmt: skip
    return ControllerService(config(**flags), launcher)


async def seen(endpoint: str, name: str, count: float, **labels: str) -> Scrape:
    async with asyncio.timeout(WAIT_S):
        while (got := await scrape(endpoint)).value(name, **labels) != count:
            await asyncio.sleep(0.05)
    return got


async def test_it_tells_prometheus_of_fleet_and_registry(valkey: Valkey) -> None:
    launcher = InProcessLauncher(build_fake)
    running = service(valkey, launcher, 0)
    await running.start()
    try:
        got = await seen(running.metrics_endpoint, "genlock_fleet_settled", 1)
        assert got.value("genlock_fleet_workers", role="decode", phase=Phase.READY.value.lower()) == 2
        assert got.value("genlock_build_info", role="controller") == 1
        assert got.value("genlock_controller_registry_up") == 1
        assert "process_resident_memory_bytes" in got.names()
        valkey.kill()
        got = await seen(running.metrics_endpoint, "genlock_controller_registry_up", 0)
        # It goes on with what it knew.
        assert got.value("genlock_fleet_desired_workers", role="decode") == 2
    finally:
        await running.stop()
        await launcher.close()
    with pytest.raises(OSError):
        await scrape(running.metrics_endpoint)


async def test_a_taken_port_is_named_and_off_is_off(valkey: Valkey) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        running = service(valkey, InProcessLauncher(build_fake), other.getsockname()[1])
        with pytest.raises(Unavailable) as caught:
            await running.start()
        await running.stop()
        assert (caught.value.reason, caught.value.field) == ("port_taken", "metrics.controller_port")
    launcher = InProcessLauncher(build_fake)
    running = service(valkey, launcher, -1)
    await running.start()
    await running.stop()
    await launcher.close()
    assert running.metrics_endpoint == ""


async def test_with_certificates_gateways_reach_it_and_nobody_else(valkey: Valkey, tmp_path: Path) -> None:
    made = make(tmp_path / "own", [], datetime.datetime.now(datetime.UTC))
    flags = {
        "registry__url": valkey.url, "cluster__secret": "ab" * 16, "control__ray_address": "auto",
        "tls__cert_file": str(made.cert), "tls__key_file": str(made.key), "tls__ca_file": str(made.ca),
    }  # fmt: skip
    settings = config(**flags)
    launcher = InProcessLauncher(build_fake)
    running = ControllerService(settings, launcher)
    endpoint = await running.start()
    try:
        async with dialer_of(settings.tls).open(endpoint) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            assert (await answer(stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=10))).desired_prefill == 1
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = operator_pb2_grpc.OperatorServiceStub(channel)
            with pytest.raises(Unavailable):
                await answer(stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=10))
    finally:
        await running.stop()
        await launcher.close()
