"""`genlock bench faults`: writes docs/faults.md, or compares it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bench.faults.page import FAULTS, page
from bench.faults.proofs import all_missing

ROOT = Path(__file__).resolve().parents[2]


@click.command(
    epilog="""\b
Examples:
  python -m bench.faults            write docs/faults.md
  python -m bench.faults --check    exit code 1 if it is not current or names a test that is not there"""
)
@click.option("--check", is_flag=True, help="Compare and write nothing.")
def command(check: bool) -> int:
    """The page of public faults: one row a kind, its test and what happens without the check. Needs a checkout."""
    missing = all_missing(FAULTS, ROOT)
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
