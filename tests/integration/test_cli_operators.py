"""The operators' command line against a cluster of scripted workers in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from cluster.cli.main import COMMANDS, CONFLICT, FAILED, OK, REFUSED, TIMED_OUT, UNREACHABLE, USAGE, run
from cluster.cli.main import cli as main
from cluster.cli.operate import leave, leaving
from genlock.v1 import operator_pb2
from kvstore.errors import DeadlineExceeded
from tests.integration.test_cli import fake_cluster
from tests.integration.test_cli_forms import leaves

ROOT = Path(__file__).parents[2]
NOWHERE = "127.0.0.1:1"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with fake_cluster("here") as (_process, endpoint):
        yield endpoint


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GENLOCK_"):
            monkeypatch.delenv(name)


@pytest.fixture
def cli(endpoint: str, capsys) -> Cli:
    """Runs a command at the cluster: exit code, stdout, stderr. The fleet is 1 + 1 and settled before and after."""

    def one(*args: str) -> tuple[int, str, str]:
        code = run([*args, "--endpoint", endpoint])
        out, err = capsys.readouterr()
        return code, out, err

    yield one
    one("autoscale", "off")
    code, _out, err = one("scale", "prefill=1", "decode=1", "--wait", "--wait-timeout", "30")
    assert code == OK, err


def workers(cli: Cli) -> dict[str, dict]:
    code, out, err = cli("get", "workers", "-o", "json")
    assert code == OK, err
    return {worker["worker_id"]: worker for worker in json.loads(out)["workers"]}


def test_scale_waits_and_tells(cli: Cli):
    code, out, err = cli("scale", "decode=3", "--wait", "--reason", "a launch", "--wait-timeout", "30")
    assert code == OK, err
    assert "2 decode more" in err
    assert "settled" in out
    assert sum(worker["role"] == "decode" for worker in workers(cli).values()) == 3
    code, out, err = cli("scale", "decode=1", "--dry-run")
    assert code == OK
    assert "Would change: " in err
    assert sum(worker["role"] == "decode" for worker in workers(cli).values()) == 3
    code, out, _err = cli("events", "--since", "10m", "-o", "json")
    scales = [event for event in json.loads(out)["events"] if event["kind"] == "scale"]
    assert any(event["reason"] == "a launch" and event["actor"] == "default" for event in scales)


def test_scale_refuses_what_it_should(cli: Cli):
    assert cli("scale", "decode=2", "--current", "decode=5")[0] == CONFLICT
    assert cli("scale", "decode=2", "--expected-revision", "1")[0] == CONFLICT
    assert cli("scale", "decode=0")[0] == REFUSED
    assert cli("scale", "decode=many")[0] == USAGE
    assert cli("scale", "decode=1", "decode=2")[0] == USAGE
    assert cli("scale", "decode=100000")[0] == USAGE
    assert len(workers(cli)) == 2


def test_a_key_twice_is_one_change(cli: Cli):
    first = cli("scale", "decode=2", "--idempotency-key", "deploy-7", "-o", "json")
    second = cli("scale", "decode=2", "--idempotency-key", "deploy-7", "-o", "json")
    assert json.loads(second[1])["fleet"]["revision"] == json.loads(first[1])["fleet"]["revision"]
    assert "Repeated" in second[2]
    code, out, err = cli("drain", "decode-1", "--idempotency-key", "deploy-7")
    assert (code, out) == (CONFLICT, "")
    assert "was used for Scale" in err
    assert "decode-1" in workers(cli)


def test_a_wait_that_is_too_short_times_out_and_goes_on(cli: Cli):
    code, _out, err = cli("scale", "decode=2", "--wait", "--wait-timeout", "0.1")
    assert code in (OK, TIMED_OUT)
    if code == TIMED_OUT:
        assert "it goes on" in err
    assert cli("scale", "decode=2", "--wait", "--wait-timeout", "30")[0] == OK


def test_cordon_drain_restart(cli: Cli):
    assert cli("scale", "decode=2", "--wait", "--wait-timeout", "30")[0] == OK
    code, _out, _err = cli("cordon", "decode-0", "--reason", "noise")
    assert code == OK
    assert workers(cli)["decode-0"]["cordoned"]
    assert cli("uncordon", "decode-0")[0] == OK
    assert not workers(cli)["decode-0"]["cordoned"]
    assert cli("restart", "decode-0", "--deadline", "1", "--wait", "--wait-timeout", "30")[0] == OK
    assert workers(cli)["decode-0"]["phase"] == "READY"
    code, _out, err = cli("drain", "decode-1", "--deadline", "1", "--wait", "--wait-timeout", "30")
    assert code == OK, err
    assert set(workers(cli)) == {"prefill-0", "decode-0"}
    code, _out, err = cli("drain", "decode-0")
    assert code == REFUSED
    assert "last" in err
    code, _out, err = cli("drain", "decode-9")
    assert code == FAILED
    assert "decode-0" in err, "tells what there is"
    assert cli("describe", "decode-0")[0] == OK


def test_cordon_of_a_node(cli: Cli):
    [node] = {worker["node"] for worker in workers(cli).values()}
    assert cli("cordon", node, "--reason", "noise")[0] == OK
    assert all(worker["cordoned"] for worker in workers(cli).values())
    code, out, _err = cli("get", "nodes")
    assert (code, "cordoned" in out) == (OK, True)
    assert cli("uncordon", node)[0] == OK
    assert not any(worker["cordoned"] for worker in workers(cli).values())


def test_drain_of_a_node_waits_until_its_workers_have_left(cli: Cli):
    """Not for what follows them: that may need a node which comes only when this one has gone."""
    before = workers(cli)
    [node] = {worker["node"] for worker in before.values()}
    code, _out, err = cli("drain", node, "--replace", "--force", "--deadline", "1", "--wait", "--wait-timeout", "30")
    assert code == OK, err
    after = workers(cli)
    assert all(after[name].get("incarnation") != worker["incarnation"] for name, worker in before.items())
    assert cli("scale", "decode=1", "--wait", "--wait-timeout", "30")[0] == OK


async def test_what_replaces_the_workers_of_a_node_is_not_waited_for():
    row = operator_pb2.FleetWorker
    draining = [row(worker_id="decode-0", incarnation=7, phase="DRAINING"), row(worker_id="decode-1", incarnation=8)]
    homeless = [row(worker_id="decode-0", phase="STARTING"), row(worker_id="decode-1", incarnation=8, phase="STOPPED")]
    views = [operator_pb2.FleetView(workers=rows) for rows in (draining, homeless)]

    class Scripted:
        async def operate(self, name: str, _request: object) -> operator_pb2.FleetView:
            assert name == "GetFleet"
            return views[0] if len(views) == 1 else views.pop(0)

    told = operator_pb2.FleetView(workers=draining)
    assert await leave(Scripted(), 30.0, told, draining) == views[-1]  # type: ignore[arg-type]
    views[:] = [operator_pb2.FleetView(workers=draining)]
    with pytest.raises(DeadlineExceeded) as caught:
        await leave(Scripted(), 0.0, told, draining)  # type: ignore[arg-type]
    assert "decode-0, decode-1" in caught.value.message


def test_apply_and_diff(cli: Cli, tmp_path: Path):
    path = tmp_path / "fleet.yaml"
    path.write_text("decode: 2\nautoscale: {decode: {low: 2, high: 3}}\n")
    code, out, _err = cli("diff", "-f", str(path), "-o", "json")
    assert code == FAILED
    assert [change["field"] for change in json.loads(out)["changes"]] == ["decode", "autoscale"]
    assert len(workers(cli)) == 2
    assert cli("apply", "-f", str(path), "--wait", "--wait-timeout", "30")[0] == OK
    code, out, _err = cli("diff", "-f", str(path))
    assert code == OK
    path.write_text("decode: {}\n")
    code, _out, err = cli("apply", "-f", str(path))
    assert code == USAGE
    assert "decode" in err
    assert cli("apply", "-f", str(tmp_path / "none"))[0] == USAGE


def test_autoscale_by_fields(cli: Cli):
    code, out, err = cli("autoscale", "set", "decode.low=1", "decode.high=4", "slo.ttft_ms=900", "-o", "yaml")
    assert code == OK, err
    assert yaml.safe_load(yaml.safe_load(out)["policy"])["slo"]["ttft_ms"] == 900
    code, out, _err = cli("autoscale", "set", "slo.ttft_ms=800", "-o", "json")
    assert json.loads(out)["changes"] == [{"field": "autoscale.slo.ttft_ms", "before": "900.0", "after": "800.0"}]
    assert "on" in cli("autoscale", "show")[1]
    assert "paused" in cli("autoscale", "pause")[1]
    assert cli("autoscale", "resume")[0] == OK
    assert cli("autoscale", "explain")[0] == OK
    assert cli("autoscale", "set", "slo.ttft=1")[0] == USAGE
    assert cli("autoscale", "set")[0] == USAGE
    assert "off" in cli("autoscale", "off")[1]


@pytest.mark.parametrize("kind", ["workers", "pools", "requests", "leases", "nodes"])
@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
def test_every_list_has_every_form(cli: Cli, kind: str, output: str):
    code, out, err = cli("get", kind, "-o", output)
    assert code == OK, err
    if output == "json":
        assert isinstance(json.loads(out), dict)
    elif output == "yaml":
        assert isinstance(yaml.safe_load(out), dict)
    else:
        assert out.strip()


def test_nodes_hold_the_workers(cli: Cli):
    nodes = json.loads(cli("get", "nodes", "-o", "json")[1])["nodes"]
    placed = [worker for node in nodes for worker in node["workers"]]
    assert sorted(placed) == ["decode-0", "prefill-0"]
    table = cli("get", "nodes")[1]
    assert all(name in table for name in ("cpus", nodes[0]["node"], "decode-0"))


def test_requests_are_described_by_label_and_id(cli: Cli, endpoint: str, capsys):
    assert run(["generate", "hello", "--raw", "--endpoint", endpoint, "-o", "json"]) == OK
    server_id = json.loads(capsys.readouterr().out)["server_id"]
    code, out, _err = cli("describe", server_id, "-o", "json")
    assert code == OK
    assert json.loads(out)["outcome"] == "ok"
    assert "hello" not in out, "never a prompt or an answer"
    assert cli("describe", server_id)[0] == OK
    code, _out, err = cli("describe", "nobody")
    assert code == FAILED
    assert "prefill-0" in err


def test_top_draws_one_picture(cli: Cli):
    code, out, err = cli("top", "--iterations", "1")
    assert code == OK, err
    assert "decode-0" in out
    assert "tokens/s" in out


def test_status_in_all_forms(cli: Cli):
    assert yaml.safe_load(cli("status", "-o", "yaml")[1])["workers"]
    assert "decode-0" in cli("status")[1]


@pytest.mark.parametrize(
    "args",
    [
        ["status", "--watch", "-o", "json"],
        ["events", "--watch", "-o", "json"],
    ],
)
def test_watching_goes_on_until_it_is_interrupted(endpoint: str, args: list[str]):
    command = [sys.executable, "-m", "cluster.cli.main", *args, "--endpoint", endpoint]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = [json.loads(process.stdout.readline()) for _ in range(2)]
            assert lines[0]
            assert process.poll() is None
        finally:
            process.send_signal(2)
            process.wait(20)


@pytest.mark.parametrize("args", [["get", "workers"], ["scale", "decode=2"], ["drain", "x"], ["top"], ["events"]])
def test_nobody_there(args: list[str], capsys):
    began = time.monotonic()
    assert run([*args, "--endpoint", NOWHERE, "--timeout", "1"]) == UNREACHABLE
    assert "genlock up" in capsys.readouterr().err
    assert time.monotonic() - began < 30


def test_explain_needs_no_cluster(capsys):
    assert run(["explain", "digest_mismatch"]) == OK
    assert "DATA_LOSS" in capsys.readouterr().out
    assert run(["explain", "-o", "json"]) == OK
    assert len(json.loads(capsys.readouterr().out)) > 80
    assert run(["explain", "nothing_like_it"]) == FAILED


def test_doctor_tells_what_is_wrong(capsys):
    assert run(["doctor", "-o", "json"]) in (OK, FAILED)
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["registry"]["result"] == "ok"
    code = run(["doctor", "-o", "json", "--set", "registry.url=redis://127.0.0.1:1/0", "--set", "api.host=0.0.0.0",
                "--set", "control.ray_address=127.0.0.1:1"])  # fmt: skip
    assert code == FAILED
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert findings["registry"]["result"] == "failed"
    assert findings["ray cluster"]["result"] == "failed"
    assert findings["front door"]["result"] == "warning"
    assert all(one["fix"] for one in findings.values() if one["result"] in ("failed", "warning"))


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_examples(name: str, capsys):
    assert run([name, "--help"]) == OK
    out = capsys.readouterr().out
    assert "Examples:" in out
    assert f"genlock {name}" in out


WAITING = {
    "scale": ("decode=2",),
    "apply": ("-f", "FILE"),
    "drain": ("decode-0", "--replace"),
    "drain a node": ("NODE", "--replace", "--force", "--deadline", "1"),
    "restart": ("decode-0",),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_repeated_change_that_is_waited_for_says_that_it_is_one(cli: Cli, name: str, tmp_path: Path):
    file = tmp_path / "fleet.yaml"
    file.write_text("decode: 2\n")
    assert cli("scale", "decode=2", "--wait", "--wait-timeout", "30")[0] == OK
    [node] = {worker["node"] for worker in workers(cli).values()}
    args = [{"FILE": str(file), "NODE": node}.get(arg, arg) for arg in WAITING[name]]
    change = (name.split()[0], *args, "--idempotency-key", f"again {name}", "-o", "json")
    waited = (*change, "--wait", "--wait-timeout", "30")
    repeated = []
    for asked in (waited, change, waited):
        code, out, err = cli(*asked)
        assert code == OK, err
        told = json.loads(out)
        repeated.append(told.get("fleet", told)["repeated"])
    assert repeated == [False, True, True]


def test_every_command_that_waits_is_asked_for_a_repeated_change():
    waiting = {name for name, command in leaves(main) if any(option.name == "wait" for option in command.params)}
    assert waiting == {name.split()[0] for name in WAITING}


def test_of_a_repeated_drain_only_those_are_waited_for_that_still_leave():
    """A later life under the name serves, and would be waited for in vain."""
    rows = [
        operator_pb2.FleetWorker(worker_id=name, phase=phase)
        for name, phase in (("decode-0", "READY"), ("decode-1", "DRAINING"), ("decode-2", "STARTING"))
    ]
    assert leaving(operator_pb2.FleetView(workers=rows), rows) == rows
    assert leaving(operator_pb2.FleetView(workers=rows, repeated=True), rows) == [rows[1]]
