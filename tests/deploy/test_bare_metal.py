"""Without Kubernetes: the example for `ray up`, and the script that starts Ray on a machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.roles import Role
from tests.support.manifests import group, manifests, need, ray_flags, schema_errors

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "bare-metal"
NODE = FOLDER / "node.sh"


def ray_schema() -> dict[str, object]:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def test_ray_takes_the_cluster_file() -> None:
    need("jsonschema")
    cluster = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
    assert schema_errors(ray_schema(), cluster) == []
    assert cluster["max_workers"] == len(cluster["provider"]["worker_ips"])
    cluster["worker_start_commands"] = []
    assert schema_errors(ray_schema(), cluster)


@pytest.fixture
def fake_ray(tmp_path: Path) -> Path:
    """Prints what it was called with, one argument a line."""
    path = tmp_path / "ray"
    path.write_text('#!/bin/sh\n[ "$1" = stop ] || printf "%s\\n" "$@"\n')
    path.chmod(0o755)
    (tmp_path / "token").write_text("t")
    return path


def node(fake: Path, *arguments: str, token: str = "token") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "RAY": str(fake), "RAY_AUTH_TOKEN_PATH": str(fake.parent / token)}
    command = ["bash", str(NODE), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=False)


def test_a_worker_offers_its_role(fake_ray: Path) -> None:
    for role in Role:
        done = node(fake_ray, role.value, "10.0.0.10")
        assert done.returncode == 0
        words = done.stdout.splitlines()
        assert words[:2] == ["start", "--address=10.0.0.10:6379"]
        assert f'--resources={{"{role.value}": 1}}' in words
        assert f"--labels=genlock-role={role.value}" in words


def test_the_head_has_no_room_for_workers(fake_ray: Path) -> None:
    words = node(fake_ray, "head").stdout.splitlines()
    assert words[:2] == ["start", "--head"]
    assert "--num-cpus=0" in words


@pytest.mark.parametrize("arguments", [(), ("worker",), ("prefill",), ("head", "10.0.0.10")])
def test_wrong_calls_start_nothing(arguments: tuple[str, ...], fake_ray: Path) -> None:
    done = node(fake_ray, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error:" in done.stderr


def test_without_a_token_nothing_starts(fake_ray: Path) -> None:
    done = node(fake_ray, "head", token="none")
    assert done.returncode == 2
    assert "ray-token" not in done.stdout
    assert "cannot be read" in done.stderr


def test_ports_are_those_of_the_chart(fake_ray: Path) -> None:
    words = node(fake_ray, "decode", "10.0.0.10").stdout.splitlines()
    chart = group(manifests(), "decode")["rayStartParams"]
    for flag, value in chart.items():
        if flag.endswith("-port"):
            assert f"--{flag}={value}" in words


def test_ray_knows_the_flags(fake_ray: Path) -> None:
    known = ray_flags()
    for arguments in (("head",), ("decode", "10.0.0.10")):
        words = node(fake_ray, *arguments).stdout.splitlines()[1:]
        assert {word.split("=")[0] for word in words} <= known
