"""`genlock bench serve` as a user runs it: real workers of the probe model, real gRPC, all in this process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.progress import Progress

import bench.serve
from bench.aggregated import AggregatedWorker, LocalPrefill, NamedPlace, _Job, aggregated_config, build_aggregated
from bench.drive import Limits
from bench.load import ServeRow, Shape, Spread
from bench.serve import Plan, measure
from cluster.cli.client import connect
from cluster.cli.main import run
from cluster.config import load
from cluster.launch.launcher import InProcessLauncher
from cluster.launch.served import load_served
from cluster.launch.up import Cluster
from cluster.settings import Config
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput, Unavailable
from model.probe import echo_of

PROBE = (
    "bench", "serve", "--in-process", "--model", "probe", "--answer-tokens", "8", "--json",
    "--set", "cache.prefill_pages=32", "--set", "cache.decode_pages=64",
)  # fmt: skip


def settings(**flags: object) -> Config:
    own = {"model.name": "probe", "api.port": 0, "cache.prefill_pages": 32, "cache.decode_pages": 64}
    return load(flags={**own, **{key.replace("__", "."): value for key, value in flags.items()}}).config


def plan(**fields: object) -> Plan:
    shape = Shape(6, 40.0, Spread(70, 150), Spread(8, 8), shared_prefix=0.5)
    own = {"shape": shape, "limits": Limits(8, 20.0, 30.0), "warmup": 1, "config": settings(), "in_process": True}
    return Plan(**{**own, **fields})


async def measured(plan: Plan) -> list[ServeRow]:
    rows: list[ServeRow] = []
    await measure(plan, rows, Progress(disable=True))
    return rows


def test_the_command_measures_a_cluster_and_its_peer(capsys):
    code = run([*PROBE, *["--rate", "40", "--requests", "6", "--prompt-tokens", "70:150", "--shared-prefix", "0.5"]])
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    assert code == 0, err
    assert [row["system"] for row in rows] == ["genlock 1P+1D", "aggregated"]
    for row in rows:
        assert (row["requests"], row["sent"], row["ok"], row["errors"]) == (6, 6, 6, {})
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p90"] <= row["ttft_ms"]["p99"] <= row["total_ms"]["p99"]
        # The server cannot have been slower than its client saw it; whole milliseconds of the workers aside.
        assert 0 < row["server_ttft_ratio"] <= 1.02
    cluster, aggregated = rows
    assert cluster["cached_tokens"] > 0
    assert aggregated["cached_tokens"] == 0
    assert aggregated["transfer_ms"]["p99"] == 0.0


async def test_errors_of_the_cluster_are_counted_by_their_reason():
    # One request runs and none may wait: of several at once most are refused.
    config = settings(workers__max_running=1, workers__max_waiting=0)
    shape = Shape(6, 10_000.0, Spread(150, 150), Spread(32, 32))
    [row] = await measured(plan(config=config, shape=shape, warmup=0))
    assert row.sent == 6
    assert row.ok + sum(row.errors.values()) == 6
    assert set(row.errors) <= {"decode_queue_full", "decode_full", "prefill_full"}
    assert row.errors


async def test_a_running_cluster_is_measured_and_left_running():
    config = settings()
    cluster = Cluster(config, InProcessLauncher(build_aggregated), load_served)
    endpoint = await cluster.start()
    try:
        [row] = await measured(plan(endpoint=endpoint))
        assert (row.system, row.ok) == (f"genlock {endpoint}", 6)
        [row] = await measured(plan(endpoint=endpoint))
        assert row.ok == 6
    finally:
        await cluster.stop(0)


async def test_the_aggregated_peer_answers_right_and_gives_pages_back():
    """Chunks smaller than prompts, prompts of whole pages and of parts, several at once, one caller that leaves."""
    config = aggregated_config(settings(workers__chunk_tokens=48))
    launcher = InProcessLauncher(build_aggregated)
    cluster = Cluster(config, launcher, load_served)
    endpoint = await cluster.start()
    worker = launcher.workers["decode-0"]
    assert isinstance(worker, AggregatedWorker)
    assert isinstance(launcher.workers["prefill-0"], NamedPlace)
    prompts = [[(7 * n + i * i) % 200 + 20 for i in range(length)] for n, length in enumerate((64, 96, 131, 200))]
    try:
        async with connect(endpoint, None, 20.0) as client:

            async def ask(prompt: list[int], most: int) -> list[int]:
                sampling = pb.SamplingParams(max_tokens=most, ignore_eos=True, seed=1)
                request = pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=prompt), sampling_params=sampling)
                return [token async for message in client.generate(request) for token in message.token_ids]

            leaver = asyncio.create_task(ask(prompts[3], 200))
            answers = await asyncio.gather(*(ask(prompt, 40) for prompt in prompts))
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
            assert answers == [echo_of(prompt, 40) for prompt in prompts]
            async with asyncio.timeout(10):
                while worker.guard.counts().free != worker.guard.slots:
                    await asyncio.sleep(0.02)
        refused = {name: n for name, n in worker.guard.counters.items() if name.startswith("refused_")}
        assert refused == {}
        assert worker.guard.counters["sealed"] >= sum(len(prompt) // 32 for prompt in prompts)
    finally:
        await cluster.stop(0)


def test_a_prompt_whose_caller_is_gone_is_not_computed():
    local = LocalPrefill(*[None] * 7)
    posted: list[object] = []
    local.bind(None, (), 32, lambda request_no: False, posted.append)
    settled: list[object] = []
    local._jobs.append(_Job(SimpleNamespace(request_no=1), 0.0, settled.append))
    assert local.turn()
    assert (list(local._jobs), posted, settled) == ([], [], [])


def test_the_peer_gets_all_threads_pages_and_places():
    config = aggregated_config(
        settings(workers__prefill=2, workers__decode=3, workers__threads=2, workers__max_running=4)
    )
    assert (config.workers.prefill, config.workers.decode, config.workers.threads) == (1, 1, 10)
    assert config.workers.max_running == 12
    assert config.cache.decode_pages == 2 * 32 + 3 * 64


async def test_a_load_over_the_context_is_refused_before_it_is_sent():
    with pytest.raises(InvalidInput) as caught:
        await measured(plan(shape=Shape(1, 1.0, Spread(2040, 2040), Spread(32, 32))))
    assert caught.value.field == "--prompt-tokens"


@pytest.mark.parametrize("args", [["--peer", "vllm"], ["--endpoint", "127.0.0.1:1", "--peer", "aggregated"]])
def test_a_peer_that_cannot_be_is_bad_input(args: list[str], capsys):
    assert run(["bench", "serve", *args]) == 2
    assert "[--peer]" in capsys.readouterr().err


def test_a_system_that_cannot_start_does_not_lose_the_others_figures(capsys, monkeypatch):
    def refuse(_plan: Plan, _report: object) -> Cluster:
        raise Unavailable("no_peer", "the peer cannot start")

    monkeypatch.setattr(bench.serve, "_aggregated", refuse)
    assert run([*PROBE, "--rate", "40", "--requests", "3", "--prompt-tokens", "70"]) == 1
    out, err = capsys.readouterr()
    assert [row["ok"] for row in json.loads(out)["rows"]] == [3]
    assert "the peer cannot start" in err


INTERRUPTED = """
import os, signal, sys
import bench.serve
from cluster.cli.main import run

plain = bench.serve.drive

async def drive(system, asks, limits, samples, on_sample):
    def interrupt(sample):
        on_sample(sample)
        os.kill(os.getpid(), signal.SIGINT)

    await plain(system, asks, limits, samples, interrupt)

bench.serve.drive = drive
sys.exit(run(sys.argv[1:]))
"""


def test_interrupted_it_prints_what_it_has_and_stops():
    """Ctrl-C after the first answer: the others would arrive much later. In a process of its own, as a user has it: a
    loop that is cut short leaves gRPC's calls behind, which the loops of other tests would meet."""
    command = [*PROBE, "--rate", "0.001", "--requests", "3", "--prompt-tokens", "70", "--warmup", "0"]
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *command], capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 130, ended.stderr[-2000:]
    [row] = json.loads(ended.stdout)["rows"]
    assert (row["requests"], row["sent"], row["ok"]) == (3, 1, 1)
    assert "2 of 3 requests were not sent" in ended.stderr
