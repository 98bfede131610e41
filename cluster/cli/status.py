"""`genlock status`."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import click

from cluster.cli.options import client_options, endpoint_or_default

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2

WATCH_S = 1.0
WORKER_COLUMNS = (
    "worker", "role", "state", "endpoint", "pages", "free", "quarantined", "running", "waiting", "leases", "tokens",
    "detail",
)  # fmt: skip

PAIR_COLUMNS = ("decode", "prefill", "reason", "detail")


@click.command(
    epilog="""\b
Examples:
  genlock status
  genlock status --watch
  genlock status --endpoint 10.0.0.7:50051 -o json"""
)
@client_options
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True)
@click.option("--watch", is_flag=True, help="Again every second until Ctrl-C; with -o json one line each.")
def command(endpoint: str | None, token: str | None, timeout_s: float, output: str, watch: bool) -> int:
    """Shows each worker with its pool, the checks that were made, and how requests ended."""
    from cluster.cli.client import run_async

    place = endpoint_or_default(endpoint)
    if watch:
        run_async(_watch(place, token, timeout_s, output))
    else:
        _print(run_async(_status(place, token, timeout_s)), output)
    return 0


def _print(status: operator_pb2.GetStatusResponse, output: str, one_line: bool = False) -> None:
    from cluster.cli import render

    if output == "json":
        tree = render.as_dict(status)
        if one_line:
            click.echo(json.dumps(tree, ensure_ascii=False))
        else:
            render.print_json(tree)
    elif output == "yaml":
        import yaml

        click.echo(yaml.safe_dump(render.as_dict(status), sort_keys=False).rstrip())
    else:
        show(status)


async def _watch(endpoint: str, token: str | None, timeout_s: float, output: str) -> None:
    from cluster.cli import render
    from cluster.cli.client import connect

    async with connect(endpoint, token, timeout_s) as client:
        while True:
            status = await client.status()
            if output == "table":
                render.stdout().clear()
            _print(status, output, one_line=True)
            await asyncio.sleep(WATCH_S)


async def _status(endpoint: str, token: str | None, timeout_s: float) -> operator_pb2.GetStatusResponse:
    from cluster.cli.client import connect

    async with connect(endpoint, token, timeout_s) as client:
        return await client.status()


def show(status: operator_pb2.GetStatusResponse) -> None:
    """Tables on stdout."""
    from cluster.cli import render

    out = render.stdout()
    running, uptime_s = status.running_requests, status.uptime_ms / 1000
    out.print(f"{status.model} · genlock {status.version} · up {uptime_s:.0f} s · {running} running", markup=False)
    if status.registry:
        out.print(f"registry: {status.registry}", markup=False)
    out.print(render.table("", WORKER_COLUMNS, [worker_row(entry) for entry in status.workers]))
    failing = unproved_pairs(status)
    if failing:
        out.print()
        out.print(render.table("Pairs that did not pass their exchange of a page", PAIR_COLUMNS, failing))
    checks = verification(status)
    if checks:
        out.print()
        rows = [(name, *counts) for name, counts in sorted(checks.items())]
        out.print(render.table("Checks of pages, and what happened to pages", ("what", "count", "failed"), rows))
    if status.outcomes:
        out.print()
        out.print(render.table("Requests", ("outcome", "count"), sorted(status.outcomes.items())))


def unproved_pairs(status: operator_pb2.GetStatusResponse) -> list[tuple[object, ...]]:
    """One row for each decode worker and each present prefill worker that it may not pull from, with the reason."""
    present = {entry.worker_id for entry in status.workers}
    return [
        (entry.worker_id, proof.worker_id, proof.reason, proof.detail)
        for entry in status.workers
        for proof in entry.status.peers
        if not proof.passed and proof.worker_id in present
    ]


def worker_row(entry: operator_pb2.WorkerEntry) -> tuple[object, ...]:
    name = (entry.worker_id, entry.role, entry.state, entry.endpoint)
    if not entry.HasField("status"):
        return (*name, *[float("nan")] * 7, entry.detail)
    facts = entry.status
    pool = facts.pool
    numbers = (
        pool.pages, pool.free, pool.quarantined, facts.running_requests, facts.waiting_requests, facts.leases,
        facts.tokens,
    )  # fmt: skip
    return (*name, *numbers, entry.detail)


def verification(status: operator_pb2.GetStatusResponse) -> dict[str, tuple[int, int]]:
    """What -> (how often, how often it failed), over all workers.

    Workers count `check/ok` and `check/<reason>` on receipt, and on reads and writes `refused_<reason>` beside the
    number of checks made.
    """
    out: dict[str, tuple[int, int]] = {}
    for entry in status.workers:
        for key, count in entry.status.verification.items():
            name, _, result = key.partition("/")
            failed = count if result not in ("", "ok") or name.startswith("refused_") else 0
            before = out.get(name, (0, 0))
            out[name] = (before[0] + count, before[1] + failed)
    return out
