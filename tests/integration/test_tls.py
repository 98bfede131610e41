"""TLS at the doors and between the parts of a cluster: who is let in, and certificates exchanged while it runs."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from cluster.cli.client import open_front
from cluster.devca import DevCertificates, make
from cluster.launch.build import build_worker
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.served import load_served
from cluster.launch.up import Cluster
from cluster.openai.server import HttpDoor
from cluster.tls import dialer_of, front_tls
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from kvstore.errors import InvalidInput, Unauthenticated, Unavailable
from tests.support.fake_workers import config
from wire.calls import answer, responses
from wire.dial import Dialer
from wire.options import channel_options
from wire.tls import PART_NAME, TlsFiles, TlsSource

NOW = datetime.datetime.now(datetime.UTC)
PROMPT = "the marker is 42; the marker is"


def settings(made: DevCertificates, **more):
    return config(
        model__name="probe", api__http_port=0, tls__cert_file=str(made.cert), tls__key_file=str(made.key),
        tls__ca_file=str(made.ca), workers__max_running=2, cache__prefill_pages=64, cache__decode_pages=64, **more,
    )  # fmt: skip


@asynccontextmanager
async def cluster(made: DevCertificates, **more) -> AsyncIterator[tuple[Cluster, InProcessLauncher, str]]:
    launcher = InProcessLauncher(build_worker)
    running = Cluster(settings(made, **more), launcher, load_served, make_door=HttpDoor)
    endpoint = await running.start()
    try:
        yield running, launcher, endpoint
    finally:
        await running.stop(0)


async def ask(endpoint: str, ca: str) -> str:
    async with open_front(endpoint, ca) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(
            pb.GenerateRequest(text=PROMPT, sampling_params=pb.SamplingParams(max_tokens=4)), timeout=20
        )
        return "".join([message.text async for message in responses(call)])


async def status(endpoint: str, channel: grpc.aio.Channel) -> worker_pb2.WorkerStatus:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return await answer(stub.Status(worker_pb2.WorkerStatusRequest(), timeout=5))


async def test_a_cluster_of_certificates_serves_and_lets_nobody_else_in(tmp_path: Path) -> None:
    made = make(tmp_path / "own", [], NOW)
    other = make(tmp_path / "other", [], NOW)
    async with cluster(made) as (running, launcher, endpoint):
        assert await ask(endpoint, str(made.ca))
        with pytest.raises(Unavailable):
            await ask(endpoint, str(other.ca))
        with pytest.raises(Unavailable):
            await ask(endpoint, "")
        worker = launcher.workers["prefill-0"].endpoint
        own = dialer_of(running.config.tls)
        assert (await status(worker, own.open(worker))).worker_id == "prefill-0"
        foreign = Dialer(TlsSource(TlsFiles(str(other.cert), str(other.key), str(made.ca))))
        for stranger in (
            grpc.aio.insecure_channel(worker),
            foreign.open(worker),
            # Knows the CA and shows nothing.
            grpc.aio.secure_channel(
                worker,
                grpc.ssl_channel_credentials(made.ca.read_bytes()),
                options=[*channel_options(), ("grpc.ssl_target_name_override", PART_NAME)],
            ),
        ):
            with pytest.raises(Unavailable):
                await status(worker, stranger)
            await stranger.close()
        await asyncio.to_thread(_http_is_https, running.url, made, other)


def _http_is_https(url: str, made: DevCertificates, other: DevCertificates) -> None:
    assert url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(made.ca))
    with urllib.request.urlopen(f"{url}/models", context=trusting, timeout=10) as reply:
        assert reply.status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/models", context=ssl.create_default_context(cafile=str(other.ca)), timeout=10)
    with pytest.raises((urllib.error.URLError, OSError)):
        urllib.request.urlopen(f"{url.replace('https', 'http')}/models", timeout=10)


async def test_a_certificate_of_the_ca_without_the_name_is_no_part_of_the_cluster(tmp_path: Path, monkeypatch) -> None:
    made = make(tmp_path, [], NOW)
    own = made.cert.read_bytes(), made.key.read_bytes()
    monkeypatch.setattr("cluster.devca.PART_NAME", "somebody.else")
    client = make(tmp_path, [], NOW)
    for path, data in zip((tmp_path / "client.crt", tmp_path / "client.key"),
                          (client.cert.read_bytes(), client.key.read_bytes()), strict=True):  # fmt: skip
        path.write_bytes(data)
    made.key.write_bytes(own[1])
    made.cert.write_bytes(own[0])
    async with cluster(made) as (_running, launcher, _endpoint):
        worker = launcher.workers["decode-0"].endpoint
        files = TlsFiles(str(tmp_path / "client.crt"), str(tmp_path / "client.key"), str(made.ca))
        channel = Dialer(TlsSource(files)).open(worker)
        with pytest.raises(Unauthenticated) as caught:
            await status(worker, channel)
        assert caught.value.reason == "peer_not_a_part"
        stub = worker_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(Unauthenticated):
            [event async for event in responses(stub.Session(None, timeout=5))]
        await channel.close()


async def test_certificates_are_exchanged_while_it_runs(tmp_path: Path) -> None:
    made = make(tmp_path, [], NOW)
    async with cluster(made) as (running, _launcher, endpoint):
        assert await ask(endpoint, str(made.ca))
        before = await asyncio.to_thread(_serial, endpoint, made)
        # A half-written pair leaves the old one in force.
        whole = made.key.read_bytes()
        made.key.write_bytes(whole[: len(whole) // 2])
        assert await ask(endpoint, str(made.ca))
        make(tmp_path, [], NOW)
        assert await ask(endpoint, str(made.ca))
        assert await asyncio.to_thread(_serial, endpoint, made) != before
        generation = running.gateway.state.dialer.generation
        assert generation > 1
        # Workers that come now show the new one, and are reached.
        await running.kill_worker("decode-0")
        async with asyncio.timeout(30):
            while not running.gateway.state.fleet.serving():
                await asyncio.sleep(0.1)
        assert await ask(endpoint, str(made.ca))


def _serial(endpoint: str, made: DevCertificates) -> str:
    import socket

    host, _, port = endpoint.rpartition(":")
    context = ssl.create_default_context(cafile=str(made.ca))
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        context.wrap_socket(plain, server_hostname=host) as tls,
    ):
        return str(tls.getpeercert()["serialNumber"])


async def test_callers_can_be_asked_for_a_certificate(tmp_path: Path) -> None:
    made = make(tmp_path, [], NOW)
    async with cluster(made, tls__client_ca_file=str(made.ca)) as (_running, _launcher, endpoint):
        with pytest.raises(Unavailable):
            await ask(endpoint, str(made.ca))
        credentials = grpc.ssl_channel_credentials(made.ca.read_bytes(), made.key.read_bytes(), made.cert.read_bytes())
        async with grpc.aio.secure_channel(endpoint, credentials) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            info = await answer(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10))
            assert info.ByteSize()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"key_file": ""}, "tls.key_file"),
        ({"ca_file": ""}, "tls.ca_file"),
        ({"cert_file": "/nowhere"}, "tls.cert_file"),
        ({"ca_file": "README.md"}, "tls.ca_file"),
        ({"key_file": "OTHER"}, "tls.cert_file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_the_setting(tmp_path: Path, change: dict, field: str) -> None:
    made = make(tmp_path / "a", [], NOW)
    other = make(tmp_path / "b", [], NOW)
    named = {"cert_file": str(made.cert), "key_file": str(made.key), "ca_file": str(made.ca), **change}
    if named["key_file"] == "OTHER":
        named["key_file"] = str(other.key)
    tls = config(**{f"tls__{name}": value for name, value in named.items()}).tls
    with pytest.raises(InvalidInput) as caught:
        dialer_of(tls)
    assert caught.value.field == field


def test_a_client_ca_needs_a_certificate_of_the_door(tmp_path: Path) -> None:
    made = make(tmp_path, [], NOW)
    with pytest.raises(InvalidInput):
        front_tls(config(tls__client_ca_file=str(made.ca)).tls)


def test_keys_are_their_owners_and_the_ca_is_kept(tmp_path: Path) -> None:
    first = make(tmp_path, ["gateway.example.com", "10.0.0.7"], NOW)
    ca, cert = first.ca.read_bytes(), first.cert.read_bytes()
    second = make(tmp_path, [], NOW)
    assert second.ca.read_bytes() == ca
    assert second.cert.read_bytes() != cert
    for name in ("tls.key", "ca.key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
