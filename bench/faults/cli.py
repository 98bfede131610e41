"""`genlock bench faults`: writes docs/faults.md, or compares it."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from bench.faults import controls
from bench.faults.found import FOUND
from bench.faults.page import FAULTS, MEASURED, page
from bench.faults.proofs import all_missing

ROOT = Path(__file__).resolve().parents[2]


@click.command(
    epilog="""\b
Examples:
  python -m bench.faults            write docs/faults.md
  python -m bench.faults --check    exit code 1 if it is not current or names a test that is not there
  genlock selftest -o json > report.json; python -m bench.faults --controls report.json"""
)
@click.option("--check", is_flag=True, help="Compare and write nothing.")
@click.option(
    "--controls",
    "report",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A report of `genlock selftest -o json`, whose results with checks off are recorded first.",
)
def command(check: bool, report: Path | None) -> int:
    """The page of public faults: one row a kind, its test and what happens without the check. Needs a checkout."""
    if report is not None:
        record = controls.record_of(json.loads(report.read_text("utf-8")), datetime.now(UTC).date().isoformat())
        (MEASURED / controls.FILE).write_text(controls.text_of(record), "utf-8")
    missing = all_missing((*FAULTS, *FOUND), ROOT)
    for line in missing:
        click.echo(f"not there: {line}", err=True)
    target = ROOT / "docs" / "faults.md"
    text = page()
    current = target.exists() and target.read_text("utf-8") == text
    if not check:
        target.write_text(text, "utf-8")
    elif not current:
        click.echo("docs/faults.md is not current; run: python -m bench.faults", err=True)
    return 1 if missing or (check and not current) else 0


if __name__ == "__main__":
    sys.exit(command.main(standalone_mode=False))
