"""The documents, top to bottom, at a running cluster of scripted workers: blocks under `<!-- run at a cluster -->`; and
those under `<!-- run at a registry -->` at a Redis registry, which cluster.yaml names and where a key is kept."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import load
from cluster.gateway.credentials import key_record
from cluster.registry.make import registry_from
from tests.integration.test_cli import fake_cluster
from tests.support.documents import DOCUMENTS, LIMIT_S, Block, all_blocks, blocks, name_of, run
from tests.support.valkey import Valkey

GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8000"


def walk(document: Path) -> list[Block]:
    return [block for block in blocks(document.read_text(), name_of(document)) if block.at_cluster]


WALKED = [document for document in DOCUMENTS if walk(document)]


@pytest.fixture(scope="module")
def ends() -> Iterator[dict[str, str]]:
    """The doors of one cluster for all documents, by the addresses that the documents name."""
    with fake_cluster("here", "echo", "http") as (process, endpoint):
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        yield {GRPC: endpoint, HTTP: url.removeprefix("http://").removesuffix("/v1")}


@pytest.mark.parametrize("document", WALKED, ids=name_of)
def test_a_document_from_top_to_bottom(document: Path, ends: dict[str, str], tmp_path: Path) -> None:
    environ = {"GENLOCK_ENDPOINT": ends[GRPC], "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    for block in walk(document):
        script = block.script
        for named, real in ends.items():
            script = script.replace(named, real)
        if block.python:
            command = [sys.executable, "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            assert done.stdout, block.where
        else:
            done = run(script, tmp_path, environ)
        assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"


def test_the_walk_has_its_documents() -> None:
    assert {name_of(document) for document in WALKED} >= {"docs/quickstart.md", "docs/operations.md"}
    assert AT_REGISTRY


AT_REGISTRY = [block for block in all_blocks() if block.at == "registry"]
# The key that the documents revoke.
KEY_ID = "3f9c0a1b"


@pytest.fixture
async def registry_file(tmp_path: Path):
    """cluster.yaml of a cluster whose ports are any free ones."""
    server = Valkey(tmp_path)
    await server.start()
    path = tmp_path / "cluster.yaml"
    path.write_text(f"registry: {{url: '{server.url}'}}\napi: {{port: 0, http_port: 0}}\n")
    registry = registry_from(load(file_text=path.read_text(), file_name=str(path)).config, lambda: 0)
    await registry.open()
    record = key_record(KEY_ID, "acme", operator=False, created_ms=0)
    await registry.put_key(hashlib.sha256(b"any").hexdigest(), record)
    await registry.close()
    yield path
    server.kill()


@pytest.mark.parametrize("block", AT_REGISTRY, ids=lambda block: block.where)
async def test_commands_at_a_registry(block: Block, registry_file: Path) -> None:
    done = await asyncio.to_thread(run, block.script, registry_file.parent)
    assert done.returncode == 0, done.stdout + done.stderr
