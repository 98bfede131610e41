"""`genlock status`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from cluster.cli.options import client_options, endpoint_or_default
from cluster.output import emit, emit_one_of_many, output_option

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2

WATCH_S = 1.0
WORKER_COLUMNS = (
    "worker", "role", "state", "endpoint", "pages", "free", "quarantined", "running", "waiting", "leases", "tokens",
    "detail",
)  # fmt: skip
WIDE_COLUMNS = ("pid", "incarnation", "engine", "steps", "step age ms", "metrics")
PAIR_COLUMNS = ("decode", "prefill", "reason", "detail")


@click.command(
    epilog="""\b
Examples:
  genlock status
  genlock status -o wide
  genlock status --watch
  genlock status --endpoint 10.0.0.7:50051 -o json"""
)
@client_options
@output_option
@click.option(
    "--watch",
    is_flag=True,
    help="Again every second until Ctrl-C; with -o json one line each, with -o yaml a document each.",
)
def command(endpoint: str | None, token: str | None, timeout_s: float, output: str, watch: bool) -> int:
    """Shows each worker with its pool, the checks that were made, and how requests ended."""
    from cluster.cli.client import run_async

    place = endpoint_or_default(endpoint)
    if watch:
        run_async(_watch(place, token, timeout_s, output))
    else:
        from cluster.cli import render

        status = run_async(_status(place, token, timeout_s))
        emit(output, lambda: render.as_dict(status), lambda wide: show(status, wide))
    return 0


async def _watch(endpoint: str, token: str | None, timeout_s: float, output: str) -> None:
    from cluster.cli.client import connect

    async with connect(endpoint, token, timeout_s) as client:
        while True:
            _print_again(await client.status(), output)
            await asyncio.sleep(WATCH_S)


def _print_again(status: operator_pb2.GetStatusResponse, output: str) -> None:
    from cluster.cli import render

    def redraw(wide: bool) -> None:
        render.stdout().clear()
        show(status, wide)

    emit_one_of_many(output, lambda: render.as_dict(status), redraw)


async def _status(endpoint: str, token: str | None, timeout_s: float) -> operator_pb2.GetStatusResponse:
    from cluster.cli.client import connect

    async with connect(endpoint, token, timeout_s) as client:
        return await client.status()


def show(status: operator_pb2.GetStatusResponse, wide: bool = False) -> None:
    """Tables on stdout."""
    from cluster.cli import render

    out = render.stdout()
    running, uptime_s = status.running_requests, status.uptime_ms / 1000
    out.print(f"{status.model} · genlock {status.version} · up {uptime_s:.0f} s · {running} running", markup=False)
    if status.registry:
        out.print(f"registry: {status.registry}", markup=False)
    columns = (*WORKER_COLUMNS, *WIDE_COLUMNS) if wide else WORKER_COLUMNS
    rows: list[tuple[object, ...]] = [worker_row(entry) + (_more(entry) if wide else ()) for entry in status.workers]
    out.print(render.table("", columns, rows))
    failing = unproved_pairs(status)
    if failing:
        out.print()
        out.print(render.table("Pairs that did not pass their exchange of a page", PAIR_COLUMNS, failing))
    checks = verification(status)
    if checks:
        out.print()
        counted = [(name, *counts) for name, counts in sorted(checks.items())]
        out.print(render.table("Checks of pages, and what happened to pages", ("what", "count", "failed"), counted))
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


def _more(entry: operator_pb2.WorkerEntry) -> tuple[object, ...]:
    if not entry.HasField("status"):
        return ("-",) * len(WIDE_COLUMNS)
    facts = entry.status
    return (
        facts.pid, f"{facts.incarnation:x}", facts.transfer_engine, facts.steps, facts.step_age_ms,
        facts.metrics_endpoint or "-",
    )  # fmt: skip


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
