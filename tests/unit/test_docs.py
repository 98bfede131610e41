"""The documents name what is there."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from cluster.selftest.cli import MODELS
from cluster.selftest.rows import ROWS
from tests.support.documents import DOCUMENTS, name_of

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


PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9]*(?:[_ -][A-Z0-9]+)*")


def placeholders(text: str) -> list[str]:
    """Lines that are one name in capitals: something that was to be filled in. In code, only names with an underscore:
    `EOF` and the like are the shell's."""
    found, in_code = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        bare = line.strip().strip("`<>{}[]|*$% ")
        if len(bare) > 2 and PLACEHOLDER.fullmatch(bare) and ("_" in bare or not in_code):
            found.append(line)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_nothing_is_left_to_be_filled_in(document: Path) -> None:
    assert not placeholders(document.read_text())


def test_a_placeholder_is_seen() -> None:
    for line in ("GATEWAY_TABLE", "TODO", "  {{ GATEWAY_TABLE }}", "`TRANSFER_2_TABLE`", "| GATEWAY_TABLE |", "TO DO"):
        assert placeholders(f"Text.\n\n{line}\n\nMore.\n") == [line]
    for line in ("Set GENLOCK_CA.", "| TTFT | P99 ms |", "## API", "- OK", "| 0 | 1 |", "```\nEOF\n```"):
        assert placeholders(line) == [], line
    assert placeholders("```\nGATEWAY_TABLE\n```\n") == ["GATEWAY_TABLE"]


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
