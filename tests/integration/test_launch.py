"""A cluster comes up, serves, loses workers, and leaves nothing behind: in one process and on Ray."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from cluster.launch.launcher import InProcessLauncher
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.spec import WorkerBuilder, WorkerSpec
from cluster.launch.up import Cluster, specs_of
from cluster.roles import Role
from cluster.settings import ControlConfig
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvstore.errors import DeadlineExceeded, InvalidInput, NoCapacity, NotFound, Unavailable
from tests.support.fake_workers import (
    build_fake,
    build_fake_that_fails_as_decode,
    build_fake_that_hangs,
    config,
    load_fake,
)
from wire.calls import responses


async def ask(endpoint: str, text: str = "hello") -> str:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text=text), timeout=10)
        return "".join([message.text async for message in responses(call)])


async def states(endpoint: str) -> dict[str, str]:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        answer = await stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=5)
    return {entry.worker_id: entry.state for entry in answer.workers}


async def test_a_cluster_in_one_process_serves_and_stops_decode_first():
    order: list[str] = []
    launcher = InProcessLauncher(build_fake)
    said: list[str] = []
    cluster = Cluster(config(workers__decode=2), launcher, load_fake, report=said.append)
    endpoint = await cluster.start()
    assert set(await states(endpoint)) == {"prefill-0", "decode-0", "decode-1"}
    assert await ask(endpoint) == "hello"
    workers = dict(launcher.workers)
    for worker_id, worker in workers.items():
        plain = worker.stop

        async def stop(grace_ms: int, worker_id=worker_id, plain=plain) -> None:
            order.append(worker_id)
            await plain(grace_ms)

        worker.stop = stop
    await cluster.stop(100)
    assert sorted(order[:2]) == ["decode-0", "decode-1"]
    assert order[2] == "prefill-0"
    assert all(worker.stops == [100] for worker in workers.values())
    assert launcher.workers == {}
    assert any("serving at" in line for line in said)
    with pytest.raises(Unavailable):
        await ask(endpoint)


async def test_every_worker_gets_the_same_drawn_secret():
    launcher = InProcessLauncher(build_fake)
    cluster = Cluster(config(), launcher, load_fake)
    secrets = {spec.config.cluster.secret for spec in specs_of(cluster.config)}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64
    assert Cluster(config(), launcher, load_fake).config.cluster.secret != cluster.config.cluster.secret


@pytest.mark.parametrize(
    ("builder", "flags", "kind", "reason"),
    [
        (build_fake_that_fails_as_decode, {}, InvalidInput, "bad_layout"),
        (build_fake_that_hangs, {"workers__start_timeout_ms": 200}, DeadlineExceeded, "start_timeout"),
    ],
)
async def test_a_failed_start_leaves_nothing(builder: WorkerBuilder, flags: dict, kind: type, reason: str):
    launcher = InProcessLauncher(builder)
    cluster = Cluster(config(**flags), launcher, load_fake)
    with pytest.raises(kind) as caught:
        await cluster.start()
    assert caught.value.reason == reason
    assert launcher.workers == {}


async def test_a_missing_model_is_the_error_and_nothing_is_left():
    async def missing(_config):
        raise InvalidInput("unknown_model", "not installed", field="model")

    launcher = InProcessLauncher(build_fake)
    with pytest.raises(InvalidInput, match="not installed"):
        await Cluster(config(), launcher, missing).start()
    assert launcher.workers == {}


async def test_a_taken_port_stops_the_workers_too():
    first, second = (InProcessLauncher(build_fake) for _ in range(2))
    cluster = Cluster(config(), first, load_fake)
    port = int((await cluster.start()).rpartition(":")[2])
    with pytest.raises(Unavailable) as caught:
        await Cluster(config(api__port=port), second, load_fake).start()
    assert caught.value.reason == "port_taken"
    assert second.workers == {}
    await cluster.stop(0)


async def test_a_start_that_is_cancelled_leaves_nothing():
    launcher = InProcessLauncher(build_fake_that_hangs)
    task = asyncio.create_task(Cluster(config(), launcher, load_fake).start())
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert launcher.workers == {}


async def test_a_killed_worker_is_not_routed_to_any_more():
    cluster = Cluster(config(workers__decode=2), InProcessLauncher(build_fake), load_fake)
    endpoint = await cluster.start()
    await cluster.kill_worker("decode-0")
    assert (await states(endpoint))["decode-0"] == "UNREACHABLE"
    assert [await ask(endpoint) for _ in range(3)] == ["hello"] * 3
    with pytest.raises(NotFound):
        await cluster.kill_worker("decode-9")
    await cluster.stop(0)


async def test_too_many_workers_for_the_host_name_demand_and_supply():
    launcher = RayLauncher(build_fake, cpus=1.0)
    with pytest.raises(NoCapacity, match=r"need 1\.5 CPUs \(0\.5 each\), this host offers 1"):
        await Cluster(config(workers__decode=2), launcher, load_fake).start()


def processes_of(folder: str) -> list[int]:
    """Processes whose command line names Ray's folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if folder.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


