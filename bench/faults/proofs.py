"""Whether the tests that the fault page names exist: by their syntax trees, without running or importing them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from bench.faults.found import Found
from bench.faults.record import Fault
from cluster.selftest.rows import ROWS, Row
from kvstore.checks import check_names
from sim.faults import site_names


@cache
def rows() -> dict[str, Row]:
    return {row.number: row for row in ROWS}


def missing(proof: str, read: Callable[[Path], str], root: Path) -> str | None:
    """Why `proof` names nothing that exists; None if it does."""
    kind, _, rest = proof.partition(" ")
    if kind == "row":
        return None if rest in rows() else f"no row {rest}"
    if kind == "sim":
        return None if rest in site_names() else f"no site {rest}"
    if kind == "without":
        return None if rest in check_names() else f"no check {rest}"
    name, _, test = proof.partition("::")
    try:
        text = read(root / name)
    except OSError:
        return f"no file {name}"
    return None if test.startswith("test_") and test in _functions(text) else f"{name} has no {test}"


@cache
def _functions(text: str) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))


def all_missing(faults: Iterable[Fault | Found], root: Path) -> list[str]:
    """What the page promises and the tree does not hold, one line each."""
    lines = []
    for fault in faults:
        for proof in (*fault.shown, *fault.control):
            why = missing(proof, lambda path: path.read_text("utf-8"), root)
            if why is not None:
                number = f"{fault.number} " if isinstance(fault, Fault) else ""
                lines.append(f"{number}{fault.title}: {why}")
    return lines
