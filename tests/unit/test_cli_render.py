"""How answers look where there is nothing, or little, to show."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cluster.cli import apply, render, top
from cluster.cli.main import run
from cluster.cli.options import judged_elsewhere
from cluster.operators.fleet import CLUSTER_TEXT
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import InvalidInput, NotFound

TITLE = "2 prefill + 4 decode wanted (revision 7), not settled: 0 of 4 decode workers are ready"


@pytest.mark.parametrize("rows", [[], [("a", 1)]])
def test_a_title_is_one_line_however_narrow_its_table_is(rows: list, capsys):
    Console(width=200).print(render.table(TITLE, ("x", "y"), rows))
    assert capsys.readouterr().out.splitlines()[0].rstrip() == TITLE


def answered(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    def call(*_args: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(apply, "call", call)


def test_a_diff_without_a_difference_says_so(monkeypatch, capsys, tmp_path: Path):
    (path := tmp_path / "fleet.yaml").write_text("decode: 2\n")
    answered(monkeypatch, pb.ApplyResponse())
    assert run(["diff", "-f", str(path)]) == 0
    assert capsys.readouterr().out == "No difference\n"
    assert run(["diff", "-f", str(path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == []
    answered(monkeypatch, pb.ApplyResponse(changes=[pb.Change(field="decode", before="1", after="2")]))
    assert run(["diff", "-f", str(path)]) == 1
    assert "No difference" not in capsys.readouterr().out


def test_what_a_cluster_finds_wrong_with_a_file_has_its_name_and_line(monkeypatch, capsys, tmp_path: Path):
    (path := tmp_path / "fleet.yaml").write_text("decode: 2\nprefil: 1\n")
    answered(monkeypatch, InvalidInput("bad_cluster_file", "prefil is no field; known: prefill", field="prefil"))
    assert run(["diff", "-f", str(path)]) == 2
    assert "fleet.yaml line 2: prefil is no field; known: prefill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidInput("bad_policy", "wrong", field="autoscale.slo.ttf"), "f.yaml line 3: wrong"),
        (InvalidInput("bad_cluster_file", "wrong", field="text"), "f.yaml: wrong"),
        (InvalidInput("bad_count", "wrong", field="prefill"), "wrong"),
        (NotFound("unknown_worker", "wrong"), "wrong"),
    ],
)
def test_only_what_is_wrong_with_the_text_gets_the_texts_place(error: Exception, told: str):
    with (
        pytest.raises(type(error)) as caught,
        judged_elsewhere(CLUSTER_TEXT, "autoscale:\n  slo:\n    ttf: 1\n", "f.yaml"),
    ):
        raise error
    assert caught.value.message == told


def test_a_picture_of_top_that_goes_to_a_file_ends_its_line(monkeypatch, capsys):
    look = (pb.GetStatusResponse(model="probe"), pb.FleetView(), pb.ListEventsResponse())

    class Connected:
        async def __aenter__(self) -> object:
            return SimpleNamespace()

        async def __aexit__(self, *_exc: object) -> None:
            return None

    async def looked(_client: object) -> object:
        return look

    monkeypatch.setattr("cluster.cli.client.connect", lambda *_args: Connected())
    monkeypatch.setattr(top, "_look", looked)
    assert run(["top", "--iterations", "2", "--interval", "0.1"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("probe · 0 running") == 2
