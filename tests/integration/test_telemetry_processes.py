"""`genlock up` with Ray: each process writes its own log and serves its own metrics, and none quotes a user."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc
from tests.support.scrape import Scrape, get

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
START_LIMIT_S = 200.0
MARKER = "xyzzy-of-the-user"
TEXT = f"{MARKER} " * 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def up(tmp_path_factory) -> Iterator[tuple[str, str, Path]]:
    """Endpoint, metrics endpoint, and folder of logs."""
    logs, port = tmp_path_factory.mktemp("logs"), free_port()
    settings = {
        "metrics.port": port, "metrics.worker_port": 0, "log.format": "json", "log.level": "debug", "log.folder": logs,
        "cache.page_tokens": 16, "workers.status_poll_ms": 100, "workers.drain_timeout_ms": 0,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "cluster.cli.main", "up", "--model", "probe", "--port", "0", "--http-port", "-1"]
    process = subprocess.Popen(
        [*command, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={key: value for key, value in os.environ.items() if not key.startswith("GENLOCK_")},
    )  # fmt: skip
    try:
        assert select.select([process.stdout], [], [], START_LIMIT_S)[0], "the cluster did not start"
        endpoint = process.stdout.readline().strip()
        assert endpoint, process.communicate(timeout=LIMIT_S)[1]
        yield endpoint, f"127.0.0.1:{port}", logs
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def ask(stub, **params: object) -> list[pb.GenerateResponse]:
    request = pb.GenerateRequest(text=TEXT, sampling_params=pb.SamplingParams(ignore_eos=True, **params))
    return list(stub.Generate(request, timeout=LIMIT_S))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(true, what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_every_process_tells_what_it_does_and_quotes_nobody(up):
    endpoint, metrics, logs = up
    with grpc.insecure_channel(endpoint) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        messages = ask(stub, max_tokens=64)
        assert MARKER in "".join(message.text for message in messages)
        call = stub.Generate(pb.GenerateRequest(text=TEXT, sampling_params=pb.SamplingParams(max_tokens=1500)))
        next(call)
        call.cancel()
        with pytest.raises(grpc.RpcError) as refused:
            ask(stub, max_tokens=-1)
    gateway = None

    def counted() -> bool:
        nonlocal gateway
        gateway = Scrape.of(get(metrics))
        ended = gateway.by("genlock_requests_total", "outcome", "cause")
        return {key: count for key, count in ended.items() if count} == {
            ("ok", "ok"): 1, ("cancelled", "cancelled"): 1, ("refused", "bad_max_tokens"): 1,
        }  # fmt: skip

    wait_for(counted, "each request is counted")
    found = {g["labels"]["__meta_genlock_worker"]: g["targets"][0] for g in json.loads(get(metrics, "/targets"))}
    workers = {name: Scrape.of(get(target)) for name, target in found.items()}
    assert set(workers) == {"prefill-0", "decode-0"}
    # The worker hears of the cancel a moment later than the gateway.
    wait_for(lambda: Scrape.of(get(found["decode-0"])).value("genlock_sequences") == 0, "decode is idle")
    assert all(scraped.value("genlock_build_info", worker=name) == 1 for name, scraped in workers.items())
    assert len({metrics, *found.values()}) == 3
    assert workers["decode-0"].value("genlock_verification_checks_total", check="receipt_digest", result="ok") > 0

    request_id = messages[0].server_id
    for part, said in (
        ("gateway", "gateway: ended ok"),
        ("decode-0", "decode: ended ok"),
        ("prefill-0", "prefill: lease"),
    ):
        own_lines = [line for line in lines_of(logs / f"{part}.log") if line.get("request_id") == request_id]
        assert any(line["message"].startswith(said) for line in own_lines), part
    everything = [path.read_text() for path in logs.iterdir()]
    everything += [gateway.text, *(scraped.text for scraped in workers.values()), str(refused.value)]
    assert not [text for text in everything if MARKER in text]
