"""`genlock describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cluster.cli import events
from cluster.cli.operate import age, fleet_tables, operator_options, show
from cluster.cli.options import endpoint_or_default

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from genlock.v1 import operator_pb2 as pb

Table = tuple[str, tuple[str, ...], list[tuple[object, ...]]]


@click.command(
    epilog="""\b
Examples:
  genlock describe decode-0
  genlock describe 3f9c0a1b22d4e5f6 -o json

\b
A request is found by the id that the server gave it, or by the client's label, while it runs and for a while after,
whichever gateway serves it. Exit code 3: none of those that answered knows it, and some did not answer."""
)
@click.argument("name", metavar="WORKER|REQUEST")
@operator_options
def command(name: str, endpoint: str | None, token: str | None, timeout_s: float, output: str) -> int:
    """Shows all about one worker or one request."""
    from cluster.cli.client import connect, run_async
    from genlock.v1 import operator_pb2 as pb
    from kvstore.errors import NotFound

    async def work() -> Message:
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            fleet = await client.operate("GetFleet", pb.GetFleetRequest())
            if name in {worker.worker_id for worker in fleet.workers}:
                told: Message = await client.operate("DescribeWorker", pb.DescribeWorkerRequest(worker_id=name))
                return told
            try:
                request: Message = await client.operate("DescribeRequest", pb.DescribeRequestRequest(request_id=name))
            except NotFound as error:
                known = ", ".join(sorted(worker.worker_id for worker in fleet.workers)) or "none"
                raise NotFound(error.reason, f"{error.message}; workers: {known}") from error
            return request

    answer = run_async(work())
    if answer.DESCRIPTOR.name == "DescribeWorkerResponse":
        show(answer, output, worker_tables)
    else:
        show(answer, output, request_tables)
    return 0


def worker_tables(answer: pb.DescribeWorkerResponse, _wide: bool) -> list[Table]:
    from genlock.v1 import operator_pb2 as pb

    worker, facts = answer.worker, answer.worker.status
    columns, rows = fleet_tables(pb.FleetView(workers=[worker]), True)[0][1:]
    lines: list[tuple[object, ...]] = [
        (name, str(value)) for name, value in zip(columns, rows[0], strict=True) if value != ""
    ]
    lines += [(f"peer {peer.worker_id}", "proved" if peer.passed else f"{peer.reason}: {peer.detail}")
              for peer in facts.peers]  # fmt: skip
    counters: list[tuple[object, ...]] = [(name, count) for name, count in sorted(facts.verification.items())]
    outcomes: list[tuple[object, ...]] = [(name, count) for name, count in sorted(facts.outcomes.items())]
    history: list[tuple[object, ...]] = [events.row(event) for event in answer.events]
    found: list[Table] = [(worker.worker_id, ("field", "value"), lines)]
    if outcomes:
        found.append(("Requests", ("outcome", "count"), outcomes))
    if counters:
        found.append(("Checks of pages, and what happened to pages", ("what", "count"), counters))
    return [*found, ("Events", events.COLUMNS, history)]


def request_tables(answer: pb.DescribeRequestResponse, _wide: bool) -> list[Table]:
    from cluster.cli import render

    one = answer.request
    lines: list[tuple[object, ...]] = [
        ("id", one.server_id), ("label", one.request_id), ("tenant", one.tenant),
        ("outcome", answer.outcome or f"running ({one.phase})"), ("message", answer.message), ("age", age(one.age_ms)),
        ("prompt tokens", one.prompt_tokens), ("generated tokens", one.completion_tokens),
        ("decode", one.decode_worker), ("prefill", one.prefill_worker), ("gateway", one.gateway),
    ]  # fmt: skip
    if answer.HasField("verification"):
        lines += [(name.replace("_", " "), value) for name, value in render.as_dict(answer.verification).items()]
    found: list[Table] = [("", ("field", "value"), [line for line in lines if line[1] != ""])]
    if answer.recomputes:
        again: list[tuple[object, ...]] = [
            (age(told.after_ms), told.index, told.from_worker, told.to_worker or told.reason)
            for told in answer.recomputes
        ]
        found.append(("Preempted, and computed again", ("after", "answer", "prefill was", "prefill is"), again))
    return found
