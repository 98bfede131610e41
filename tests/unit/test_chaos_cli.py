"""`genlock chaos` and `genlock soak`: the result alone on stdout, and an exit code that follows the verdict."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from cluster.chaos import cli, soak_cli
from cluster.chaos.flat import Judged
from cluster.chaos.soak import SoakReport
from cluster.chaos.verdict import Report
from cluster.cli.main import COMMANDS
from kvstore.errors import InvalidInput

REPORT = Report(
    seed=5, minutes=1, seconds=60, engine="shm", model="probe", rounds=5, sent=10, ok=9, cancels=0,
    errors_by_cause={"prefill_gone": 1}, hung=0, wrong=0, foreign_tokens=0, untyped=0, tokens=100, kills=1,
    faults={"kill": 1}, skipped={"link_cut": "no tool"}, deaths=(), excused_deaths=0, fault_errors=(),
    pages_back=True, pages_back_ms={"p50": 1.0, "max": 2.0}, not_back=(), refused_log_lines=0, foreign_pages=0,
    link_packets=0, balloon_mib=0, loop_lag_ms=1.0, adds_up=True,
)  # fmt: skip
FLAT = Judged("Ledger._loads", 1, 1, 2, 0, True, 9)
SOAK = SoakReport(
    requests=10, seed=0, engine="shm", seconds=1, requests_per_s=10, ok=10, errors_by_cause={}, hung=0, wrong=0,
    foreign_tokens=0, restarts=0, samples=10, pages_back=True, not_back=(), series=(FLAT,),
)  # fmt: skip


def chaos(monkeypatch: pytest.MonkeyPatch, report: Report, *args: str):
    async def ran(settings):
        print("a library that writes to stdout")
        return report

    monkeypatch.setattr(cli, "_run", ran)
    return CliRunner().invoke(cli.command, [*args], standalone_mode=False)


def soak(monkeypatch: pytest.MonkeyPatch, report: SoakReport, *args: str):
    async def ran(settings):
        print("a library that writes to stdout")
        return report

    monkeypatch.setattr(soak_cli, "_run", ran)
    return CliRunner().invoke(soak_cli.command, [*args], standalone_mode=False)


def test_chaos_json_is_all_that_stdout_gets(monkeypatch):
    done = chaos(monkeypatch, REPORT, "--json")
    told = json.loads(done.stdout)
    assert {"sent", "ok", "errors_by_cause", "hung", "foreign_tokens", "kills", "pages_back"} <= set(told)
    assert told["passed"] is True
    assert done.return_value == 0


@pytest.mark.parametrize("change", [{"foreign_tokens": 2}, {"hung": 1}, {"pages_back": False}])
def test_a_run_that_failed_exits_with_1_and_says_why(monkeypatch, change):
    assert json.loads(chaos(monkeypatch, replace(REPORT, **change), "-o", "json").stdout)["passed"] is False
    done = chaos(monkeypatch, replace(REPORT, **change))
    assert done.return_value == 1
    assert "FAILED" in done.stdout


def test_the_table_names_causes_faults_and_what_was_skipped(monkeypatch):
    done = chaos(monkeypatch, REPORT)
    for text in ("prefill_gone", "fault kill", "skipped link_cut: no tool", "every page is back"):
        assert text in done.stdout


def test_the_plan_is_shown_and_the_same_for_a_seed():
    shown = [CliRunner().invoke(cli.command, ["--plan", "--seed", "4", "--json"], standalone_mode=False).stdout
             for _ in range(2)]  # fmt: skip
    assert shown[0] == shown[1]
    assert json.loads(shown[0])[0]["faults"]


def test_bad_input_names_the_field():
    done = CliRunner().invoke(cli.command, ["--minutes", "0", "--plan"], standalone_mode=False)
    assert isinstance(done.exception, InvalidInput)
    assert done.exception.field == "minutes"


def test_soak_json_is_all_that_stdout_gets_and_growth_exits_with_1(monkeypatch):
    assert json.loads(soak(monkeypatch, SOAK, "--json").stdout)["series"][0]["name"] == "Ledger._loads"
    assert soak(monkeypatch, SOAK, "--requests", "10").return_value == 0
    done = soak(monkeypatch, replace(SOAK, series=(replace(FLAT, flat=False, last=99),)))
    assert done.return_value == 1
    assert "not flat: Ledger._loads 1 -> 99" in done.stdout


def test_both_are_commands_of_genlock():
    assert {"chaos", "soak"} <= set(COMMANDS)
