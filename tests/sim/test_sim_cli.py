"""The command: its JSON, its exit codes."""

import json
from pathlib import Path

from click.testing import CliRunner

from kvstore.checks import check_names
from sim.cli import sim_command
from sim.coverage import REJECTS
from sim.faults import site_names
from sim.laws import LAWS


def invoke(*args):
    result = CliRunner().invoke(sim_command, list(args))
    return result.exit_code, result.stdout


def test_lists_checks_and_laws():
    code, out = invoke("--list-checks", "--json")
    assert code == 0
    listed = json.loads(out)
    assert listed["checks"] == list(check_names())
    assert "wrong_token" in listed["laws"]


def test_seeds_as_json():
    code, out = invoke("--seeds", "0:3", "--jobs", "1", "--json")
    told = json.loads(out)
    assert code == 0
    assert told.keys() == {"seeds", "page_operations", "violations", "seconds", "faults", "unreached", "rejects"}
    assert told["rejects"].keys() == {check for check, reasons in REJECTS.items() if reasons}
    assert "digest_mismatch" in told["rejects"]["digest"]
    assert (told["seeds"], told["violations"]) == (3, 0)


def test_without_a_check_as_json():
    code, out = invoke("--seeds", "1:5", "--jobs", "1", "--without", "exit", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["seeds_to_first_violation"] == 1
    assert told["violations"] >= 1


def test_a_control_that_nobody_misses_fails():
    code, out = invoke("--seeds", "7:8", "--jobs", "1", "--without", "header", "--law", "wrong_token", "--json")
    assert json.loads(out)["seeds_to_first_violation"] is None
    assert code == 1


def test_replay_tells_the_same_trace():
    code, first = invoke("--replay", "5", "--json")
    assert code == 0
    assert json.loads(first)["trace"] == json.loads(invoke("--replay", "5", "--json")[1])["trace"]
    assert "armed:" in invoke("--replay", "5")[1]


def test_bad_seeds_are_refused():
    assert invoke("--seeds", "5:5")[0] == 2
    assert invoke("--seeds", "x:5")[0] == 2


def test_the_document_names_every_law_fault_and_check():
    text = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
    names = [*LAWS, *site_names(), *check_names()]
    assert not [name for name in names if f"`{name}`" not in text]
