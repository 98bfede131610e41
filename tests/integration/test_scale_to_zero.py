"""A fleet that nobody asks goes to zero, and the next request brings it back and is answered: behind `genlock up`, and
with a controller and a gateway that know each other through the registry alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.launch.controlling import ControllerService
from cluster.launch.front import Front
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from cluster.registry.redis import RedisRegistry
from cluster.registry.tell import record_of
from genlock.v1 import inference_pb2_grpc, operator_pb2_grpc
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import NoCapacity
from tests.integration.test_operators import Operator
from tests.support.fake_workers import build_fake, config, load_fake
from tests.support.gateway_cluster import prompt
from tests.support.valkey import Valkey
from wire.calls import responses

WAIT_S = 30
POLICY = """
to_zero: {enabled: true, idle_ms: 1000}
prefill: {low: 0, high: 1}
decode: {low: 0, high: 1}
down: {delay_ms: 200, step: 1}
"""
FLAGS = {"control__autoscale_ms": 100, "control__drain_open_ms": 50, "registry__poll_ms": 50}


@dataclass
class Running:
    operator: Operator
    channel: grpc.aio.Channel
    launcher: InProcessLauncher

    async def counts(self, wanted: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while (fleet := await self.operator.fleet()).desired_decode != wanted or not fleet.settled:
                await asyncio.sleep(0.05)
        assert fleet.desired_prefill == wanted
        assert len(self.launcher.workers) == 2 * wanted

    async def found(self) -> None:
        """The gateway has found the first workers."""
        async with asyncio.timeout(WAIT_S):
            while not await self.serving():
                await asyncio.sleep(0.05)

    async def ask(self) -> str:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        call = stub.Generate(prompt("hello"), timeout=WAIT_S)
        return "".join([message.text async for message in responses(call)])

    async def serving(self) -> bool:
        stub = health_pb2_grpc.HealthStub(self.channel)
        found = await stub.Check(health_pb2.HealthCheckRequest(service="readiness"))
        return found.status == health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def together(_folder: Path, **flags: object) -> AsyncIterator[Running]:
    launcher = InProcessLauncher(build_fake)
    running = Cluster(config(**FLAGS, **flags), launcher, load_fake)
    endpoint = await running.start()
    try:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            yield Running(Operator(operator_pb2_grpc.OperatorServiceStub(channel)), channel, launcher)
    finally:
        await running.stop(0)


async def beat(launcher: InProcessLauncher, valkey: Valkey) -> None:
    """The stand-ins' heartbeats, which real workers have of their own."""
    registry = RedisRegistry(valkey.settings())
    try:
        while True:
            for worker in [worker for worker in launcher.workers.values() if worker.endpoint]:
                status = await worker.Status(None, None)
                record = record_of(status, worker.endpoint, node="n", pod="", told_ms=1, started_ms=1, stall_ms=60_000)
                await registry.put_worker(record, 1000)
            await asyncio.sleep(0.1)
    finally:
        await registry.close()


@asynccontextmanager
async def apart(folder: Path, **flags: object) -> AsyncIterator[Running]:
    valkey = Valkey(folder)
    await valkey.start()
    launcher = InProcessLauncher(build_fake)
    settings = config(
        **FLAGS, registry__url=valkey.url, cluster__secret="ab" * 16, control__ray_address="auto", **flags
    )
    service = ControllerService(settings, launcher)
    front = Front(settings, load_fake)
    await service.start()
    heart = asyncio.create_task(beat(launcher, valkey))
    try:
        endpoint = await front.start()
        async with grpc.aio.insecure_channel(endpoint) as channel:
            yield Running(Operator(operator_pb2_grpc.OperatorServiceStub(channel)), channel, launcher)
    finally:
        heart.cancel()
        await asyncio.gather(heart, return_exceptions=True)
        await front.stop(0)
        await service.stop()
        await launcher.close()
        valkey.kill()


@pytest.mark.parametrize("world", [together, apart])
async def test_a_request_that_meets_nobody_wakes_the_fleet_and_waits_for_it(world, tmp_path: Path) -> None:
    async with world(tmp_path, api__queue_ms=20_000) as running:
        await running.counts(1)
        await running.found()
        assert await running.ask() == "hello"
        await running.operator("SetAutoscale", pb.SetAutoscaleRequest(policy=POLICY))
        for _ in range(2):  # it sleeps and wakes as often as need be
            await running.counts(0)
            assert await running.serving(), "or no balancer would send the request that wakes it"
            assert await running.ask() == "hello"
            await running.counts(1)
            assert await running.serving()


async def test_where_nobody_may_wait_the_refused_request_wakes_the_fleet_all_the_same(tmp_path: Path) -> None:
    async with apart(tmp_path) as running:
        await running.counts(1)
        await running.operator("SetAutoscale", pb.SetAutoscaleRequest(policy=POLICY))
        await running.counts(0)
        with pytest.raises(NoCapacity) as caught:
            await running.ask()
        assert caught.value.reason == "fleet_asleep"
        assert caught.value.retry_after_ms
        await running.counts(1)
