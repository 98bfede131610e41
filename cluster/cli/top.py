"""`genlock top`: a live view in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import click

from cluster.cli import events
from cluster.cli.operate import fleet_tables
from cluster.cli.options import client_options, endpoint_or_default

if TYPE_CHECKING:
    from rich.console import Group

    from genlock.v1 import operator_pb2 as pb

SHOWN_EVENTS = 8


@click.command(
    epilog="""\b
Examples:
  genlock top
  genlock top --interval 0.5
  genlock top --iterations 1          # one picture, for scripts"""
)
@client_options
@click.option("--interval", "interval_s", type=click.FloatRange(0.1, 60), default=1.0, show_default=True,
              help="Seconds between two looks.")  # fmt: skip
@click.option("--iterations", type=click.IntRange(0), default=0, help="Ends after so many looks; 0: at Ctrl-C.")
def command(endpoint: str | None, token: str | None, timeout_s: float, interval_s: float, iterations: int) -> int:
    """Shows workers, memory, tokens a second, outcomes and the last events, again and again."""
    from rich.live import Live

    from cluster.cli import render
    from cluster.cli.client import connect, run_async

    console = render.stdout()

    async def work() -> None:
        before: dict[str, int] = {}
        async with connect(endpoint_or_default(endpoint), token, timeout_s) as client:
            live = Live(console=console, screen=not iterations, auto_refresh=False)
            # Where nothing can be drawn over, one picture comes after the other.
            with live if console.is_terminal else contextlib.nullcontext():
                count = 0
                while True:
                    look = await _look(client)
                    shown = picture(look, before, interval_s)
                    if console.is_terminal:
                        live.update(shown, refresh=True)
                    else:
                        console.print(shown)
                    before = {worker.worker_id: worker.status.tokens for worker in look[1].workers}
                    count += 1
                    if count == iterations:
                        return
                    await asyncio.sleep(interval_s)

    with contextlib.suppress(KeyboardInterrupt):
        run_async(work())
    return 0


async def _look(client: Any) -> tuple[pb.GetStatusResponse, pb.FleetView, pb.ListEventsResponse]:
    from genlock.v1 import operator_pb2 as pb

    return (
        await client.status(),
        await client.operate("GetFleet", pb.GetFleetRequest()),
        await client.operate("ListEvents", pb.ListEventsRequest(limit=SHOWN_EVENTS)),
    )


def picture(
    look: tuple[pb.GetStatusResponse, pb.FleetView, pb.ListEventsResponse], before: dict[str, int], interval_s: float
) -> Group:
    """Tables of one look. `before`: tokens of each worker at the last one."""
    from rich.console import Group
    from rich.text import Text

    from cluster.cli import render

    status, fleet, log = look
    rate = {
        role: sum(
            max(0, worker.status.tokens - before.get(worker.worker_id, worker.status.tokens)) / interval_s
            for worker in fleet.workers
            if worker.role == role
        )
        for role in ("prefill", "decode")
    }
    used = sum((w.status.pool.pages - w.status.pool.free) * w.status.pool.page_bytes for w in fleet.workers)
    whole = sum(w.status.pool.pages * w.status.pool.page_bytes for w in fleet.workers)
    head = Text(
        f"{status.model} · {status.running_requests} running · prefill {rate['prefill']:.0f} tokens/s · decode "
        f"{rate['decode']:.0f} tokens/s · pages {render.size(used)} of {render.size(whole)}"
    )
    outcomes = "  ".join(f"{name} {count}" for name, count in sorted(status.outcomes.items())) or "no request yet"
    title, columns, rows = fleet_tables(fleet, False)[0]
    history = [events.row(event) for event in log.events]
    return Group(
        head,
        Text(outcomes),
        Text(""),
        render.table(title, columns, rows),
        Text(""),
        render.table("Events", events.COLUMNS, history),
    )
