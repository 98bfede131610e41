"""docs/faults.md is what its data say, and every test that it names exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.faults.page import FAULTS, PUSH, control_text, page, proof_text
from bench.faults.proofs import all_missing, missing
from bench.faults.record import address

ROOT = Path(__file__).resolve().parents[2]
# The kinds' numbers are names: stable, and some are not in use.
NUMBERS = [
    *range(1, 10), 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 23, 24,
    25, 26, 27, 28, 30, 31, 32, 34, 35, 36, 37,
    39, 40, 42, 43, 44, 46, 47, 48, 49, 50, 51, 53, 54, 55,
    56, 57, 58, 59, 60, 61, 63, 64,
]  # fmt: skip


def test_the_page_is_current():
    assert (ROOT / "docs/faults.md").read_text("utf-8") == page(), "run: python -m bench.faults"


def test_every_kind_has_its_row_and_its_proof():
    assert [fault.number for fault in FAULTS] == NUMBERS
    for fault in FAULTS:
        assert fault.sources
        assert fault.shown
        assert fault.elsewhere.endswith(".")
        assert fault.here.endswith(".")


def test_every_test_that_is_named_exists():
    assert not all_missing(FAULTS, ROOT)
    push = replace(FAULTS[0], shown=tuple(proof for _, proofs in PUSH for proof in proofs))
    assert not all_missing([push], ROOT)


def test_what_does_not_exist_is_told():
    def read(path: Path) -> str:
        if path.name != "test_a.py":
            raise FileNotFoundError
        return "def helper(): ...\nasync def test_here(): ..."

    for proof, told in (
        ("tests/test_a.py::test_here", None),
        ("tests/test_a.py::test_there", "tests/test_a.py has no test_there"),
        ("tests/test_a.py::helper", "tests/test_a.py has no helper"),
        ("tests/test_b.py::test_here", "no file tests/test_b.py"),
        ("row 4", None),
        ("row 99", "no row 99"),
        ("sim late_bytes", None),
        ("sim rain", "no site rain"),
        ("without digest", None),
        ("without hope", "no check hope"),
    ):
        assert missing(proof, read, Path()) == told, proof


def test_links_and_controls_read_as_they_should():
    assert address("vllm#1") == "[vllm#1](https://github.com/vllm-project/vllm/issues/1)"
    assert address("a/b#2") == "[a/b#2](https://github.com/a/b/issues/2)"
    assert proof_text("tests/x.py::test_y") == "[`test_y`](../tests/x.py)"
    assert control_text(replace(FAULTS[0], control=("row 7",))) == "`row 7` without digest: wrong answer"
    assert control_text(replace(FAULTS[0], control=())) == "none"
