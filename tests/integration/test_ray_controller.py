"""The controller on a Ray cluster of real processes: it dies, its head dies, and serving goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from cluster.cli import doctor_parts
from cluster.config import load
from cluster.gateway.served import ServedModel
from cluster.launch.front import Front
from cluster.selftest.lab import PAGE_TOKENS, Client, Reply, Subject, load_subject
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc
from tests.support.ray_nodes import RayNodes, first_line
from tests.support.valkey import Valkey
from wire.options import open_channel

WAIT_S = 240.0
LONG = 200
SETTINGS = {
    "model.name": "probe",
    "cluster.secret": "ab" * 16,
    "cache.page_tokens": PAGE_TOKENS,
    "cache.prefill_pages": 96,
    "cache.decode_pages": 96,
    "workers.cpus": 0.1,
    "workers.status_poll_ms": 200,
    "workers.resources": "work=1",
    "control.drain_open_ms": 600,
    "workers.drain_timeout_ms": 120_000,
    "registry.poll_ms": 200,
}


class Site:
    """Redis, Ray, `genlock controller`, and a gateway in this process."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.subject = subject
        self.valkey = Valkey(folder)
        self.nodes: RayNodes
        self.front: Front
        self.client: Client
        self.operator: operator_pb2_grpc.OperatorServiceAsyncStub

    async def start(self) -> None:
        await self.valkey.start()
        self.nodes = RayNodes(self.valkey.port)
        await self.nodes.start_head()
        await self.nodes.start_node()
        await self.watch_controller()
        flags = {**SETTINGS, "registry.url": self.valkey.url, "api.port": 0}

        async def load_served(_config: object) -> ServedModel:
            return ServedModel(self.subject.model.info, self.subject.tokenizer)

        self.front = Front(load(flags=flags).config, load_served)
        channel = open_channel(await self.front.start())
        self.client = Client(channel)
        self.operator = operator_pb2_grpc.OperatorServiceStub(channel)
        await self.settled(1, 1)

    async def watch_controller(self) -> str:
        """`genlock controller`; returns the endpoint that it prints."""
        settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
        process = self.nodes.command(
            "controller", "--registry", self.valkey.url, "--ray", self.nodes.address, *settings
        )
        endpoint = await first_line(process, WAIT_S)
        assert endpoint, (self.nodes.folder / "cli.log").read_text()[-2000:]
        return endpoint

    async def stop(self) -> None:
        if hasattr(self, "client"):
            await self.client.channel.close(None)
            await self.front.stop(0)
        if hasattr(self, "nodes"):
            self.nodes.stop()
        self.valkey.kill()

    async def fleet(self) -> pb.FleetView:
        return await self.operator.GetFleet(pb.GetFleetRequest(), timeout=5)

    async def settled(self, prefill: int, decode: int, starts: int = 0) -> pb.FleetView:
        """Waits until the controller (of at least so many starts) says that the fleet is what is wanted."""
        view = pb.FleetView()
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        view = await self.fleet()
                    except grpc.aio.AioRpcError:
                        view = pb.FleetView(reason="the controller does not answer")
                    counts = (view.desired_prefill, view.desired_decode)
                    if view.settled and counts == (prefill, decode) and view.controller_starts >= starts:
                        await self.front.gateway.wait_ready(60_000)
                        return view
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not settled: {view}") from None

    async def nodes_listed(self) -> pb.ListNodesResponse:
        return await self.operator.ListNodes(pb.ListNodesRequest(), timeout=30)

    def lives(self, view: pb.FleetView) -> dict[str, int]:
        return {worker.worker_id: worker.incarnation for worker in view.workers}

    async def long_request(self, name: str) -> asyncio.Task[Reply]:
        """One that is running."""
        running = asyncio.Event()
        task = asyncio.create_task(self.client.ask(self.subject.prompt(name), LONG, lambda _count: running.set()))
        async with asyncio.timeout(60):
            await running.wait()
        return task


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(tmp_path, load_subject("probe"))
    try:
        await site.start()
        yield site
    finally:
        await site.stop()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_doctor_asks_a_real_ray_for_its_versions(tmp_path: Path):
    valkey = Valkey(tmp_path)
    await valkey.start()
    nodes = RayNodes(valkey.port)
    try:
        await nodes.start_head()
        for address, result in ((nodes.address, "ok"), ("127.0.0.1:1", "failed")):
            config = load(flags={"control.ray_address": address}).config
            [found] = await asyncio.to_thread(lambda config=config: list(doctor_parts.ray(config)))
            assert found.result == result, found
    finally:
        nodes.stop()
        valkey.kill()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_controller_that_is_killed_comes_back_and_finds_target_and_workers(site: Site):
    scaled = await site.operator.Scale(pb.ScaleRequest(decode=2), timeout=30)
    assert scaled.added_decode == 1
    before = await site.settled(1, 2)
    request = await site.long_request("controller")
    [pid] = site.nodes.pids(name="ControllerActor")
    os.kill(pid, signal.SIGKILL)
    after = await site.settled(1, 2, before.controller_starts + 1)
    assert site.lives(after) == site.lives(before), "every worker was found again, none was started"
    assert site.subject.right(site.subject.prompt("controller"), await request)
    [again] = site.nodes.pids(name="ControllerActor")
    assert again != pid


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_replaces_the_workers_of_a_drained_node_starts_on_another_one(site: Site):
    before = await site.settled(1, 1)
    assert {worker.node for worker in before.workers} == {"node"}
    drain = pb.DrainWorkersRequest(nodes=["node"], force=True, replace=True)
    await site.operator.Drain(drain, timeout=30)
    async with asyncio.timeout(WAIT_S):
        while set(site.lives(await site.fleet()).values()) & set(site.lives(before).values()):
            await asyncio.sleep(0.1)
    await site.nodes.start_node("other")
    after = await site.settled(1, 1)
    assert {worker.node for worker in after.workers} == {"other"}, "the drained node has room, and is not taken"
    # A worker that crashes stays off it as well, until it is uncordoned and the other one drained.
    pid = site.nodes.pids("other", name="WorkerActor")[0]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while site.lives(again := await site.fleet()) == site.lives(after) or not again.settled:
            await asyncio.sleep(0.1)
    assert {worker.node for worker in again.workers} == {"other"}
    await site.operator.Uncordon(pb.CordonRequest(nodes=["node"]), timeout=30)
    await site.operator.Drain(pb.DrainWorkersRequest(nodes=["other"], force=True, replace=True), timeout=30)
    async with asyncio.timeout(WAIT_S):
        while {worker.node for worker in (await site.fleet()).workers} != {"node"}:
            await asyncio.sleep(0.1)
    await site.settled(1, 1)
    await a_cordoned_node_keeps_its_workers_and_takes_no_other(site)


