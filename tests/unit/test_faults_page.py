"""docs/faults.md is what its data say, and every test that it names exists."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.faults import controls
from bench.faults.cli import command
from bench.faults.controls import Control, Record
from bench.faults.found import FOUND
from bench.faults.page import FAULTS, FIVE, GROUPS, MEASURED, PUSH, control_text, page, proof_text
from bench.faults.proofs import all_missing, missing, rows
from bench.faults.record import address
from kvstore.errors import InvalidInput

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


def test_every_kind_has_its_control_or_says_why_not():
    unsaid = [fault.number for fault in FAULTS if bool(fault.control) == bool(fault.no_control)]
    assert not unsaid
    wrong_answers = [fault for _, faults in GROUPS[:2] for fault in faults]
    assert [fault.number for fault in wrong_answers if not fault.control] == [], "of these a wrong answer can be shown"


def test_every_test_that_is_named_exists():
    assert not all_missing((*FAULTS, *FOUND), ROOT)
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
    advisory = "https://github.com/vllm-project/vllm/security/advisories/GHSA-1-2-3"
    assert address("vllm#GHSA-1-2-3") == f"[vllm#GHSA-1-2-3]({advisory})"
    assert address("a/b#2") == "[a/b#2](https://github.com/a/b/issues/2)"
    assert proof_text("tests/x.py::test_y") == "[`test_y`](../tests/x.py)"
    record = Record("2026-01-01", {"7": Control(("digest",), {"probe": True})})
    assert control_text(replace(FAULTS[0], control=("row 7",)), record) == "`row 7` without digest: wrong answer"
    assert (
        control_text(replace(FAULTS[0], control=("row 7",)), Record()) == "`row 7` without digest: no result recorded"
    )
    assert control_text(replace(FAULTS[0], control=()), record) == "none"
    assert control_text(replace(FAULTS[0], control=(), no_control="nothing to leave out"), record) == (
        "none: nothing to leave out"
    )
    assert control_text(replace(FOUND[0], control=(), no_control="too slow"), record) == "none: too slow"


def test_a_fault_that_was_found_here_has_its_test_and_its_control_or_says_why_not():
    for fault in FOUND:
        assert fault.shown
        assert bool(fault.control) != bool(fault.no_control)
        assert fault.was.endswith(".")
        assert fault.now.endswith(".")


def test_every_row_that_is_named_as_a_control_was_recorded_and_noticed():
    record = controls.read(MEASURED)
    named = {proof.removeprefix("row ") for f in (*FAULTS, *FOUND) for proof in f.control if proof.startswith("row ")}
    named |= {number for *_, number in FIVE}
    told = {number: record.told(number, rows()[number].off) for number in sorted(named)}
    assert told == dict.fromkeys(sorted(named), "wrong answer"), "run the selftest and record its report"


def test_a_control_that_noticed_nothing_or_ran_with_other_checks_off_is_told_so():
    record = Record("", {"7": Control(("digest",), {"probe": True, "smollm2": False}), "8": Control(("digest",), {})})
    assert record.told("7", ("digest",)) == "NOT NOTICED with smollm2"
    assert record.told("7", ("digest", "header")) == "no result recorded"
    assert record.told("8", ("digest",)) == "no result recorded"
    assert record.told("9", ("digest",)) == "no result recorded"


def test_a_report_of_the_selftest_is_recorded_and_read_again(tmp_path: Path):
    row = {"number": "6a", "checks_off": ["digest"], "model": "probe", "control_wrong": True}
    record = controls.record_of({"rows": [row, {**row, "model": "smollm2", "control_wrong": False}]}, "2026-01-01")
    assert record.rows == {"6a": Control(("digest",), {"probe": True, "smollm2": False})}
    assert record.models == ("probe", "smollm2")
    (tmp_path / controls.FILE).write_text(controls.text_of(record))
    assert controls.read(tmp_path) == record
    assert controls.read(tmp_path / "nowhere") == Record()
    for bad in ([], {}, {"rows": [{}]}, {"rows": 3}):
        with pytest.raises(InvalidInput):
            controls.record_of(bad, "")


def test_the_command_records_a_report_before_it_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = {"number": "4", "checks_off": list(rows()["4"].off), "model": "probe", "control_wrong": True}
    (tmp_path / "report.json").write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr("bench.faults.cli.MEASURED", tmp_path)
    done = CliRunner().invoke(command, ["--check", "--controls", str(tmp_path / "report.json")])
    assert controls.read(tmp_path).told("4", rows()["4"].off) == "wrong answer", done.output
