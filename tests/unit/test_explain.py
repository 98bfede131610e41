"""Every reason that the code can raise is explained, with the status that it has."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.openai.errors import http_status
from cluster.operators.explain import STATUSES, codes, explain
from kvstore.errors import GenlockError, InvalidInput, LifecycleError, NotFound, StalePage
from wire.errors import error_classes

ROOT = Path(__file__).parents[2]
ROOMS = ("kvstore", "model", "wire", "prefill", "decode", "cluster")


class Module(NamedTuple):
    """What one module defines, as (name, class returned, first parameter), and the calls with a literal string first,
    as (name, string)."""

    definitions: list[tuple[str, str, str]]
    calls: list[tuple[str, str]]


@cache
def modules() -> tuple[Module, ...]:
    """Every module of the product. Read once: parsing takes seconds."""
    return tuple(read(path) for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def read(path: Path) -> Module:
    found = Module([], [])
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            returned = node.returns.id if isinstance(node.returns, ast.Name) else ""
            found.definitions.append((node.name, returned, "".join(a.arg for a in node.args.args[:1])))
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.calls.append((name, first.value))
    return found


def makers() -> dict[str, type[GenlockError]]:
    """Functions that make an error from a reason, their first parameter, by name; as `bad(reason, field, what)`."""
    classes = error_classes()
    return {
        name: classes[returned]
        for module in modules()
        for name, returned, first in module.definitions
        if returned in classes and first == "reason"
    }


@cache
def raised() -> dict[str, set[type[GenlockError]]]:
    """reason -> the classes that are made with it, by the literal first argument of a class or of a maker."""
    made = makers()
    known = {**error_classes(), **made}
    found: dict[str, set[type[GenlockError]]] = defaultdict(set)
    for module in modules():
        # A module may have a function of that name which takes something else first.
        others = {name for name, _, first in module.definitions if name in made and first != "reason"}
        for name, literal in module.calls:
            if name in known and name not in others:
                found[literal].add(known[name])
    return dict(found)


def test_the_search_finds_reasons() -> None:
    found = raised()
    assert len(found) > 150
    assert {kind.__name__ for kind in found["source_moved_on"]} == {"StalePage"}
    assert {kind.__name__ for kind in found["too_many_stops"]} == {"InvalidInput"}, "made by a function"


def test_every_reason_is_explained_with_its_status() -> None:
    missing, other = [], []
    for reason, kinds in sorted(raised().items()):
        try:
            told = explain(reason)
        except NotFound:
            missing.append(f"{reason} ({', '.join(kind.__name__ for kind in kinds)})")
            continue
        statuses = {kind.status for kind in kinds}
        if told.status not in statuses:
            other.append(f"{reason}: told {told.status}, raised as {statuses}")
    assert not missing, "explain these in cluster/operators/explain.py: " + "; ".join(missing)
    assert not other, other


def test_what_does_not_name_a_field_is_explained_one_by_one() -> None:
    general = [
        reason
        for reason, kinds in raised().items()
        if not all(issubclass(kind, InvalidInput | LifecycleError) for kind in kinds)
        and explain(reason).meaning == explain("bad_setting").meaning
    ]
    assert not general, general


@pytest.mark.parametrize("code", [told.code for told in codes()])
def test_explanations_are_sentences(code: str) -> None:
    told = explain(code)
    assert told.status in STATUSES
    assert told.http_status >= 400
    for text in (told.meaning, told.action):
        assert text[0].isupper() or text[0] in "`p/"
        assert len(text) < 300


def test_a_status_lists_its_reasons() -> None:
    told = explain("DATA_LOSS")
    assert "digest_mismatch" in told.meaning
    assert explain("aborted").status == "ABORTED"


def test_an_unknown_code_names_near_ones() -> None:
    with pytest.raises(NotFound, match="digest_mismatch"):
        explain("digest_mismach")


def test_the_reasons_that_the_api_names_are_reasons() -> None:
    texts = [path.read_text() for path in sorted((ROOT / "proto").rglob("*.proto"))]
    named = [name for text in texts for name in re.findall(r"reason such as (\w+)", text)]
    assert named
    assert set(named) <= {known.code for known in codes()}


def test_http_statuses_are_those_that_the_door_answers() -> None:
    assert explain("header_mismatch").http_status == http_status(StalePage("header_mismatch")) == 500
    assert explain("unknown_model").http_status == http_status(InvalidInput("unknown_model")) == 404


@pytest.mark.parametrize(("asked", "means"), [
    ("model_not_found", "unknown_model"),
    ("invalid_api_key", "bad_credential"),
    (" Digest_Mismatch ", "digest_mismatch"),
])  # fmt: skip
def test_names_of_the_http_door_and_other_spellings_are_known(asked: str, means: str) -> None:
    assert explain(asked) == explain(means)