async def a_cordoned_node_keeps_its_workers_and_takes_no_other(site: Site) -> None:
    """Both workers are on `node`, and `other` is drained."""
    before = site.lives(await site.fleet())
    running = await site.long_request("cordon")
    await site.operator.Cordon(pb.CordonRequest(nodes=["node"]), timeout=30)
    await site.operator.Uncordon(pb.CordonRequest(nodes=["other"]), timeout=30)
    shut = {node.node: (node.drained, node.cordoned) for node in (await site.nodes_listed()).nodes}
    assert (shut["node"], shut["other"]) == ((False, True), (False, False))
    await site.operator.Scale(pb.ScaleRequest(prefill=2, decode=2), timeout=30)
    after = await site.settled(2, 2)
    where = {worker.worker_id: (worker.node, worker.cordoned) for worker in after.workers}
    assert where == {
        "prefill-0": ("node", True), "decode-0": ("node", True),
        "prefill-1": ("other", False), "decode-1": ("other", False),
    }, "the cordoned node has room, and is not taken"  # fmt: skip
    assert {name: life for name, life in site.lives(after).items() if name in before} == before
    assert site.subject.right(site.subject.prompt("cordon"), await running), "what runs there goes on"
    served = await site.client.ask(site.subject.prompt("meanwhile"), 4)
    assert site.subject.right(site.subject.prompt("meanwhile"), served)
    # The other way round: what comes next is on the node that was opened again.
    await site.operator.Uncordon(pb.CordonRequest(nodes=["node"]), timeout=30)
    await site.operator.Cordon(pb.CordonRequest(nodes=["other"]), timeout=30)
    await site.operator.Scale(pb.ScaleRequest(decode=3), timeout=30)
    again = {worker.worker_id: (worker.node, worker.cordoned) for worker in (await site.settled(2, 3)).workers}
    assert again["decode-2"] == again["decode-0"] == ("node", False)
    assert again["decode-1"] == ("other", True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_head_goes_and_comes_back_with_its_state_from_redis(site: Site):
    before = await site.settled(1, 1)
    request = await site.long_request("head")
    # Ray puts the controller's actor where it likes, mostly on the head; on the other node it lives on.
    starts = before.controller_starts + len(site.nodes.pids("head", "ControllerActor"))
    site.nodes.kill_head()
    assert site.subject.right(site.subject.prompt("head"), await request), "serving needs no head"
    short = await site.client.ask(site.subject.prompt("meanwhile"), 4)
    assert site.subject.right(site.subject.prompt("meanwhile"), short), "new requests need none either"
    await site.nodes.start_head()
    later = await site.settled(1, 1, starts)
    assert site.lives(later) == site.lives(before)

    # The new controller does its work: more workers, and a drain under load that costs nobody a request.
    await site.operator.Scale(pb.ScaleRequest(decode=2), timeout=30)
    await site.settled(1, 2)
    names = [f"drain {number}" for number in range(4)]
    tasks = [await site.long_request(name) for name in names]
    await site.operator.Scale(pb.ScaleRequest(decode=1), timeout=30)
    await site.settled(1, 1)
    for name, reply in zip(names, await asyncio.gather(*tasks), strict=True):
        assert site.subject.right(site.subject.prompt(name), reply), reply.error
