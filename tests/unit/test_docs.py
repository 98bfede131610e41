"""The documents name what is there."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from pathlib import Path

import pytest

from cluster.selftest.cli import MODELS
from cluster.selftest.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kvstore", "model", "wire", "prefill", "decode", "cluster", "sim", "bench")


def tracked(*folders: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    return subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def test_architecture_lists_every_file() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    missing = [f for f in tracked(*ROOMS) if f.endswith(".py") and (ROOT / f).exists() and f"`{f}`" not in text]
    assert not missing, f"run .ci/list_files: {missing}"


def test_dependencies_are_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = (ROOT / "docs/dependencies.md").read_text()
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    groups.append(project["dependency-groups"]["dev"])
    names = {spec.split("[")[0].split("=")[0].split(">")[0].split("<")[0].strip() for group in groups for spec in group}
    assert not [name for name in sorted(names) if f"`{name}`" not in text]


def sources() -> list[str]:
    return [f for f in tracked(*ROOMS, "tests") if f.endswith(".py") and (ROOT / f).exists()]


def test_files_are_short() -> None:
    lengths = {f: (ROOT / f).read_text().count("\n") for f in sources()}
    assert not {f: n for f, n in lengths.items() if n > 500}


def test_functions_are_short() -> None:
    long = [
        (f, node.name)
        for f in sources()
        for node in ast.walk(ast.parse((ROOT / f).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 70
    ]
    assert not long


def test_the_readmes_fault_table_is_that_of_the_rows() -> None:
    """Its results are a run's, written by `.ci/readme_table`; which rows there are and what their controls leave out
    are the code's."""
    text = (
        (ROOT / "README.md").read_text().split("<!-- fault table: start -->")[1].split("<!-- fault table: end -->")[0]
    )
    told = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in text.splitlines() if line[:1] == "|"]
    good = ["ok", "ok", "fail-closed"]
    assert [[cells[0], cells[1], cells[5], *cells[3:5], cells[6]] for cells in told[2:]] == [
        [row.number, row.name, f"{', '.join(row.off)}: wrong answer", *good] for row in ROWS
    ], "run: genlock selftest -o json > report.json; .ci/readme_table report.json"
    count = len(ROWS) * len(MODELS)
    assert f"\n{count} of {count} rows ({' and '.join(MODELS)})" in text
