"""`genlock cordon`, `uncordon`, `drain`, `restart`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.operate import (
    change_options,
    fleet_tables,
    leave,
    leaving,
    mutation,
    operator_options,
    settle,
    show,
    targets,
    wait_options,
)
from cluster.cli.options import endpoint_or_default

if TYPE_CHECKING:
    from cluster.cli.client import Client
    from genlock.v1 import operator_pb2 as pb

deadline_option = click.option(
    "--deadline", "deadline_s", type=click.FloatRange(0, 86_400), default=0.0, metavar="SECONDS",
    help="Running requests may go on for so long; then each ends with a typed error. 0: workers.drain_timeout_ms.",
)  # fmt: skip
force_option = click.option("--force", is_flag=True, help="Also the last ready worker of a role.")
names_argument = click.argument("names", nargs=-1, required=True, metavar="WORKER|NODE...")


@click.command(
    epilog="""\b
Examples:
  genlock cordon decode-1
  genlock cordon 10.0.0.7 --reason "memory errors" """
)
@names_argument
@operator_options
@change_options
def cordon(
    names: tuple[str, ...], endpoint: str | None, token: str | None, timeout_s: float, output: str, **change: Any
) -> int:
    """Sends no new requests to workers, or to all workers of nodes, and places none on these. What runs goes on."""
    return _cordon("Cordon", names, endpoint, token, timeout_s, output, change)


@click.command(
    epilog="""\b
Examples:
  genlock uncordon decode-1"""
)
@names_argument
@operator_options
@change_options
def uncordon(
    names: tuple[str, ...], endpoint: str | None, token: str | None, timeout_s: float, output: str, **change: Any
) -> int:
    """Sends requests to them again, and places workers on nodes again that were cordoned or drained."""
    return _cordon("Uncordon", names, endpoint, token, timeout_s, output, change)


@click.command(
    epilog="""\b
Examples:
  genlock drain decode-1 --wait
  genlock drain 10.0.0.7 --deadline 120 --wait --timeout 300 --reason "kernel upgrade"
  genlock drain prefill-0 --replace

\b
A prefill worker stops when each promised page has been pulled or its lease has ended. On a drained node no worker is
placed until it leaves, or `genlock uncordon NODE`; with --replace, --wait is over when the node is empty."""
)
@names_argument
@deadline_option
@force_option
@click.option("--replace", is_flag=True, help="Start a new worker in its place; else fewer are wanted from now on.")
@operator_options
@change_options
@wait_options
def drain(
    names: tuple[str, ...], deadline_s: float, force: bool, replace: bool, endpoint: str | None, token: str | None,
    timeout_s: float, output: str, wait: bool, wait_s: float, **change: Any,
) -> int:  # fmt: skip
    """Cordons workers, lets their requests end, and stops them."""
    from genlock.v1 import operator_pb2 as pb

    async def work(client: Client) -> pb.FleetView:
        workers, nodes = await targets(client, names)
        request = pb.DrainWorkersRequest(
            workers=workers, nodes=nodes, deadline_ms=round(deadline_s * 1000), force=force, replace=replace,
            mutation=mutation(**change),
        )  # fmt: skip
        before: pb.FleetView = await client.operate("Drain", request)
        if not wait or request.mutation.dry_run:
            return before
        named = [worker for worker in before.workers if worker.worker_id in workers or worker.node in nodes]
        going = leaving(before, named)
        if replace and nodes:
            # What takes their place may wait for a node of its own: one that comes when this one has gone.
            return await leave(client, wait_s, before, going)
        names_gone = () if replace else [worker.worker_id for worker in going]
        return await settle(client, wait_s, before, gone=names_gone, what="Draining")

    return _run(work, endpoint, token, timeout_s, output)


@click.command(
    epilog="""\b
Examples:
  genlock restart decode-0 --wait"""
)
@click.argument("worker")
@deadline_option
@force_option
@operator_options
@change_options
@wait_options
def restart(
    worker: str, deadline_s: float, force: bool, endpoint: str | None, token: str | None, timeout_s: float,
    output: str, wait: bool, wait_s: float, **change: Any,
) -> int:  # fmt: skip
    """Drains a worker and starts it anew: same name, new incarnation."""
    from genlock.v1 import operator_pb2 as pb

    async def work(client: Client) -> pb.FleetView:
        request = pb.RestartRequest(
            worker=worker, deadline_ms=round(deadline_s * 1000), force=force, mutation=mutation(**change)
        )
        fleet: pb.FleetView = await client.operate("Restart", request)
        if not wait or request.mutation.dry_run:
            return fleet
        return await settle(client, wait_s, fleet, what="Restarting")

    return _run(work, endpoint, token, timeout_s, output)


def _cordon(
    name: str, names: Sequence[str], endpoint: str | None, token: str | None, timeout_s: float, output: str,
    change: dict[str, Any],
) -> int:  # fmt: skip
    from genlock.v1 import operator_pb2 as pb

    async def work(client: Client) -> pb.FleetView:
        workers, nodes = await targets(client, names)
        request = pb.CordonRequest(workers=workers, nodes=nodes, mutation=mutation(**change))
        fleet: pb.FleetView = await client.operate(name, request)
        return fleet

    return _run(work, endpoint, token, timeout_s, output)


def _run(work: Any, endpoint: str | None, token: str | None, timeout_s: float, output: str) -> int:
    from cluster.cli.client import connect, run_async

    async def connected() -> pb.FleetView:
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            fleet: pb.FleetView = await work(client)
            return fleet

    show(run_async(connected()), output, fleet_tables)
    return 0