async def require_no_place(launcher: RayLauncher, cluster: Cluster) -> None:
    """A demand that no node can meet ends in bounded time, naming demand and supply, and its group goes."""
    workers = replace(cluster.config.workers, gpus=8.0)
    spec = WorkerSpec(Role.DECODE, "decode-7", replace(cluster.config, workers=workers))
    with pytest.raises(NoCapacity, match=r"8 GPUs on one node.* 0 GPUs") as caught:
        await launcher.start(spec)
    assert (caught.value.reason, caught.value.field) == ("no_place", "workers.gpus")
    with pytest.raises(NoCapacity, match="2 such workers are wanted in all, 0 have a place"):
        await launcher.check_room([spec, spec])

    def groups() -> list[str]:
        table = importlib.import_module("ray.util").placement_group_table()
        return [group["name"] for group in table.values() if group["state"] != "REMOVED"]

    assert len(await launcher._call(groups)) == len(launcher._started)


@pytest.mark.ray
@pytest.mark.timeout(300)
async def test_a_cluster_on_ray_serves_sees_a_death_and_leaves_nothing():
    said: list[str] = []
    launcher = RayLauncher(build_fake, cpus=2.0, control=ControlConfig(place_timeout_ms=3_000))
    cluster = Cluster(config(workers__decode=2), launcher, load_fake, report=said.append)
    endpoint = await cluster.start()
    folder = launcher._session.folder
    assert processes_of(str(folder))
    assert await ask(endpoint) == "hello"
    await require_no_place(launcher, cluster)
    pids = await launcher._started["decode-0"].actor.__ray_call__.remote(lambda _self: os.getpid())
    assert pids != os.getpid()
    os.kill(pids, signal.SIGKILL)
    async with asyncio.timeout(10):
        while not any("decode-0 is gone" in line for line in said):
            await asyncio.sleep(0.02)
    assert await ask(endpoint) == "hello"
    assert cluster._controller is not None
    back = await cluster._controller.turned(
        lambda s: s.rows["decode-0"].restarts == 1 and s.rows["decode-0"].endpoint, 90_000
    )
    assert back, (cluster._controller.state, said)
    await cluster.gateway.wait_ready(10_000)
    await cluster.stop(1000)
    async with asyncio.timeout(10):
        while processes_of(str(folder)):
            await asyncio.sleep(0.05)
    assert not folder.exists()
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.ray
@pytest.mark.timeout(180)
async def test_a_failed_start_on_ray_is_typed_and_leaves_nothing():
    launcher = RayLauncher(build_fake_that_fails_as_decode, cpus=2.0)
    with pytest.raises(InvalidInput) as caught:
        await Cluster(config(), launcher, load_fake).start()
    assert (caught.value.reason, caught.value.field) == ("bad_layout", "layout.page_tokens")
    assert launcher._session.folder is None
