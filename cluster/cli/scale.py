"""`genlock scale`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.operate import change_options, fleet_tables, mutation, operator_options, settle, show, wait_options
from cluster.cli.options import endpoint_or_default

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2 as pb

ROLES = ("prefill", "decode")


@click.command(
    epilog="""\b
Examples:
  genlock scale prefill=4 decode=10
  genlock scale decode=3 --current decode=2 --reason "evening load"
  genlock scale prefill=1 --dry-run
  genlock scale decode=3 --current-replicas decode=2 --wait --timeout 300

\b
Workers that go are cordoned, finish what they run, and stop; the least loaded go first, decode before prefill."""
)
@click.argument("counts", nargs=-1, required=True, metavar="ROLE=N...")
@click.option("--current", "--current-replicas", "current", multiple=True, metavar="ROLE=N",
              help="Only if so many are wanted now; may repeat. Else exit code 4.")  # fmt: skip
@operator_options
@change_options
@wait_options
def command(
    counts: tuple[str, ...], current: tuple[str, ...], endpoint: str | None, token: str | None, timeout_s: float,
    output: str, wait: bool, wait_s: float, **change: Any,
) -> int:  # fmt: skip
    """Says how many workers of each role are wanted."""
    from cluster.cli.client import connect, run_async
    from genlock.v1 import operator_pb2 as pb

    request = pb.ScaleRequest(mutation=mutation(**change))
    for role, count in parse_counts(counts).items():
        setattr(request, role, count)
    for role, count in parse_counts(current).items():
        setattr(request, f"current_{role}", count)

    async def work() -> pb.ScaleResponse:
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            plan: pb.ScaleResponse = await client.operate("Scale", request)
            _tell(plan, request.mutation.dry_run)
            if wait and not request.mutation.dry_run:
                plan.fleet.CopyFrom(await settle(client, wait_s, plan.fleet, gone=plan.removed, what="Scaling"))
            return plan

    plan = run_async(work())
    show(plan, output, lambda answer, wide: fleet_tables(answer.fleet, wide))
    return 0


def parse_counts(texts: tuple[str, ...]) -> dict[str, int]:
    """`prefill=4` and the like. Raises click.BadParameter."""
    out: dict[str, int] = {}
    for text in texts:
        found = re.fullmatch(r"(prefill|decode)=(\d{1,6})", text)
        if found is None:
            raise click.BadParameter(f"{text!r} must read prefill=N or decode=N")
        if found[1] in out:
            raise click.BadParameter(f"{found[1]} is named twice")
        out[found[1]] = int(found[2])
    return out


def _tell(plan: pb.ScaleResponse, dry_run: bool) -> None:
    """One line on stderr: what this does."""
    parts = [f"{count} {role} more" for role, count in zip(ROLES, (plan.added_prefill, plan.added_decode), strict=True)
             if count]  # fmt: skip
    if plan.removed:
        parts.append(f"{', '.join(plan.removed)} will go")
    verb = "Would change" if dry_run else "Repeated" if plan.fleet.repeated else "Accepted"
    click.echo(f"{verb}: {'; '.join(parts) or 'nothing'}", err=True)
