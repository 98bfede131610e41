"""`genlock get`: one table for each kind of thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from cluster.cli.main import UNREACHABLE
from cluster.cli.operate import age, call, fleet_tables, operator_options, show

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2 as pb

KINDS = ("workers", "pools", "requests", "leases", "nodes")
Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]


@click.command(
    epilog="""\b
Examples:
  genlock get workers
  genlock get workers -o wide
  genlock get pools -o json
  genlock get requests --limit 20
  genlock get leases
  genlock get nodes"""
)
@click.argument("kind", type=click.Choice(KINDS))
@operator_options
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most requests or leases shown."
)
def command(kind: str, endpoint: str | None, token: str | None, timeout_s: float, output: str, limit: int) -> int:
    """Lists what there is. `requests` are those of all gateways; `leases` are the handoffs whose pages prefill workers
    keep. Prompts and answers are never shown. Exit code 3: some gateway or worker did not answer; it is named."""
    from genlock.v1 import operator_pb2 as pb

    if kind == "requests":
        answer = call(endpoint, token, timeout_s, "ListRequests", pb.ListRequestsRequest(limit=limit))
        show(answer, output, request_tables)
        if answer.unreached:
            tell_unreached(answer.unreached)
            return UNREACHABLE
    elif kind == "leases":
        answer = call(endpoint, token, timeout_s, "ListLeases", pb.ListLeasesRequest(limit=limit))
        show(answer, output, lease_tables)
        for one in answer.unreached:
            click.echo(f"worker {one.worker_id} did not answer: {one.reason}: {one.detail}", err=True)
        if answer.unreached:
            return UNREACHABLE
    elif kind == "nodes":
        show(call(endpoint, token, timeout_s, "ListNodes", pb.ListNodesRequest()), output, node_tables)
    else:
        tables = {"workers": fleet_tables, "pools": pool_tables}[kind]
        show(call(endpoint, token, timeout_s, "GetFleet", pb.GetFleetRequest()), output, tables)
    return 0


def request_tables(answer: pb.ListRequestsResponse, wide: bool) -> list[Table]:
    columns = ["id", "label", "tenant", "phase", "age", "prompt", "generated", "decode", "prefill"]
    several = len({one.gateway for one in answer.requests}) > 1
    if wide or several:
        columns.append("gateway")
    if wide:
        columns.append("deadline in")
    rows = [
        [
            one.server_id, one.request_id, one.tenant, one.phase, age(one.age_ms), one.prompt_tokens,
            one.completion_tokens, one.decode_worker, one.prefill_worker,
            *([one.gateway] if wide or several else []), *([age(one.deadline_left_ms)] if wide else []),
        ]
        for one in answer.requests
    ]  # fmt: skip
    title = "" if len(rows) == answer.total else f"{len(rows)} of {answer.total} running requests, the oldest"
    return [(title, columns, rows)]


def tell_unreached(unreached: Iterable[pb.UnreachedGateway]) -> None:
    for one in unreached:
        click.echo(f"gateway {one.gateway} did not answer: {one.reason}: {one.detail}", err=True)


def node_tables(answer: pb.ListNodesResponse, _wide: bool) -> list[Table]:
    columns = ("node", "alive", "drained", "cordoned", "cpus", "free", "gpus", "free", "workers")
    rows = [
        (
            node.node,
            node.alive,
            node.drained,
            node.cordoned,
            node.cpus,
            node.cpus_free,
            node.gpus,
            node.gpus_free,
            ", ".join(node.workers),
        )
        for node in answer.nodes
    ]
    return [("", columns, rows)]


def pool_tables(fleet: pb.FleetView, _wide: bool) -> list[Table]:
    """Pages by state, and memory beside what it serves."""
    from cluster.cli import render

    columns = (
        "worker", "role", "pages", "free", "open", "sealed", "cached", "quarantined", "used", "of", "running",
    )  # fmt: skip
    rows = []
    for worker in fleet.workers:
        if worker.HasField("status"):
            pool = worker.status.pool
            used = (pool.pages - pool.free) * pool.page_bytes
            rows.append((
                worker.worker_id, worker.role, pool.pages, pool.free, pool.open, pool.sealed, pool.cached,
                pool.quarantined, render.size(used), render.size(pool.pages * pool.page_bytes),
                worker.status.running_requests,
            ))  # fmt: skip
    return [("", columns, rows)]


def lease_tables(answer: pb.ListLeasesResponse, wide: bool) -> list[Table]:
    """Handoffs whose pages prefill keeps for decode, and those that decode still waits for."""
    columns = ["prefill", "handoff", "request", "phase", "pages", "of", "age", "ends in", "renewed"]
    if wide:
        columns.insert(2, "ticket")
    kept = [
        [
            one.worker_id, one.handoff, *([one.ticket] if wide else []), one.request, one.phase, one.pages,
            one.prompt_pages, age(one.age_ms), age(one.left_ms), one.renewals,
        ]
        for one in answer.leases
    ]  # fmt: skip
    awaited = [(one.decode_worker, one.prefill_worker, one.handoffs) for one in answer.awaited]
    title = "Handoffs whose pages are kept"
    if len(kept) < answer.total:
        title += f": {len(kept)} of {answer.total}, the oldest; {answer.total - len(kept)} are left out"
    return [(title, columns, kept), ("Handoffs that are awaited", ("decode", "from", "handoffs"), awaited)]
