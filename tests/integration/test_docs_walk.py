"""The documents, top to bottom, at a running cluster of scripted workers: blocks under `<!-- run at a cluster -->`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_cli import fake_cluster
from tests.support.documents import DOCUMENTS, LIMIT_S, Block, blocks, name_of, run

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
