"""`genlock selftest`: runs the fault table and prints it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.output import emit, output_option
from cluster.selftest.lab import Subject, load_subject
from cluster.selftest.rows import ROWS, Row
from cluster.selftest.run import RowResult, as_json, run_table
from kvstore.errors import InvalidInput

MODELS = ("probe", "smollm2")
KILLED = "A worker died or was killed while executing a task"


@click.command(
    epilog="""\b
Examples:
  genlock selftest                     every row, with the probe model and with the real one
  genlock selftest --model probe       the quick half
  genlock selftest --row 4 --row 10    some rows
  genlock selftest -o json"""
)
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), help="Model to test with; default: both.")
@click.option("--row", "numbers", multiple=True, help="Row to run, such as 4 or 6a; default: all.")
@click.option("--no-processes", is_flag=True, help="Leave out the rows that kill processes (17, 18).")
@output_option
def command(models: tuple[str, ...], numbers: tuple[str, ...], no_processes: bool, output: str) -> int:
    """Breaks private clusters in every way of the fault table and checks that each fault ends one request with a typed
    error, spares its neighbour, gives every page back, and would have reached the answer without the check.

    Exit code 1 if any row is not fail-closed."""
    rows = _chosen(numbers, no_processes)
    # Ray tells of workers on stdout, from a thread of its own; stdout is for the result.
    with contextlib.redirect_stdout(Unexpected(sys.stderr)), _quiet_logs():
        results = asyncio.run(_run(models or MODELS, rows))
    emit(output, lambda: as_json(results), lambda _wide: _print_table(results))
    return 0 if all(r.ok for r in results) else 1


class Unexpected(io.TextIOBase):
    """Passes on whole lines, but for Ray's news that a worker was killed: rows 17 and 18 kill them."""

    def __init__(self, to: TextIO) -> None:
        self._to = to
        self._held = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._held = (self._held + text).split("\n")
        self._to.writelines(f"{line}\n" for line in lines if not ("(raylet)" in line and KILLED in line))
        return len(text)

    def flush(self) -> None:
        self._to.flush()


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Faults are the point here; the lines that they log are not."""
    logger = logging.getLogger("genlock")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _chosen(numbers: Sequence[str], no_processes: bool) -> list[Row]:
    known = {row.number: row for row in ROWS}
    unknown = [n for n in numbers if n not in known]
    if unknown:
        raise InvalidInput("unknown_row", f"no row {unknown[0]!r}; rows: {', '.join(known)}", field="--row")
    chosen = [known[n] for n in numbers] if numbers else list(ROWS)
    return [row for row in chosen if row.run is not None or not no_processes]


async def _run(models: Sequence[str], rows: Sequence[Row]) -> list[RowResult]:
    results: list[RowResult] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console, total = Console(stderr=True), len(rows) * len(models)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading models", total=total)
        subjects = [await asyncio.to_thread(load_subject, name) for name in models]

        def on_start(row: Row, subject: Subject) -> None:
            progress.update(task, description=f"{subject.name}: {row.number} {row.name}")

        async for result in run_table(subjects, rows, on_start):
            results.append(result)
            progress.advance(task)
            if not console.is_terminal:
                click.echo(told(result, len(results), total), err=True)
    return results


def told(result: RowResult, number: int, total: int) -> str:
    """One line of progress, where no bar can be shown."""
    verdict = "ok" if result.ok else f"NOT OK {result.detail}".rstrip()
    return f"{number} of {total}: {result.model} row {result.number}, {result.name}: {verdict}"


def _print_table(results: Sequence[RowResult]) -> None:
    table = Table(title="Fault table", title_justify="left", expand=False)
    for name, justify in (
        ("row", "right"), ("fault", "left"), ("model", "left"), ("typed error", "left"), ("tokens", "right"),
        ("neighbour", "left"), ("pages back", "left"), ("control: without", "left"), ("", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type] # literals above
    for r in results:
        control = f"{', '.join(r.checks_off)}: {'wrong answer' if r.control_wrong else 'NOT WRONG'}"
        verdict = "fail-closed" if r.fail_closed else "NOT FAIL-CLOSED"
        table.add_row(
            r.number, r.name, r.model, r.error, str(r.tokens_sent), _yes(r.neighbour_ok), _yes(r.pages_back), control,
            verdict if r.ok or not r.detail else f"{verdict}: {r.detail}",
        )  # fmt: skip
    Console(width=None if Console().is_terminal else 200).print(table)
    good = sum(r.ok for r in results)
    click.echo(f"{good} of {len(results)} rows fail closed, spare the neighbour, return every page, and have a control")


def _yes(value: bool) -> str:
    return "ok" if value else "NO"
