"""`genlock events`."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.operate import call, operator_options, show
from cluster.cli.options import endpoint_or_default
from cluster.output import emit_one_of_many

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2 as pb

COLUMNS = ("time", "kind", "subject", "who", "message", "reason")
WIDE_COLUMNS = ("revision", "sequence")
UNITS_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@click.command(
    epilog="""\b
Examples:
  genlock events
  genlock events --since 10m
  genlock events --watch
  genlock events --watch -o yaml
  genlock events -o json --limit 1000"""
)
@click.option("--since", default="", metavar="AGE", help="Not older than this: 30s, 10m, 2h, 1d.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most events, the last.")
@click.option("--watch", is_flag=True, help="Goes on until Ctrl-C; one line an event, with -o yaml one document.")
@operator_options
def command(
    since: str, limit: int, watch: bool, endpoint: str | None, token: str | None, timeout_s: float, output: str
) -> int:
    """Shows what happened to the fleet, who did it and why: changes, phases, restarts, decisions."""
    from genlock.v1 import operator_pb2 as pb

    request = pb.ListEventsRequest(since_ms=since_ms(since), limit=limit)
    if watch:
        return _watch(request, endpoint, token, timeout_s, output)
    show(call(endpoint, token, timeout_s, "ListEvents", request), output, tables)
    return 0


def since_ms(text: str) -> int:
    """`10m` as milliseconds; empty: 0. Raises click.BadParameter."""
    if not text:
        return 0
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise click.BadParameter(f"{text!r} must read like 30s, 10m, 2h or 1d", param_hint="--since")
    return int(found[1]) * UNITS_MS[found[2]]


def row(event: pb.FleetEvent, wide: bool = False) -> tuple[object, ...]:
    at = datetime.fromtimestamp(event.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    more = (event.revision, event.sequence) if wide else ()
    return (at, event.kind, event.subject, event.actor, event.message, event.reason, *more)


def tables(answer: pb.ListEventsResponse, wide: bool) -> list[tuple[str, tuple[str, ...], list[tuple[object, ...]]]]:
    columns = (*COLUMNS, *WIDE_COLUMNS) if wide else COLUMNS
    return [("", columns, [row(event, wide) for event in answer.events])]


def _watch(
    request: pb.ListEventsRequest, endpoint: str | None, token: str | None, timeout_s: float, output: str
) -> int:
    from cluster.cli import render
    from cluster.cli.client import connect, run_async

    async def work() -> None:
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            async for event in client.watch_events(request):
                _print_one(render.as_dict(event), event, output)

    run_async(work())
    return 0


def _print_one(tree: dict[str, Any], event: pb.FleetEvent, output: str) -> None:
    emit_one_of_many(
        output, lambda: tree, lambda wide: click.echo("  ".join(str(part) for part in row(event, wide) if part != ""))
    )
