"""What the operators' commands share: options, the call, how answers are shown, waiting for a fleet to settle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from cluster.cli.options import client_options, endpoint_or_default
from cluster.output import emit, output_option
from kvstore.errors import DeadlineExceeded, NotFound

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from cluster.cli.client import Client
    from genlock.v1 import operator_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])
POLL_S = 0.3
WAIT_S = 600.0
# What a wait still waits for: as the spinner shows it, and as the error tells it.
Pending = tuple[str, str]
# title, columns, rows; `True`: the wide form.
Tables = Callable[[Any, bool], Sequence[tuple[str, Sequence[str], Sequence[Sequence[object]]]]]


def operator_options(command: F) -> F:
    """-o beside the client's own options."""
    return client_options(output_option(command))


def change_options(command: F) -> F:
    """What every change carries."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Check and show, change nothing."),
        click.option("--idempotency-key", default="", metavar="KEY", help="The same key twice is carried out once."),
        click.option(
            "--expected-revision", type=click.IntRange(0), default=0, metavar="N",
            help="Only if the fleet still has this revision; 0: any.",
        ),
        click.option("--reason", default="", help="Kept in the event log beside your name."),
    ):  # fmt: skip
        command = option(command)
    return command


def wait_options(command: F) -> F:
    """--wait and its limit: --wait-timeout, else the --timeout that was given, else `WAIT_S`."""
    command = click.option(
        "--wait-timeout", "wait_s", type=click.FloatRange(0.1, 86_400), callback=_wait_limit, metavar="SECONDS",
        help=f"Longest wait; then exit code 5. Default: --timeout where it is given, else {WAIT_S:g}.",
    )(command)  # fmt: skip
    return click.option("--wait", is_flag=True, help="Return when it is done.")(command)


def _wait_limit(context: click.Context, _option: click.Parameter, value: float | None) -> float:
    """click reads what the command line has before what it has not, so a --timeout that was given is known here."""
    if value is not None:
        return value
    given: float = context.params.get("timeout_s", WAIT_S)
    return given if context.get_parameter_source("timeout_s") is ParameterSource.COMMANDLINE else WAIT_S


def mutation(reason: str, expected_revision: int, idempotency_key: str, dry_run: bool) -> pb.Mutation:
    from genlock.v1 import operator_pb2 as pb

    return pb.Mutation(
        reason=reason, expected_revision=expected_revision, idempotency_key=idempotency_key, dry_run=dry_run
    )


def call(endpoint: str | None, token: str | None, timeout_s: float, name: str, request: Message) -> Any:
    """One RPC of OperatorService. Raises GenlockError, Unreachable."""
    from cluster.cli.client import connect, run_async

    async def work() -> Any:
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            return await client.operate(name, request)

    return run_async(work())


def show(answer: Message, output: str, tables: Tables, empty: str = "") -> None:
    """On stdout, in the form that was asked for. `empty`: what is said in place of no table at all."""
    from cluster.cli import render

    def print_tables(wide: bool) -> None:
        out = render.stdout()
        found = tables(answer, wide)
        if not found:
            out.print(empty)
        for number, (title, columns, rows) in enumerate(found):
            if number:
                out.print()
            out.print(render.table(title, columns, rows))

    emit(output, lambda: render.as_dict(answer), print_tables)


def fleet_tables(fleet: pb.FleetView, wide: bool) -> list[tuple[str, Sequence[str], Sequence[Sequence[object]]]]:
    """The fleet as one table."""
    columns = ["worker", "role", "phase", "cordoned", "age", "restarts", "running", "waiting", "free", "node", "reason"]
    if wide:
        columns[9:9] = ["pages", "quarantined", "leases", "tokens", "endpoint", "incarnation", "engine"]
    rows = [_worker_row(worker, wide) for worker in fleet.workers]
    state = "settled" if fleet.settled else f"not settled: {fleet.reason}" if fleet.reason else "not settled"
    title = (
        f"{fleet.desired_prefill} prefill + {fleet.desired_decode} decode wanted (revision {fleet.revision}), {state}"
    )
    return [(title, columns, rows)]


def _worker_row(worker: pb.FleetWorker, wide: bool) -> list[object]:
    facts, known = worker.status, worker.HasField("status")
    reason = worker.reason
    if worker.drain_left_ms:
        reason = f"{reason}; {worker.drain_left_ms / 1000:.0f} s left".lstrip("; ")
    row: list[object] = [
        worker.worker_id, worker.role, worker.phase, worker.cordoned, age(worker.phase_age_ms), worker.restarts,
        facts.running_requests if known else "-", facts.waiting_requests if known else "-",
        facts.pool.free if known else "-",
    ]  # fmt: skip
    if wide:
        row += [
            facts.pool.pages if known else "-", facts.pool.quarantined if known else "-",
            facts.leases if known else "-", facts.tokens if known else "-", worker.endpoint,
            f"{worker.incarnation:x}", facts.transfer_engine if known else "-",
        ]  # fmt: skip
    return [*row, worker.node, reason]


def age(milliseconds: int) -> str:
    """For people: 850 ms, 12 s, 3 min, 4 h, 2 d."""
    value, unit = milliseconds / 1000, "s"
    if value < 1:
        return f"{milliseconds} ms"
    for limit, divisor, name in ((120, 60, "min"), (120, 60, "h"), (48, 24, "d")):
        if value < limit:
            break
        value, unit = value / divisor, name
    return f"{value:.0f} {unit}"


async def targets(client: Client, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which names are workers and which are nodes. Raises NotFound naming what there is."""
    from genlock.v1 import operator_pb2 as pb

    fleet = await client.operate("GetFleet", pb.GetFleetRequest())
    workers = {worker.worker_id for worker in fleet.workers}
    nodes: set[str] = set()
    if not set(names) <= workers:
        nodes = {node.node for node in (await client.operate("ListNodes", pb.ListNodesRequest())).nodes}
    for name in names:
        if name not in workers | nodes:
            raise NotFound(
                "unknown_worker",
                f"no worker or node {name[:64]!r}; workers: {', '.join(sorted(workers)) or 'none'}"
                + (f"; nodes: {', '.join(sorted(nodes))}" if nodes else ""),
            )
    return [name for name in names if name in workers], [name for name in names if name not in workers]


