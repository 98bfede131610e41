"""Every command that lists or shows something takes -o table, wide, json and yaml, and both data forms say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from cluster.cli.main import FAILED, OK, cli, run
from cluster.output import FORMATS
from tests.integration.test_cli import fake_cluster
from tests.support.valkey import Valkey

ROOT = Path(__file__).parents[2]

# Commands that show nothing of that kind, and what they print instead.
OTHERS = {
    "up": "a process that serves", "controller": "a process that serves", "gateway": "a process that serves",
    "demo": "an answer, told as it comes", "generate": "an answer: text or JSON", "chat": "a talk",
    "top": "a live picture", "completion": "a script", "certs": "files", "keys create": "a key, alone on stdout",
    "keys revoke": "nothing", "keys digest": "a digest, alone on stdout", "manifest values": "a file as it is",
    "manifest chart": "a path, for $(...)",
}  # fmt: skip


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command, info_name=path[-1] if path else "genlock")
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None, name
        yield from leaves(found, (*path, name))


COMMANDS = dict(leaves(cli))
# A measurement prints a table or one JSON object that is kept; it is no list of what is there.
SHOWING = [name for name in COMMANDS if name not in OTHERS and not name.startswith("bench ")]


@pytest.mark.parametrize("name", SHOWING)
def test_a_command_that_shows_something_has_all_forms(name: str) -> None:
    forms = [option for option in COMMANDS[name].params if "--output" in option.opts]
    assert forms, f"genlock {name}: give it @output_option, or say in OTHERS what it prints instead"
    (option,) = forms
    assert "-o" in option.opts
    assert isinstance(option.type, click.Choice)
    assert tuple(option.type.choices) == FORMATS


def test_the_others_are_commands() -> None:
    assert set(OTHERS) <= set(COMMANDS)
    assert len(SHOWING) > 20


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GENLOCK_"):
            monkeypatch.delenv(name)


TRACE = (
    '{"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 20}\n{"at_s": 400, "prompt_tokens": 9, "output_tokens": 2}\n'
)
ALONE = [
    ["explain"], ["explain", "digest_mismatch"], ["doctor"], ["manifest", "render", "--values", "laptop"],
    ["manifest", "check", "broken.yaml"], ["autoscale", "simulate", "--trace", "trace.jsonl"],
    ["chaos", "--plan", "--seed", "3"], ["config"], ["sim", "--list-checks"],
]  # fmt: skip
# YAML in a form of its own: documents for kubectl, and a file that --config takes.
OWN_YAML = ("manifest render", "config")


def in_all_forms(args: list[str], capsys: pytest.CaptureFixture[str], *codes: int) -> dict[str, str]:
    shown = {}
    for form in FORMATS:
        assert run([*args, "-o", form]) in (codes or (OK,)), capsys.readouterr().err
        shown[form] = capsys.readouterr().out
        assert shown[form].strip()
    return shown


@pytest.mark.parametrize("args", ALONE, ids=" ".join)
def test_forms_without_a_cluster(args: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(TRACE)
    Path("broken.yaml").write_text("{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {containers: [{name: c}]}}")
    shown = in_all_forms(args, capsys, OK, FAILED)
    data = json.loads(shown["json"])
    if " ".join(args[:2]) not in OWN_YAML and args[0] not in OWN_YAML:
        if args != ["doctor"]:  # free memory is another a moment later
            assert yaml.safe_load(shown["yaml"]) == data
        assert len(data) == len(yaml.safe_load(shown["yaml"]))
    for form in ("table", "wide"):
        with pytest.raises(ValueError):
            json.loads(shown[form])


def test_wide_has_what_the_table_leaves_out(capsys) -> None:
    shown = in_all_forms(["explain"], capsys)
    assert "what to do" in shown["wide"]
    assert "what to do" not in shown["table"]
    shown = in_all_forms(["manifest", "render"], capsys)
    assert "ray.io/v1" in shown["wide"]
    assert "ray.io/v1" not in shown["table"]
    assert {one["kind"] for one in json.loads(shown["json"])["items"]} >= {"RayCluster", "Deployment"}


def test_keys_in_all_forms(valkey: Valkey, capsys) -> None:
    there = ["--set", f"registry.url={valkey.url}"]
    assert run(["keys", "create", "acme", "--max-requests", "32", "--max-priority", "low", *there]) == OK
    capsys.readouterr()
    shown = in_all_forms(["keys", "list", *there], capsys)
    (record,) = json.loads(shown["json"])
    assert (record["tenant"], record["max_requests"], record["max_priority"]) == ("acme", 32, "low")
    assert yaml.safe_load(shown["yaml"]) == [record]
    assert "32" in shown["wide"].splitlines()[1].split()
    assert "32" not in shown["table"].splitlines()[1].split()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with fake_cluster("here") as (_process, endpoint):
        yield endpoint


@pytest.mark.parametrize("args", [["status"], ["events"], ["describe", "decode-0"], ["autoscale", "show"],
                                  ["scale", "decode=1", "--dry-run"]], ids=" ".join)  # fmt: skip
def test_forms_at_a_cluster(args: list[str], endpoint: str, capsys) -> None:
    shown = in_all_forms([*args, "--endpoint", endpoint], capsys)
    data, again = json.loads(shown["json"]), yaml.safe_load(shown["yaml"])
    assert data.keys() == again.keys()
    if args == ["status"]:
        assert "incarnation" in shown["wide"]
        assert "incarnation" not in shown["table"]


@pytest.mark.parametrize("args", [["status", "--watch"], ["events", "--watch"]], ids=" ".join)
def test_what_is_watched_as_yaml_is_documents(endpoint: str, args: list[str]) -> None:
    command = [sys.executable, "-m", "cluster.cli.main", *args, "-o", "yaml", "--endpoint", endpoint]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines, begun = [], 0
            while begun < 3:
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read() if process.stderr else ""
                begun += lines[-1] == "---\n"
        finally:
            process.send_signal(2)
            process.wait(20)
    first, second = [one for one in yaml.safe_load_all("".join(lines)) if one is not None]
    assert lines[0] == "---\n"
    assert first.keys() == second.keys()
