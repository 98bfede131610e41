"""`genlock manifest`: rendering, refusals, and what happens where Helm's SDK or the chart is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from cluster.cli.main import FAILED, OK, USAGE, run
from cluster.config import load
from cluster.manifests import chart
from kvstore.errors import InvalidInput, NotFound
from tests.support.manifests import SHIPPED, need, one


@pytest.fixture
def values(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("gateway: {replicas: 3}\nsettings: {cache: {decode_pages: 4096}}\n")
    return path


def test_render_prints_yaml_that_check_takes(values: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("helm_python")
    command = ["manifest", "render", "--values", "laptop", "--values", str(values), "--set", "prefill.replicas=2"]
    assert run([*command, "--name", "blue", "--namespace", "llm", "-o", "yaml"]) == OK
    out = capsys.readouterr().out
    documents = list(yaml.safe_load_all(out))
    assert one(documents, "Deployment", "blue-genlock-gateway")["spec"]["replicas"] == 3
    config = yaml.safe_load(one(documents, "ConfigMap")["data"]["genlock.yaml"])
    assert config["cache"] == {"decode_pages": 4096, "kv_format": "int8", "page_tokens": 32, "prefill_pages": 256}
    assert config["workers"]["prefill"] == 2
    assert one(documents, "RoleBinding")["subjects"][0]["namespace"] == "llm"
    file = tmp_path / "rendered.yaml"
    file.write_text(out)
    assert run(["manifest", "check", str(file)]) == OK
    assert run(["manifest", "check", str(file), "-o", "json"]) == OK
    assert json.loads(capsys.readouterr().out) == []


def test_render_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    need("helm_python")
    assert run(["manifest", "render", "-o", "json"]) == OK
    listed = json.loads(capsys.readouterr().out)
    assert listed["kind"] == "List"
    assert one(listed["items"], "RayCluster")["metadata"]["name"] == "genlock"


def test_what_breaks_a_rule_is_not_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    need("helm_python")
    shm = ["manifest", "render", "--set", "settings.transfer.engine=shm"]
    assert run(shm) == FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "transfer.engine is shm" in captured.err
    assert run([*shm, "--no-check"]) == OK
    assert "RayCluster" in capsys.readouterr().out


def test_check_tells_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("kind: RayCluster\nmetadata: {name: x}\nspec: {authOptions: {mode: disabled}}\n")
    assert run(["manifest", "check", str(file), "-o", "json"]) == FAILED
    found = json.loads(capsys.readouterr().out)
    assert "ray-auth" in {entry["rule"] for entry in found}
    assert all(set(entry) == {"rule", "where", "message"} for entry in found)
    assert run(["manifest", "check", str(file)]) == FAILED
    assert "ray-auth" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no manifest"),
        ("a: [", "bad_manifest"),
        ("- 1\n", "no kind"),
        ("a: 2024-02-30", "bad_manifest"),
        ("just text", "no kind"),
    ],
)
def test_check_refuses(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert run(["manifest", "check", str(file)]) == USAGE
    assert says in capsys.readouterr().err
    assert run(["manifest", "check", str(tmp_path / "none.yaml")]) == USAGE
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--set", "gateway.replicas"], "must read NAME.NAME=VALUE"),
        (["--set", "gateway..replicas=1"], "must read NAME.NAME=VALUE"),
        (["--set", "gateway.replicas=[1"], "no YAML"),
        (["--set", "gateway.replicas=many"], "/gateway/replicas"),
        (["--name", "Genlock"], "--name 'Genlock' must be"),
        (["--name", "g" * 41], "--name"),
        (["--namespace", "1"], "--namespace"),
    ],
)
def test_render_refuses(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if says.startswith("/"):
        need("helm_python")
    assert run(["manifest", "render", *arguments]) == USAGE
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_values_that_are_no_values(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"laptop.*no file|no file.*laptop"):
        chart.values_path("desktop")
    with pytest.raises(NotFound):
        chart.values_path("../values/laptop")
    for text, says in (("- 1", "must hold sections"), ("a: [", "is no YAML")):
        path = tmp_path / "values.yaml"
        path.write_text(text)
        with pytest.raises(InvalidInput, match=says):
            chart.read_values(path)
    (tmp_path / "empty.yaml").write_text("")
    assert chart.read_values(tmp_path / "empty.yaml") == {}


def test_without_the_sdk_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "helm_python", None)
    assert run(["manifest", "render", "--values", "laptop"]) == FAILED
    assert "pip install 'helm-python-sdk==0.2.2'" in capsys.readouterr().err


def test_without_the_chart_a_clear_word(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="install Genlock from its wheel"):
        chart.chart_path(tmp_path)
    assert chart.known_values(tmp_path) == ()


def test_the_shipped_files_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["manifest", "values"]) == OK
    names = capsys.readouterr().out.split()
    assert names == ["h100-8-nodes", "h100-node", "laptop"] == list(SHIPPED[1:])
    assert run(["manifest", "values", "laptop"]) == OK
    assert yaml.safe_load(capsys.readouterr().out)["gateway"]["replicas"] == 1
    assert run(["manifest", "chart"]) == OK
    assert (Path(capsys.readouterr().out.strip()) / "Chart.yaml").is_file()


def test_layers_do_not_share_what_an_anchor_made_one(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("prefill: &group {cpu: '1'}\ndecode: *group\n")
    merged = chart.merged([chart.read_values(path), chart.assignment("prefill.cpu='2'")])
    assert merged == {"prefill": {"cpu": "2"}, "decode": {"cpu": "1"}}


def test_small_numbers_stay_plain_in_the_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    need("helm_python")
    assert run(["manifest", "render", "--set", "settings.tracing.sample_ratio=0.00001"]) == OK
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    text = one(documents, "ConfigMap")["data"]["genlock.yaml"]
    assert load(file_text=text).config.tracing.sample_ratio == 0.00001
