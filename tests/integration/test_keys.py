"""`genlock keys` and a gateway that takes them, over a real registry server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pwd
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from cluster.cli.keys import _local_user
from cluster.cli.main import FAILED, OK, USAGE, run
from cluster.launch.credentials import credentials_of
from cluster.launch.doors import Seams
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.up import Cluster
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import Event
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvstore.errors import PermissionDenied, Unauthenticated, Unavailable
from tests.support.fake_workers import build_fake, config, load_fake
from tests.support.valkey import Valkey
from wire.calls import answer, responses
from wire.clocks import unix_ms


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[Valkey]:
    valkey = Valkey(tmp_path)
    await valkey.start()
    yield valkey
    valkey.kill()


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def ask(endpoint: str, token: str) -> str:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(pb.GenerateRequest(text="hello"), timeout=10, metadata=bearer(token))
        return "".join([message.text async for message in responses(call)])


async def status(endpoint: str, token: str) -> operator_pb2.GetStatusResponse:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = operator_pb2_grpc.OperatorServiceStub(channel)
        return await answer(stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=10, metadata=bearer(token)))


async def test_a_key_lets_in_until_it_is_revoked(server: Valkey, capsys) -> None:
    url = server.settings().url
    flags = ["--set", f"registry.url={url}"]

    async def cli(*args: str) -> tuple[int, str]:
        code = await asyncio.to_thread(run, ["keys", *args, *flags])
        return code, capsys.readouterr().out

    code, out = await cli("create", "acme", "--label", "ci", "--max-requests", "2")
    assert code == OK
    token = out.strip()
    _code, out = await cli("create", "ops", "--operator")
    operator = out.strip()
    settings = config(registry__url=url, registry__poll_ms=50, auth__registry_keys=True)
    cluster = Cluster(
        settings, InProcessLauncher(build_fake), load_fake, seams=Seams(authenticator=credentials_of(settings))
    )
    endpoint = await cluster.start()
    try:
        assert await ask(endpoint, token) == "hello"
        assert (await status(endpoint, operator)).workers
        with pytest.raises(PermissionDenied):
            await status(endpoint, token)
        with pytest.raises(PermissionDenied):
            await ask(endpoint, operator)
        with pytest.raises(Unauthenticated):
            await ask(endpoint, token + "x")
        code, out = await cli("list", "-o", "json")
        listed = {record["tenant"]: record for record in json.loads(out)}
        assert listed["acme"]["label"] == "ci"
        assert token not in out
        assert (await cli("revoke", listed["acme"]["id"]))[0] == OK
        assert (await cli("revoke", listed["acme"]["id"]))[0] == FAILED
        async with asyncio.timeout(10):
            while True:
                try:
                    await ask(endpoint, token)
                except Unauthenticated:
                    break
                await asyncio.sleep(0.05)
        arguments = ["events", "--endpoint", endpoint, "--token", operator, "-o", "json"]
        assert await asyncio.to_thread(run, arguments) == OK
        out = capsys.readouterr().out
        told = [event for event in json.loads(out)["events"] if event["kind"] == "key"]
        assert [(event["subject"], event["message"]) for event in told] == [
            (listed["acme"]["id"], "key created for tenant acme"),
            (listed["ops"]["id"], "key created for tenant ops (operator)"),
            (listed["acme"]["id"], "key of tenant acme revoked"),
        ]
        assert {event["actor"] for event in told} == {f"local:{pwd.getpwuid(os.getuid()).pw_name}"}
        assert all(abs(event["at_ms"] - unix_ms()) < 600_000 for event in told)
        for key in (token, operator):
            assert key not in out
            assert key.split("_", 2)[2] not in out
            assert hashlib.sha256(key.encode()).hexdigest() not in out
        # The registry's end changes nothing for those who are known.
        server.kill()
        assert (await status(endpoint, operator)).workers
    finally:
        await cluster.stop(0)


def test_keys_without_a_registry_say_what_to_do(capsys) -> None:
    assert run(["keys", "list"]) == USAGE
    assert "registry.url" in capsys.readouterr().err


def test_a_key_that_the_event_log_could_not_be_told_of_is_not_lost(monkeypatch, capsys) -> None:
    class Full(MemoryRegistry):
        async def append_event(self, event: Event) -> Event:
            raise Unavailable("registry_unreachable", "no place for events")

    registry = Full(lambda: 0.0)
    monkeypatch.setattr("cluster.registry.make.registry_from", lambda _config, _now_ms: registry)
    there = ["--set", "registry.url=redis://127.0.0.1:1/0"]
    assert run(["keys", "create", "acme", *there]) == OK
    out, err = capsys.readouterr()
    assert hashlib.sha256(out.strip().encode()).hexdigest() in asyncio.run(registry.keys())
    assert "Not in the event log: registry_unreachable" in err
    key_id = out.split("_")[1]
    assert run(["keys", "revoke", key_id, *there]) == OK
    assert "Not in the event log" in capsys.readouterr().err
    assert not asyncio.run(registry.keys())


def test_a_user_without_a_name_is_a_number(monkeypatch) -> None:
    def unknown(_number: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert _local_user() == f"local:{os.getuid()}"
