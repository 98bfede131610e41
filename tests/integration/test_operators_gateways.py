"""An operator asks one gateway and sees the requests of all; who does not answer is named."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import grpc.aio
import pytest

from cluster.registry.records import GatewayRecord
from cluster.selftest.lab import Subject, load_subject
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc
from kvstore.errors import NotFound, Unavailable
from tests.support.registry_lab import REQUESTS, RegistryLab
from wire.errors import from_rpc

SECRET = (("authorization", "Bearer of-the-operator"), ("x-other", "stays here"))


class Silent(operator_pb2_grpc.OperatorServiceServicer):
    """A gateway that takes the call and never answers."""

    def __init__(self) -> None:
        self.heard: list[dict[str, str]] = []

    async def ListRequests(self, request, context):
        assert request.local, "or gateways would ask each other for ever"
        self.heard.append(dict(context.invocation_metadata()))
        await asyncio.Event().wait()

    DescribeRequest = ListRequests


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


async def get_requests(endpoint: str) -> tuple[int, dict, str]:
    """Exit code, JSON and stderr of the command."""
    code = "import sys; from cluster.cli.main import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "get", "requests", "--endpoint", endpoint, "-o", "json"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, json.loads(out), err.decode()


@pytest.mark.timeout(300)
async def test_one_gateway_tells_the_requests_of_all_and_who_did_not_answer(subject: Subject, tmp_path: Path):
    async with RegistryLab(subject, tmp_path, fronts=3, prefill=1, decode=1) as lab:
        lab.held = True
        batch = await lab.ask_all().streaming()
        stub = operator_pb2_grpc.OperatorServiceStub(lab.clients[0].channel)
        own = await stub.ListRequests(pb.ListRequestsRequest(local=True), timeout=10)
        every = await stub.ListRequests(pb.ListRequestsRequest(), timeout=10)
        assert 0 < own.total < every.total == len(every.requests) == REQUESTS
        assert {one.gateway for one in every.requests} == {front.gateway.endpoint for front in lab.fronts}
        assert not every.unreached
        for one in every.requests:
            told = await stub.DescribeRequest(pb.DescribeRequestRequest(request_id=one.server_id), timeout=10)
            assert (told.request.server_id, told.request.gateway) == (one.server_id, one.gateway)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.DescribeRequest(pb.DescribeRequestRequest(request_id="nobody's"), timeout=10)
        assert isinstance(from_rpc(unknown.value), NotFound)
        code, shown, _err = await get_requests(lab.fronts[1].gateway.endpoint)
        assert (code, len(shown["requests"])) == (0, REQUESTS)
        assert all(one["gateway"] for one in shown["requests"])

        silent, server = Silent(), grpc.aio.server()
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(silent, server)
        mute = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        await lab.registry.put_gateway(GatewayRecord("dead", endpoint="127.0.0.1:1"), 120_000)
        await lab.registry.put_gateway(GatewayRecord("mute", endpoint=mute), 120_000)
        every = await stub.ListRequests(pb.ListRequestsRequest(), timeout=30, metadata=SECRET)
        assert {one.gateway: one.reason for one in every.unreached} == {
            "127.0.0.1:1": "peer_unreachable", mute: "deadline_exceeded",
        }  # fmt: skip
        assert len(every.requests) == REQUESTS
        assert silent.heard[0]["authorization"] == "Bearer of-the-operator"
        assert "x-other" not in silent.heard[0]
        with pytest.raises(grpc.aio.AioRpcError) as missed:
            await stub.DescribeRequest(pb.DescribeRequestRequest(request_id="nobody's"), timeout=30)
        error = from_rpc(missed.value)
        assert (type(error), error.reason) == (Unavailable, "gateways_unreached")
        code, shown, err = await get_requests(lab.fronts[1].gateway.endpoint)
        assert (code, len(shown["requests"]), len(shown["unreached"])) == (3, REQUESTS, 2)
        assert mute in err
        await server.stop(0)
        lab.held = False
        await batch.right()
        await lab.settled()
