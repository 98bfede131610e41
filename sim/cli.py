"""`genlock sim`: the simulator for operators and for CI."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from cluster.output import output_option, text
from kvstore.checks import check_names
from sim.controls import line, run_controls
from sim.coverage import met_lines, rejects, table
from sim.faults import sample_faults
from sim.laws import LAWS
from sim.minimise import minimise
from sim.runner import Report, run, swarm
from sim.world import make_kit

DATA = ("json", "yaml")


class SeedRange(click.ParamType[range]):
    """`A:B`, the seeds A to B - 1."""

    name = "A:B"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        if isinstance(value, range):
            return value
        first, colon, last = str(value).partition(":")
        if not colon or not first.isdigit() or not last.isdigit() or int(first) >= int(last):
            self.fail(f"{value!r} is not A:B with A < B", param, ctx)
        return range(int(first), int(last))


@click.command(
    "sim",
    epilog="""\b
Examples:
  genlock sim --seeds 0:1000
  genlock sim --replay 4711
  genlock sim --seeds 0:2000 --without header --json
  genlock sim --list-checks -o yaml""",
)
@click.option("--list-checks", is_flag=True, help="List the checks that --without can switch off, and the laws.")
@click.option("--seeds", type=SeedRange(), default="0:1000", show_default=True, help="Seeds to play.")
@click.option("--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Processes.")
@click.option("--events", type=click.IntRange(1), help="Stop after about so many events.")
@click.option("--replay", type=click.IntRange(0), help="Play one seed and tell what happened.")
@click.option("--without", "without", type=click.Choice(check_names()), multiple=True, help="Switch a check off.")
@click.option("--law", "laws", type=click.Choice(tuple(LAWS)), multiple=True, help="Count these laws only.")
@click.option("--controls", is_flag=True, help="Run every negative control over --seeds; print the table.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@output_option
def sim_command(
    list_checks: bool,
    seeds: range,
    jobs: int,
    events: int | None,
    replay: int | None,
    without: tuple[str, ...],
    laws: tuple[str, ...],
    controls: bool,
    as_json: bool,
    output: str,
) -> None:
    """Play the cluster's cores against faults, each run decided by its seed alone.

    Without --without, exits with 1 if a law was broken. With it, exits with 1 if none was: then the check was missed
    by nobody.
    """
    counted = laws or tuple(LAWS)
    output = "json" if as_json else output
    if list_checks:
        _list(output)
    elif controls:
        _controls(seeds, jobs, output)
    elif replay is not None:
        _replay(replay, without, counted, output)
    else:
        _swarm(seeds, jobs, events, without, counted, output)


def _list(output: str) -> None:
    if output in DATA:
        _print(output, {"checks": list(check_names()), "laws": LAWS})
        return
    click.echo("checks: " + " ".join(check_names()))
    for law, meaning in LAWS.items():
        click.echo(f"law {law}: {meaning}")


def _replay(seed: int, without: tuple[str, ...], laws: tuple[str, ...], output: str) -> None:
    result = run(seed, without=without, laws=laws)
    report = Report()
    report.add(result)
    if output in DATA:
        _print(output, report.as_json() | {"trace": result.trace, "outcomes": dict(result.outcomes)})
        _tell_failures(report, without, err=True)
    else:
        click.echo(f"seed {seed}: trace {result.trace}, {result.events} events")
        click.echo("armed: " + (", ".join(sample_faults(seed).armed) or "nothing"))
        click.echo("injected: " + _counts(result.injected))
        click.echo("requests: " + _counts(result.outcomes))
        _tell_failures(report, without)
    sys.exit(1 if bool(report.violations) is not bool(without) else 0)


def _controls(seeds: range, jobs: int, output: str) -> None:
    results = run_controls(seeds=seeds, jobs=jobs, on_result=lambda r: click.echo(line(r), err=output in DATA))
    if output in DATA:
        _print(output, [
            {"checks": r.control.checks, "laws": r.control.laws, "seeds_to_first_violation": r.seeds}
            for r in results
        ])  # fmt: skip
    sys.exit(1 if any(r.seeds is None for r in results) else 0)


def _swarm(
    seeds: range, jobs: int, events: int | None, without: tuple[str, ...], laws: tuple[str, ...], output: str
) -> None:
    with click.progressbar(length=len(seeds), label="seeds", file=sys.stderr) as bar:

        def progress(report: Report) -> None:
            bar.update(report.seeds - bar.pos)

        report = swarm(
            seeds, jobs=jobs, without=without, laws=laws, stop_at_first=bool(without), max_events=events,
            on_progress=progress,
        )  # fmt: skip
    until = None if report.first_failing_seed is None else report.first_failing_seed - seeds.start + 1
    if output in DATA:
        control = {"seeds_to_first_violation": until} if without else {}
        _print(output, report.as_json() | control)
        if not without:
            _tell_failures(report, without, err=True)
    else:
        _tell(report)
        if without:
            click.echo(f"without {', '.join(without)}: first violation after {until or 'more than all'} seeds")
        _tell_failures(report, without)
    sys.exit(1 if bool(report.violations) is not bool(without) else 0)


def _print(output: str, tree: Any) -> None:
    """JSON stays one line: a run of many slices keeps a line for each."""
    click.echo(json.dumps(tree) if output == "json" else text(output, tree))


def _tell(report: Report) -> None:
    rate = report.seeds / report.seconds if report.seconds else 0.0
    a_minute = 60 * report.page_operations / report.seconds if report.seconds else 0.0
    click.echo(f"{report.seeds} seeds, {report.events} events in {report.seconds:.1f} s: {rate:.1f} seeds/s")
    click.echo(f"{report.page_operations} page operations, {a_minute:.0f} a minute: {_counts(report.operations)}")
    click.echo("requests: " + _counts(report.outcomes))
    click.echo("faults injected: " + _counts(report.injected))
    click.echo("\n".join(["slot state x event, allowed/refused:", *table(report.cells)]))
    click.echo("\n".join(["other states x events, times met:", *met_lines(report.met)]))
    click.echo("refused, by check: " + "; ".join(f"{n}: {_counts(c)}" for n, c in rejects(report.rejects).items()))
    click.echo("never reached: " + (", ".join(report.unreached()) or "nothing"))
    click.echo(f"violations: {report.violations}")


def _tell_failures(report: Report, without: tuple[str, ...], err: bool = False) -> None:
    """Names the failing seeds that the report kept, and prints the first one, made small, as a test to paste."""
    for seed, violation in report.failures:
        click.echo(f"seed {seed}: {violation}", err=err)
    if report.failures:
        small = minimise(min(seed for seed, _ in report.failures), make_kit(), without=without)
        if small is not None:
            click.echo("\n" + small.as_test(), err=err)


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"
