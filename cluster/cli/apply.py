"""`genlock apply` and `genlock diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cluster.cli.operate import (
    call,
    change_options,
    fleet_tables,
    mutation,
    operator_options,
    settle,
    show,
    wait_options,
)
from cluster.cli.options import NAMED_FILE, endpoint_or_default, judged_elsewhere, read_input
from kvstore.files import FileReader

if TYPE_CHECKING:
    from genlock.v1 import operator_pb2 as pb

CLUSTER_FILE = FileReader("bad_cluster_file", "file")

file_option = click.option(
    "-f",
    "--file",
    "path",
    type=NAMED_FILE,
    required=True,
    metavar="FILE",
    help="YAML with prefill, decode, autoscale; - is stdin.",
)


@click.command(
    epilog="""\b
Examples:
  genlock apply -f fleet.yaml
  genlock apply -f fleet.yaml --wait
  echo "decode: 3" | genlock apply -f -

\b
A file names what is wanted; what it leaves out stays:
  prefill: 2
  decode: 4
  autoscale: {slo: {ttft_ms: 1500}, decode: {low: 2, high: 8}}     # null: off"""
)
@file_option
@operator_options
@change_options
@wait_options
def apply(
    path: str, endpoint: str | None, token: str | None, timeout_s: float, output: str, wait: bool, wait_s: float,
    **change: Any,
) -> int:  # fmt: skip
    """Makes the fleet what a file says."""
    from cluster.cli.client import connect, run_async
    from cluster.operators.fleet import CLUSTER_TEXT
    from genlock.v1 import operator_pb2 as pb

    request = pb.ApplyRequest(text=_cluster_text(path), mutation=mutation(**change))

    async def work() -> pb.ApplyResponse:
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            answer: pb.ApplyResponse = await client.operate("Apply", request)
            if wait and not request.mutation.dry_run:
                answer.fleet.CopyFrom(await settle(client, wait_s, answer.fleet, what="Applying"))
            return answer

    with judged_elsewhere(CLUSTER_TEXT, request.text, _name(path)):
        answer = run_async(work())
    click.echo(f"{len(answer.changes)} changes" if answer.changes else "Nothing to change", err=True)
    show(answer, output, lambda told, wide: [*_changes(told), *fleet_tables(told.fleet, wide)])
    return 0


@click.command(
    epilog="""\b
Examples:
  genlock diff -f fleet.yaml

\b
Exit codes: 0 nothing differs, 1 something does."""
)
@file_option
@operator_options
def diff(path: str, endpoint: str | None, token: str | None, timeout_s: float, output: str) -> int:
    """Shows what `apply` would change, and changes nothing."""
    from cluster.operators.fleet import CLUSTER_TEXT
    from genlock.v1 import operator_pb2 as pb

    request = pb.ApplyRequest(text=_cluster_text(path), mutation=pb.Mutation(dry_run=True))
    with judged_elsewhere(CLUSTER_TEXT, request.text, _name(path)):
        answer = call(endpoint, token, timeout_s, "Apply", request)
    show(answer, output, lambda told, _wide: _changes(told), empty="No difference")
    return 1 if answer.changes else 0


def _cluster_text(path: str) -> str:
    """Raises InvalidInput, with the file's name and line, for what is no YAML: a cluster does not know the name."""
    from cluster.operators.fleet import CLUSTER_TEXT

    text = read_input(path, CLUSTER_FILE)
    CLUSTER_TEXT.tree(text, _name(path))
    return text


def _name(path: str) -> str:
    return "stdin" if path == "-" else path


def _changes(answer: pb.ApplyResponse) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """No table where nothing changes."""
    rows: list[tuple[str, ...]] = [(one.field, one.before, one.after) for one in answer.changes]
    return [("Changes", ("field", "now", "then"), rows)] if rows else []
