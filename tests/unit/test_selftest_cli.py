"""`genlock selftest` prints its result on stdout and nothing else."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os

import pytest
from click.testing import CliRunner

from cluster.cli import main
from cluster.selftest import cli
from cluster.selftest.rows import ROWS
from cluster.selftest.run import RowResult
from kvstore.errors import InvalidInput


def result(**changes: object) -> RowResult:
    values: dict[str, object] = {
        "number": "4", "name": "a row", "model": "probe", "error": "ABORTED/header_mismatch", "tokens_sent": 0,
        "fail_closed": True, "neighbour_ok": True, "pages_back": True, "checks_off": ("header",), "control_wrong": True,
    }  # fmt: skip
    return RowResult(**{**values, **changes})  # type: ignore[arg-type]


def run(monkeypatch: pytest.MonkeyPatch, *results: RowResult, args: tuple[str, ...] = ()):
    async def noisy(models, rows):
        print("a library that writes to stdout")
        return list(results)

    monkeypatch.setattr(cli, "_run", noisy)
    return CliRunner().invoke(cli.command, [*args], standalone_mode=False)


def test_json_is_all_that_stdout_gets(monkeypatch):
    done = run(monkeypatch, result(), args=("-o", "json"))
    told = json.loads(done.stdout)
    assert told["ok"] is True
    assert told["rows"][0]["name"] == "a row"
    assert done.return_value == 0


@pytest.mark.parametrize("field", ["fail_closed", "neighbour_ok", "pages_back", "control_wrong"])
def test_any_row_that_is_not_as_it_must_be_fails_the_command(monkeypatch, field):
    done = run(monkeypatch, result(), result(**{field: False}), args=("-o", "json"))
    assert json.loads(done.stdout)["ok"] is False
    assert done.return_value == 1


def test_the_table_names_rows_and_verdicts(monkeypatch):
    done = run(monkeypatch, result(), result(fail_closed=False))
    assert "1 of 2 rows" in done.stdout
    assert "NOT FAIL-CLOSED" in done.stdout


def test_without_a_terminal_each_row_is_a_line_on_stderr_as_it_ends(monkeypatch, capsys):
    async def rows_as_they_come(_subjects, _rows, _on_start):
        yield result()
        assert "1 of 2: probe row 4, a row: ok" in capsys.readouterr().err
        yield result(pages_back=False, detail="a page is missing")

    monkeypatch.setattr(cli, "load_subject", lambda name: name)
    monkeypatch.setattr(cli, "run_table", rows_as_they_come)
    asyncio.run(cli._run(["probe"], ROWS[:2]))
    told = capsys.readouterr()
    assert told.err == "2 of 2: probe row 4, a row: NOT OK a page is missing\n"
    assert told.out == ""


def test_what_a_library_says_is_told_but_for_the_deaths_that_are_the_test():
    out = io.StringIO()
    filtered = cli.Unexpected(out)
    print(f"\x1b[33m(raylet)\x1b[0m {cli.KILLED} by an unexpected system error.", file=filtered)
    print("(raylet) The node runs out of disk space.", file=filtered)
    print(cli.KILLED, "says a row", file=filtered)
    assert out.getvalue().splitlines() == ["(raylet) The node runs out of disk space.", f"{cli.KILLED} says a row"]


def test_logs_are_as_before_once_it_is_over(monkeypatch):
    logger = logging.getLogger("genlock")
    before = logger.level
    run(monkeypatch, result())
    assert logger.level == before


def test_an_unknown_row_is_refused_with_the_known_ones(monkeypatch):
    done = run(monkeypatch, args=("--row", "99"))
    assert isinstance(done.exception, InvalidInput)
    assert ROWS[0].number in done.exception.message


@pytest.mark.parametrize(("given", "kept"), [(None, "ERROR"), ("debug", "debug")])
def test_grpc_tells_errors_alone_unless_it_is_asked_for_more(monkeypatch, capsys, given, kept):
    monkeypatch.setenv("GRPC_VERBOSITY", given or "")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    assert main.run(["--version"]) == 0
    assert os.environ["GRPC_VERBOSITY"] == kept
