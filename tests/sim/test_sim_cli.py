"""The command: its JSON, its exit codes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvstore.checks import check_names
from sim.cli import sim_command
from sim.coverage import REJECTS, named_cells
from sim.faults import Faults, site_names
from sim.laws import LAWS
from sim.minimise import SmallCase
from sim.runner import play


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


@pytest.mark.parametrize("asked", [("--seeds", "3:4", "--jobs", "1"), ("--replay", "3")], ids=["swarm", "replay"])
@pytest.mark.parametrize("form", ["json", "table"])
def test_a_failing_seed_is_named_and_printed_as_a_test_whatever_the_form(monkeypatch, asked, form):
    small = SmallCase(3, "not_in_service", Faults(connection_lost=0.02), (1, 4), (), "why it fails")
    monkeypatch.setattr("sim.cli.minimise", lambda seed, kit, without: small)
    monkeypatch.setattr("sim.audit.settle", lambda world: world.laws.broken("not_in_service", "request 1"))
    result = CliRunner().invoke(sim_command, [*asked, "-o", form])
    assert result.exit_code == 1
    told = result.stderr if form == "json" else result.stdout
    assert "seed 3: " in told
    assert small.as_test() in told
    if form == "json":
        assert json.loads(result.stdout)["violations"] == 1


def test_the_table_tells_how_often_each_state_met_each_event():
    report = play(range(3), (), tuple(LAWS))
    code, out = invoke("--seeds", "0:3", "--jobs", "1")
    assert code == 0
    lines = dict(line.split(": ", 1) for line in out.splitlines() if ": " in line)
    told = {f"{state} x {cell}" for state, cells in lines.items() for cell in cells.split(", ")}
    told |= {f"lease ends {cell}" for cell in lines["lease ends"].split(", ")}
    assert not [cell for cell in named_cells() if f"{cell} {report.met[cell]}" not in told]
    assert report.met["request joined x token"] > 20


def test_bad_seeds_are_refused():
    assert invoke("--seeds", "5:5")[0] == 2
    assert invoke("--seeds", "x:5")[0] == 2


def test_the_document_names_every_law_fault_and_check():
    text = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
    names = [*LAWS, *site_names(), *check_names()]
    assert not [name for name in names if f"`{name}`" not in text]