def leaving(told: pb.FleetView, going: Sequence[pb.FleetWorker]) -> list[pb.FleetWorker]:
    """Of the workers that a change was about, those that leave by it. Where the change was a repeated one, they have
    gone or are on their way, and whoever serves under their names or on their nodes is another life."""
    return [worker for worker in going if not told.repeated or worker.phase == "DRAINING"]


async def leave(client: Client, wait_s: float, told: pb.FleetView, going: Sequence[pb.FleetWorker]) -> pb.FleetView:
    """Waits until these lives of workers have ended, whatever follows. Returns and raises what `settle` does."""
    lives = {(worker.worker_id, worker.incarnation) for worker in going if worker.phase != "STOPPED"}

    def pending(fleet: pb.FleetView) -> Pending | None:
        left = ", ".join(
            worker.worker_id
            for worker in fleet.workers
            if (worker.worker_id, worker.incarnation) in lives and worker.phase != "STOPPED"
        )
        return (left, left) if left else None

    return await _wait(client, wait_s, told, pending, "Draining")


async def settle(
    client: Client, wait_s: float, told: pb.FleetView, *, gone: Sequence[str] = (), what: str = "The fleet"
) -> pb.FleetView:
    """Waits until the fleet is as wanted and `gone` are not there any more, with progress on stderr. Returns the fleet
    as it is then, with what the answer to the change, `told`, said of the change itself. Raises DeadlineExceeded
    (`wait_timeout`)."""

    def pending(fleet: pb.FleetView) -> Pending | None:
        if fleet.settled and not any(worker.worker_id in gone for worker in fleet.workers):
            return None
        busy = ", ".join(
            f"{worker.worker_id} {worker.phase.lower()}" for worker in fleet.workers if worker.phase != "READY"
        )
        why = fleet.reason or busy or "settling"
        return busy or why, why

    return await _wait(client, wait_s, told, pending, what)


async def _wait(
    client: Client, wait_s: float, told: pb.FleetView, pending: Callable[[pb.FleetView], Pending | None], what: str
) -> pb.FleetView:
    """Looks at the fleet until nothing is pending."""
    from cluster.cli import render
    from genlock.v1 import operator_pb2 as pb

    why = "the controller has not answered"
    try:
        # Around the calls too: one that hangs may not outlast the wait.
        async with asyncio.timeout(wait_s):
            with render.stderr().status(f"{what}…") as spinner:
                while True:
                    fleet: pb.FleetView = await client.operate("GetFleet", pb.GetFleetRequest())
                    left = pending(fleet)
                    if left is None:
                        fleet.repeated = told.repeated  # a look at the fleet knows of no change
                        return fleet
                    shown, why = left
                    spinner.update(f"{what}: {shown}")
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DeadlineExceeded(
            "wait_timeout", f"not done after {wait_s:g} s: {why}; it goes on, look with `genlock get workers`"
        ) from None
