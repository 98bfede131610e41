"""A tenant aborts at one gateway what it has running at any: its own alone, and it is told who did not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from cluster.registry.records import GatewayRecord
from cluster.selftest.lab import load_subject
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc
from kvstore.errors import Cancelled, InvalidInput, Unauthenticated
from tests.support.registry_lab import RegistryLab, until
from wire.errors import from_rpc

TENANTS = """
tenants:
  acme: {tokens_sha256: [2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b], max_requests: 1}
  blue: {tokens_sha256: [5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8]}
"""
ACME, BLUE = (("authorization", "Bearer secret"),), (("authorization", "Bearer password"),)
LABEL = "mine"


class Mute(inference_pb2_grpc.InferenceServiceServicer):
    """A gateway that takes the call and never answers."""

    asked = asyncio.Event()

    async def Abort(self, request, context):
        assert request.local, "or gateways would ask each other for ever"
        self.asked.set()
        await asyncio.Event().wait()


class Running:
    """One request that is under way, of a tenant and at a gateway."""

    def __init__(self, lab: RegistryLab, number: int, metadata: tuple[tuple[str, str], ...]) -> None:
        self.tokens = 0
        prompt = pb.TokenPrompt(token_ids=lab.subject.prompt(f"{number} {metadata}"))
        request = pb.GenerateRequest(
            request_id=LABEL, tokens=prompt, sampling_params=pb.SamplingParams(max_tokens=16, ignore_eos=True)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(lab.clients[number].channel)
        self.task = asyncio.create_task(self._read(request, metadata))

    async def _read(self, request: pb.GenerateRequest, metadata: tuple[tuple[str, str], ...]) -> str:
        try:
            async for message in self._stub.Generate(request, timeout=60, metadata=metadata):
                self.tokens += len(message.token_ids)
        except grpc.aio.AioRpcError as error:
            told = from_rpc(error)
            assert isinstance(told, Cancelled), told
            return told.reason
        return "whole"


@pytest.mark.timeout(300)
async def test_an_abort_reaches_the_callers_requests_at_every_gateway_and_nobody_elses(tmp_path: Path):
    async with RegistryLab(load_subject("probe"), tmp_path, fronts=3, prefill=1, decode=1, tenants=TENANTS) as lab:
        lab.held = True
        mine = [Running(lab, 0, ACME), Running(lab, 1, ACME)]
        other = Running(lab, 1, BLUE)
        await until(lambda: all(one.tokens for one in (*mine, other)), "every request has its first token")
        stub = inference_pb2_grpc.InferenceServiceStub(lab.clients[2].channel)

        async def abort(label: str, metadata: tuple[tuple[str, str], ...], *, local: bool = False) -> tuple[int, int]:
            request = pb.AbortRequest(request_id=label, local=local)
            answer = await stub.Abort(request, timeout=30, metadata=metadata)
            return answer.aborted, answer.gateways_unreached

        for label, metadata, kind in (
            (LABEL, (("authorization", "Bearer no"),), Unauthenticated),
            ("", ACME, InvalidInput),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await abort(label, metadata)
            assert isinstance(from_rpc(caught.value), kind)
        assert await abort("another", ACME) == (0, 0)
        assert await abort(LABEL, ACME, local=True) == (0, 0), "none of them is here"
        assert await abort(LABEL, ACME) == (2, 0)
        assert [await one.task for one in mine] == ["aborted_by_caller"] * 2
        assert not other.task.done(), "the same label of another tenant is another request"
        await lab.registry.put_gateway(GatewayRecord("dead", endpoint="127.0.0.1:1"), 120_000)
        assert await abort(LABEL, BLUE) == (1, 1)
        assert await other.task == "aborted_by_caller"
        mute = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(Mute(), mute)
        place = f"127.0.0.1:{mute.add_insecure_port('127.0.0.1:0')}"
        await mute.start()
        try:
            await lab.registry.put_gateway(GatewayRecord("mute", endpoint=place), 120_000)
            waits = asyncio.create_task(abort(LABEL, ACME))
            await asyncio.wait_for(Mute.asked.wait(), 30)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await abort(LABEL, ACME)
            assert from_rpc(caught.value).reason == "tenant_full", "each abort asks all: their number is bounded"
            assert await waits == (0, 2)
        finally:
            await mute.stop(0)
        lab.held = False
        await lab.settled()
