"""The HTTP door in front of a real gateway with scripted workers, or of a real cluster that serves the probe model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from types import SimpleNamespace

import grpc.aio
import openai

from cluster.config import load
from cluster.gateway.served import ServedModel
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from cluster.openai.server import HttpDoor
from genlock.v1 import inference_pb2_grpc
from model.load import load_model
from tests.support.fake_workers import Script, echo
from tests.support.gateway_cluster import cluster

PAGE_TOKENS = 16


def client_of(url: str, key: str = "any") -> openai.AsyncOpenAI:
    """The stock client; it does not ask again by itself."""
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


@asynccontextmanager
async def scripted(script: Script = echo, **options: object) -> AsyncIterator[SimpleNamespace]:
    """Scripted workers of both roles behind a gateway with both doors. Options are those of `cluster`."""
    async with cluster(script, api__http_port=0, **options) as env:
        door = HttpDoor(env.state, unix_s=lambda: 1_700_000_000.0)
        env.door, env.url = door, await door.start()
        env.port = int(env.url.split(":")[2].split("/")[0])
        env.client = client_of(env.url)
        try:
            yield env
        finally:
            await env.client.close()
            await door.stop()


@cache
def probe(named: str = "probe"):
    """The probe model, or another one, and its tokenizer; loaded once."""
    return load_model(named)


class ProbeCluster:
    """Real workers, real transfer, real gateway with both doors, in this process. `named`: what serves in the probe's
    place."""

    def __init__(self, named: str = "probe", **flags: object) -> None:
        model, tokenizer = probe(named)

        async def served(_config: object) -> ServedModel:
            return ServedModel(model.info, tokenizer)

        base: dict[str, object] = {
            "model.name": named,
            "cache.page_tokens": PAGE_TOKENS,
            "cache.prefill_pages": 96,
            "cache.decode_pages": 96,
            "workers.status_poll_ms": 100,
            "api.port": 0,
            "api.http_port": 0,
        }
        settings = load(flags={**base, **{key.replace("__", "."): value for key, value in flags.items()}}).config
        self.launcher = InProcessLauncher(
            lambda spec: BuiltWorker(spec, WorkerTuning(model=model, tokenizer=tokenizer))
        )
        self.cluster = Cluster(settings, self.launcher, served, make_door=HttpDoor)

    async def __aenter__(self) -> ProbeCluster:
        self.endpoint = await self.cluster.start()
        self.client = client_of(self.cluster.url)
        self.channel = grpc.aio.insecure_channel(self.endpoint)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.client.close()
        await self.channel.close()
        await self.cluster.stop(0)

    def worker(self, worker_id: str) -> BuiltWorker:
        worker = self.launcher.workers[worker_id]
        assert isinstance(worker, BuiltWorker)
        return worker

    async def all_pages_are_back(self, limit_s: float = 10.0) -> bool:
        """Whether both pools are whole again once prefill has forgotten its prefixes."""
        prefill, decode = self.worker("prefill-0"), self.worker("decode-0")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            await prefill.engine.loop.call(prefill.engine.core.evict_all)
            await decode.engine.loop.call(lambda: None)
            if all(worker.guard.free_pages == worker.guard.slots for worker in (prefill, decode)):
                return True
            await asyncio.sleep(0.02)
        return False
