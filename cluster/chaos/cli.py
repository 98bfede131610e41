"""`genlock chaos`: breaks a private cluster again and again under load, and judges every answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.chaos.plan import Fault, Round, Shape, make_plan
from cluster.chaos.run import ChaosRun, ChaosSettings
from cluster.chaos.run import Progress as Told
from cluster.chaos.verdict import Report
from cluster.output import emit, output_option

T = TypeVar("T")
ENGINES = ("shm", "nixl", "mooncake")


@click.command(
    epilog="""\b
Examples:
  genlock chaos --minutes 1
  genlock chaos --minutes 10 --seed 7 --engine nixl --json
  genlock chaos --seed 7 --plan             what would be done, and when
  genlock chaos --fault kill --fault stop   these kinds alone
  genlock chaos --control                   must fail: the judge can see"""
)
@click.option("--minutes", type=float, default=1.0, show_default=True, help="Time under load.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same plan.")
@click.option("--engine", type=click.Choice(ENGINES), default="shm", show_default=True, help="Transfer engine.")
@click.option("--model", default="probe", show_default=True, help="Model to serve: probe or smollm2.")
@click.option("--prefill", type=click.IntRange(1, 16), default=2, show_default=True, help="Prefill workers.")
@click.option("--decode", type=click.IntRange(1, 16), default=2, show_default=True, help="Decode workers.")
@click.option("--rate", type=float, default=5.0, show_default=True, help="Requests a second, beside the storms.")
@click.option(
    "--fault", "faults", multiple=True, type=click.Choice([f.value for f in Fault]), help="Kind; default: all."
)
@click.option("--control", is_flag=True, help="Receipt checks off and foreign pages put in: the run must fail.")
@click.option("--plan", "show_plan", is_flag=True, help="Show the plan and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@output_option
def command(
    minutes: float, seed: int, engine: str, model: str, prefill: int, decode: int, rate: float,
    faults: tuple[str, ...], control: bool, show_plan: bool, as_json: bool, output: str,
) -> int:  # fmt: skip
    """Starts a private cluster, sends requests whether or not earlier ones were answered, breaks workers, clients,
    clocks, disks, memory, links and the gateway by a seeded plan, and judges every stream: the oracle's tokens, or a
    typed error and no further tokens.

    Exit code 1 if a token is foreign, a stream hangs, an error has no type, or a page does not come back."""
    chosen = tuple(Fault(name) for name in dict.fromkeys(faults)) or tuple(Fault)
    shape = Shape(seed=seed, minutes=minutes, kinds=chosen, rate_per_s=rate)
    settings = ChaosSettings(shape, engine, model, prefill, decode, control)
    output = "json" if as_json else output
    if show_plan:
        return _show_plan(ChaosRun(settings).shape, output)
    # Ray tells of killed workers on stdout, from a thread of its own; stdout is for the result.
    with contextlib.redirect_stdout(sys.stderr), quiet_logs():
        report = run_to_the_end(_run(settings))
    emit(
        output,
        lambda: {**asdict(report), "failures": report.failures, "passed": not report.failures},
        lambda _wide: _print_report(report),
    )
    return 1 if report.failures else 0


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Faults are the point here; the lines that they log are not."""
    loggers = [logging.getLogger(name) for name in ("genlock", "cluster")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def progress_bar() -> Iterator[Told]:
    """A bar on stderr, or a line for each change where that is no terminal; what it yields is called with words and
    the share that is done."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text, share: console.print(f"{share:4.0%} {text}", markup=False, soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)

        def told(text: str, share: float) -> None:
            progress.update(task, description=text, completed=share)

        yield told


def run_to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs it; SIGTERM ends it as Ctrl-C does, so that what was made is taken away. Raises click.Abort then."""

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None, "inside of run"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise click.Abort from None


async def _run(settings: ChaosSettings) -> Report:
    with progress_bar() as told:
        return await ChaosRun(settings, told).run()


def _show_plan(shape: Shape, output: str) -> int:
    plan = make_plan(shape)
    emit(output, lambda: [asdict(played) for played in plan], lambda _wide: _print_plan(plan, shape))
    return 0


def _print_plan(plan: Sequence[Round], shape: Shape) -> None:
    rows = [
        (
            number + 1,
            fault.at_ms,
            fault.kind.value,
            " - ".join(filter(None, (fault.target, fault.peer))) or "-",
            fault.for_ms,
            fault.amount,
        )
        for number, played in enumerate(plan)
        for fault in played.faults
    ]
    columns = ("round", "at ms", "fault", "target", "for ms", "amount")
    print_table(f"Plan of seed {shape.seed}", columns, rows)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """To stdout; a table that is piped somewhere is not cut."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for at, name in enumerate(columns):
        numbers = all(isinstance(row[at], int | float) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row))
    Console(width=None if Console().is_terminal else 200).print(table)


def _print_report(report: Report) -> None:
    rows = [
        ("requests sent", report.sent), ("right answers", report.ok),
        *((f"ended {cause}", count) for cause, count in report.errors_by_cause.items()),
        ("hung", report.hung), ("wrong ends, of these", report.wrong), ("foreign tokens", report.foreign_tokens),
        *((f"fault {kind}", count) for kind, count in report.faults.items()),
    ]  # fmt: skip
    title = f"Chaos, seed {report.seed}: {report.rounds} rounds in {report.seconds:.0f} s over {report.engine}"
    print_table(title, ("what", "count"), rows)
    for kind, reason in report.skipped.items():
        click.echo(f"skipped {kind}: {reason}")
    back = report.pages_back_ms
    click.echo(f"pages back after {back['p50']:.0f} ms (p50), {back['max']:.0f} ms (longest)")
    for text in report.failures:
        click.echo(f"FAILED: {text}")
    if not report.failures:
        click.echo("Every stream was the oracle's or ended with a typed error, and every page is back.")
