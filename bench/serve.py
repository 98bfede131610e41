"""A cluster under open-loop load, measured at the client over real gRPC, with its peers in the same run.

The same requests go to each system, one system after the other: the cluster, then *aggregated* (the same parts in one
process, without the split and without a transfer), then any OpenAI-compatible servers that are named.

    genlock bench serve --rate 2 --requests 40
    genlock bench serve --endpoint 10.0.0.7:50051 --peer http://10.0.0.8:8000/v1 --json
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.drive import GenlockSystem, Limits, OpenAiSystem, System, drive, place_of
from bench.load import Percentiles, Sample, ServeRow, Shape, Spread, add_up, make_asks
from cluster.cli.client import connect
from cluster.cli.options import checked_endpoint, cluster_options, load_settings, settings_options
from cluster.cli.render import stdout, table
from cluster.cli.up import cluster_flags, make_cluster
from cluster.launch.up import Cluster
from cluster.settings import Config
from kvstore.errors import InvalidInput

AGGREGATED, NO_PEER = "aggregated", "none"
INTERRUPTED = 130
# The client also sees the network and its own event loop; outside of this its stop-watch is not to be believed.
TTFT_RATIO_LOW, TTFT_RATIO_HIGH = 0.8, 1.02
LATE_MS = 20.0
WARMUP_SEED = 1 << 40
LATENCIES = (
    ("ttft_ms", "first token"),
    ("queue_ms", "  queue"),
    ("prefill_ms", "  prefill"),
    ("transfer_ms", "  transfer"),
    ("rest_ms", "  rest"),
    ("decode_ms", "decode"),
    ("per_token_ms", "per token"),
    ("gap_ms", "gap between tokens"),
    ("total_ms", "total"),
    ("late_ms", "waited at the client"),
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Opened:
    """A system that is ready for load. `vocab_size` and `context_tokens` where it tells them."""

    name: str
    system: System
    vocab_size: int = 0
    context_tokens: int = 0
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """One run of the command. `endpoint` None: a private cluster of `config`."""

    shape: Shape
    limits: Limits
    warmup: int
    config: Config
    in_process: bool
    endpoint: str | None = None
    token: str | None = None
    peers: tuple[str, ...] = ()
    peer_token: str | None = None


Opening = Callable[[Report], AbstractAsyncContextManager[Opened]]


async def measure(plan: Plan, rows: list[ServeRow], progress: Progress) -> None:
    """Runs the load on each system; `rows` grows as they end, also by the one that a cancellation cuts short.

    Raises InvalidInput for a load that the model's context cannot hold, Unavailable for a peer that does not answer,
    and whatever the start of a cluster raises.
    """
    openings = await _openings(plan)
    task = progress.add_task("starting", total=len(openings) * plan.shape.requests)

    def report(text: str) -> None:
        progress.update(task, description=text)

    vocab_size = 0
    for done, opening in enumerate(openings):
        async with opening(report) as opened:
            _require_room(plan.shape, opened)
            vocab_size = vocab_size or opened.vocab_size
            report(f"{opened.name}: warming up")
            await _warm_up(plan, opened.system, vocab_size)
            report(opened.name)
            samples: list[Sample] = []
            try:
                await drive(
                    opened.system, make_asks(plan.shape, vocab_size), plan.limits, samples,
                    lambda _sample: progress.advance(task),
                )  # fmt: skip
            finally:
                rows.append(add_up(opened.name, plan.shape, samples, opened.note))
            progress.update(task, completed=(done + 1) * plan.shape.requests, description=f"{opened.name}: stopping")


async def _openings(plan: Plan) -> list[Opening]:
    """How to open each system. Named servers are asked for their model here, before anything is measured."""
    openings: list[Opening] = []
    if plan.endpoint is None:
        workers = plan.config.workers
        name = f"genlock {workers.prefill}P+{workers.decode}D"
        how = "all workers in one process" if plan.in_process else ""
        openings.append(partial(_private, plan, name, how, _cluster))
    else:
        openings.append(partial(_remote, plan, plan.endpoint))
    for peer in plan.peers:
        if peer == AGGREGATED:
            importlib.import_module("bench.aggregated")  # what cannot be loaded must not fail after the first system
            note = "one process with all workers' threads and pages; no prefix cache"
            openings.append(partial(_private, plan, AGGREGATED, note, _aggregated))
        else:
            system = await OpenAiSystem.find(peer, plan.peer_token)
            opened = Opened(place_of(peer), system, note=f"model {system.model}")
            openings.append(partial(_ready, opened))
    return openings


@asynccontextmanager
async def _ready(opened: Opened, _report: Report) -> AsyncIterator[Opened]:
    yield opened


@asynccontextmanager
async def _remote(plan: Plan, endpoint: str, _report: Report) -> AsyncIterator[Opened]:
    async with _gateway(plan, f"genlock {endpoint}", endpoint) as opened:
        yield opened


@asynccontextmanager
async def _gateway(plan: Plan, name: str, endpoint: str, note: str = "") -> AsyncIterator[Opened]:
    async with connect(endpoint, plan.token, plan.limits.request_s) as client:
        info = await client.model_info()
        yield Opened(name, GenlockSystem(client), info.vocab_size, info.context_tokens, note)


@asynccontextmanager
async def _private(
    plan: Plan, name: str, note: str, make: Callable[[Plan, Report], Cluster], report: Report
) -> AsyncIterator[Opened]:
    """A cluster that lives as long as it is measured."""
    cluster = make(plan, report)
    endpoint = await cluster.start()
    try:
        async with _gateway(plan, name, endpoint, note) as opened:
            yield opened
    finally:
        await cluster.stop(0)


def _cluster(plan: Plan, report: Report) -> Cluster:
    return make_cluster(plan.config, report, in_process=plan.in_process)


def _aggregated(plan: Plan, report: Report) -> Cluster:
    from bench.aggregated import aggregated_config, build_aggregated
    from cluster.launch.launcher import InProcessLauncher, Launcher
    from cluster.launch.ray_launcher import RayLauncher
    from cluster.launch.served import load_served

    launcher: Launcher = InProcessLauncher(build_aggregated) if plan.in_process else RayLauncher(build_aggregated)
    return Cluster(aggregated_config(plan.config), launcher, load_served, report=report)


async def _warm_up(plan: Plan, system: System, vocab_size: int) -> None:
    """Requests that are not counted, with prompts that share nothing with the measured ones."""
    if plan.warmup:
        shape = replace(plan.shape, requests=plan.warmup, seed=plan.shape.seed + WARMUP_SEED)
        await drive(system, make_asks(shape, vocab_size), plan.limits, [])


def _require_room(shape: Shape, opened: Opened) -> None:
    longest = shape.prompt_tokens.high + shape.answer_tokens.high
    if opened.context_tokens and longest > opened.context_tokens:
        raise InvalidInput(
            "load_over_context",
            f"prompt and answer may have {longest} tokens; the context of {opened.name} is {opened.context_tokens}",
            field="--prompt-tokens",
        )


def _print(rows: Sequence[ServeRow], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows]}))
    elif rows:
        show(rows)
    for line in remarks(rows):
        click.echo(line, err=True)


def show(rows: Sequence[ServeRow]) -> None:
    """One column for each system, on stdout."""
    lines: list[tuple[str, ...]] = [
        ("sent / ok", *(f"{r.sent} / {r.ok}" for r in rows)),
        ("errors", *(", ".join(f"{why} {n}" for why, n in r.errors.items()) or "none" for r in rows)),
        ("arrivals /s, asked and sent", *(f"{r.rate:g}, {r.rate_sent:.2f}" for r in rows)),
        ("answer tokens /s", *(f"{r.tokens_per_s:.1f}" for r in rows)),
        ("prompt tokens /s", *(f"{r.prompt_tokens_per_s:.1f}" for r in rows)),
        ("prompt tokens from cache", *(str(r.cached_tokens) for r in rows)),
    ]
    for field, title in LATENCIES:
        lines.append((f"{title}, ms p50 / p90 / p99", *(_spread(getattr(r, field)) for r in rows)))
    lines.append(("server's first token / client's", *(_ratio(r.server_ttft_ratio) for r in rows)))
    stdout().print(table("", ("", *(r.system for r in rows)), lines))


def remarks(rows: Sequence[ServeRow]) -> list[str]:
    """What a reader of the figures should know."""
    out = [f"{r.system}: {r.note}" for r in rows if r.note]
    for r in rows:
        if r.sent < r.requests:
            out.append(f"{r.system}: {r.requests - r.sent} of {r.requests} requests were not sent")
        if r.server_ttft_ratio is not None and not TTFT_RATIO_LOW <= r.server_ttft_ratio <= TTFT_RATIO_HIGH:
            out.append(
                f"{r.system}: the server's time to the first token is {r.server_ttft_ratio} of the client's: a part of "
                "the client's figures is its own or the network's"
            )
        if r.late_ms is not None and r.late_ms.p90 > LATE_MS:
            out.append(f"{r.system}: requests waited at the client, which was busy or at --concurrency-limit")
    return out


def _spread(value: Percentiles | None) -> str:
    return "-" if value is None else f"{value.p50:.1f} / {value.p90:.1f} / {value.p99:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _peers(peers: tuple[str, ...], endpoint: str | None) -> tuple[str, ...]:
    if not peers:
        return () if endpoint else (AGGREGATED,)
    for peer in peers:
        if peer not in (AGGREGATED, NO_PEER) and not peer.startswith(("http://", "https://")):
            raise InvalidInput("bad_peer", f"{peer!r} is not aggregated, none, or http://HOST:PORT/v1", field="--peer")
    if endpoint and AGGREGATED in peers:
        raise InvalidInput(
            "bad_peer", "aggregated runs on this machine beside a private cluster, not with --endpoint", field="--peer"
        )
    return tuple(peer for peer in peers if peer != NO_PEER)


@click.command(
    epilog="""\b
