"""`python -m tests.fuzz`: many cases, or one again by its name and number."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import click

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # the library logs every endpoint that is none
from tests.fuzz import run
from tests.fuzz.layer import Report


@click.command(
    epilog="""\b
Examples:
  python -m tests.fuzz --cases 1000000 --json fuzz.json
  python -m tests.fuzz --seed 7
  python -m tests.fuzz --layer pulls --case 1234        one case again, with its traceback"""
)
@click.option("--cases", default=100_000, show_default=True, type=click.IntRange(1), help="Cases, all layers together.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same cases.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures.")
@click.option("--layer", type=click.Choice([layer.name for layer in run.PURE]), help="With --case: the layer.")
@click.option("--case", "number", type=click.IntRange(0), help="Runs this one case of --layer.")
def main(cases: int, seed: int, out: Path | None, layer: str | None, number: int | None) -> None:
    """Malformed and hostile input at every border. Exit code 1 if anything broke."""
    logging.getLogger("genlock").setLevel(logging.CRITICAL)
    if layer is not None and number is not None:
        [chosen] = [one for one in run.PURE if one.name == layer]
        click.echo(chosen.make(seed).case(number))
        return

    def show(report: Report) -> None:
        top = ", ".join(f"{name} {count}" for name, count in report.outcomes.most_common(5))
        click.echo(f"{report.layer:24} {report.cases:8}  {report.seconds:7.1f} s  {top}")
        for finding in report.findings:
            click.echo(f"  FOUND {finding}")

    reports = run.run_all(cases, seed, show)
    found = run.findings(reports)
    total = sum(report.cases for report in reports)
    seconds = sum(report.seconds for report in reports)
    click.echo(f"{total} cases in {seconds:.0f} s, {len(found)} findings")
    if out is not None:
        layers = [
            {"layer": r.layer, "cases": r.cases, "seconds": round(r.seconds, 1), "findings": r.findings,
             "outcomes": dict(r.outcomes.most_common())}
            for r in reports
        ]  # fmt: skip
        out.write_text(
            json.dumps({"cases": total, "seed": seed, "seconds": round(seconds), "layers": layers}, indent=1)
        )
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
