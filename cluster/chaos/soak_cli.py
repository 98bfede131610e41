"""`genlock soak`: very many short requests, and nothing may grow."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict

import click

from cluster.chaos.cli import print_table, progress_bar, quiet_logs, run_to_the_end
from cluster.chaos.soak import Soak, SoakReport, SoakSettings
from cluster.output import emit, output_option
from kvstore.errors import Unavailable

SHOWN = 12


@click.command(
    epilog="""\b
Examples:
  genlock soak --requests 1500
  genlock soak --requests 100000 --json > soak.json"""
)
@click.option("--requests", type=int, default=100_000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same requests.")
@click.option("--engine", type=click.Choice(["shm", "nixl", "mooncake"]), default="shm", show_default=True)
@click.option("--restarts", type=click.IntRange(0, 50), default=5, show_default=True, help="Of the prefill worker.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@output_option
def command(requests: int, seed: int, engine: str, restarts: int, as_json: bool, output: str) -> int:
    """Sends short requests with the probe model through a private cluster in this process and watches resident memory,
    descriptors, mappings of shared memory, the regions that the transfer engines hold and the size of every table.

    Exit code 1 if an answer is not the oracle's, if a page does not come back, or if something grows: if the median of
    its last tenth of samples is above that of the second tenth by more than 5 % and 8 MiB (memory), 4 (descriptors), 2
    (mappings of shared memory), nothing (regions of the engines), 10 % and 8 entries (tables); threads are held by the
    limits of their pools."""
    settings = SoakSettings(requests, seed, engine, restarts=restarts)
    if not sys.platform.startswith("linux"):
        raise Unavailable("no_proc", "the soak reads /proc and runs on Linux alone")
    with contextlib.redirect_stdout(sys.stderr), quiet_logs():
        report = run_to_the_end(_run(settings))
    emit(
        "json" if as_json else output,
        lambda: {**asdict(report), "failures": report.failures, "passed": not report.failures},
        lambda _wide: _print_report(report),
    )
    return 1 if report.failures else 0


async def _run(settings: SoakSettings) -> SoakReport:
    with progress_bar() as told:
        return await Soak(settings, told).run()


def _print_report(report: SoakReport) -> None:
    steepest = sorted(report.series, key=lambda j: (j.flat, "." in j.name, -j.slope))[:SHOWN]
    title = f"Soak: {report.ok} of {report.requests} right, {report.requests_per_s:.0f} a second over {report.engine}"
    rows = [(j.name, j.first, j.last, j.most, j.slope, "flat" if j.flat else "GROWS") for j in steepest]
    print_table(title, ("what", "second tenth", "last tenth", "most", "per 1,000 requests", ""), rows)
    click.echo(f"{len(report.series)} series, {sum(j.flat for j in report.series)} flat")
    for text in report.failures:
        click.echo(f"FAILED: {text}")
    if not report.failures:
        click.echo("Every answer is the oracle's, every page is back, and nothing grows.")