Examples:
  genlock bench serve --rate 2 --requests 40
  genlock bench serve --prefill 1 --decode 2 --prompt-tokens 64:512 --shared-prefix 0.5
  genlock bench serve --endpoint 10.0.0.7:50051 --peer http://10.0.0.8:8000/v1 --json

\b
Ctrl-C stops the load, prints what was measured so far, and stops the private cluster."""
)
@click.option(
    "--endpoint", metavar="HOST:PORT", callback=checked_endpoint,
    help="A running cluster; default: a private one for this run.",
)  # fmt: skip
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Requests/s.")
@click.option("--requests", type=click.IntRange(1), default=40, show_default=True)
@click.option("--prompt-tokens", default="64:512", show_default=True, help="LOW:HIGH, evenly drawn, or N.")
@click.option("--answer-tokens", default="32", show_default=True, help="LOW:HIGH, evenly drawn, or N.")
@click.option("--shared-prefix", type=click.FloatRange(0, 1), default=0.0, show_default=True,
              help="Part of each prompt that all prompts share.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)
@click.option("--concurrency-limit", type=click.IntRange(1, 4096), default=64, show_default=True,
              help="Most requests in flight; the wait for a place counts as the request's.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(0, 1000), default=2, show_default=True, help="Requests not counted.")
@click.option("--peer", "peers", multiple=True, metavar="aggregated|none|URL",
              help="What to compare with; may repeat. Default with a private cluster: aggregated.")  # fmt: skip
@click.option("--peer-token", help="Bearer token for peers that are URLs.")
@click.option("--token", envvar="GENLOCK_TOKEN", help="Bearer token of the cluster.  [env: GENLOCK_TOKEN]")
@click.option("--timeout", "request_s", type=click.FloatRange(0.001, 86_400), default=120.0, show_default=True,
              help="Longest time for an answer, seconds.")  # fmt: skip
@click.option("--time-limit", "run_s", type=click.FloatRange(0.1, 86_400), default=600.0, show_default=True,
              help="Longest time for the load of one system, seconds.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@cluster_options
@settings_options
def command(
    endpoint: str | None, rate: float, requests: int, prompt_tokens: str, answer_tokens: str, shared_prefix: float,
    seed: int, concurrency_limit: int, warmup: int, peers: tuple[str, ...], peer_token: str | None, token: str | None,
    request_s: float, run_s: float, as_json: bool, in_process: bool, prefill: int | None, decode: int | None,
    model: str | None, engine: str | None, config_file: Path | None, assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Throughput and latency of a cluster under open-loop load, split by phase, beside its peers."""
    shape = Shape(
        requests, rate, Spread.parse(prompt_tokens, "--prompt-tokens"),
        Spread.parse(answer_tokens, "--answer-tokens"), shared_prefix, seed,
    )  # fmt: skip
    flags = {**cluster_flags(prefill, decode, model, engine), "api.port": 0, "api.host": "127.0.0.1"}
    plan = Plan(
        shape=shape,
        limits=Limits(concurrency_limit, request_s, run_s),
        warmup=warmup,
        config=load_settings(config_file, assignments, flags).config,
        in_process=in_process,
        endpoint=endpoint,
        token=token,
        peers=_peers(peers, endpoint),
        peer_token=peer_token,
    )
    rows: list[ServeRow] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            asyncio.run(measure(plan, rows, progress))
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    finally:  # also what was measured before a later system failed
        _print(rows, as_json)
    return 0 if all(row.ok for row in rows) else 1
