"""A worker whose step loop stands still: not ready, then not alive, then killed and replaced; its neighbour serves."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.control.state import Phase
from cluster.launch.build import BuiltWorker
from cluster.selftest.lab import load_subject
from tests.integration.test_drain import DrainLab, in_process

FLAGS = {"workers.stall_ms": 2_000, "control.kill_ms": 3_000, "control.backoff_ms": 10}


async def check(endpoint: str, service: str) -> int:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)).status


async def test_a_frozen_step_loop():
    subject = load_subject("probe")
    launcher = in_process(subject)
    async with DrainLab(launcher, subject, dict(FLAGS)) as lab:
        controller = lab.cluster._controller
        assert controller is not None
        worker = launcher.workers["decode-0"]
        assert isinstance(worker, BuiltWorker)
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", "readiness", "liveness"):
            assert await check(worker.endpoint, service) == serving
            assert await check(lab.cluster.gateway.endpoint, service) == serving
        life = controller.row("decode-0").life
        worker.engine.loop.freeze(True)
        assert await controller.turned(lambda s: s.rows["decode-0"].phase is Phase.DEGRADED, 60_000)
        assert await check(worker.endpoint, "readiness") == not_serving
        assert await check(worker.endpoint, "liveness") == serving, "liveness gives up later"
        async with asyncio.timeout(60):
            while await check(worker.endpoint, "liveness") == serving:
                await asyncio.sleep(0.02)
        assert await controller.turned(
            lambda s: s.rows["decode-0"].life > life and s.rows["decode-0"].phase is Phase.READY, 60_000
        )
        await lab.stop_load()
        # Requests on the frozen worker ended typed; nobody got a wrong token, and the others were served.
        assert set(lab.verdicts()) <= {"ok", "drain_cut", "worker_stopped", "peer_unreachable", "decode_unreachable"}
        assert lab.verdicts().count("ok") > 2
