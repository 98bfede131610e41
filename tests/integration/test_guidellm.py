"""A load generator that others wrote, as docs/openai.md runs it, against a real cluster in this process."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.support.http_door import ProbeCluster
from tests.support.programs import program

LIMIT_S = 90
REQUESTS, TOKENS = 6, 16


@pytest.mark.slow
@pytest.mark.skipif(program("guidellm") is None, reason="guidellm is not installed (pip install guidellm)")
async def test_guidellm_completes_every_request(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": "The quick brown fox", "output_tokens_count": TOKENS}) + "\n"
    prompts.write_text(line * REQUESTS)
    async with ProbeCluster() as cluster:
        command = [
            str(program("guidellm")), "run",
            "--backend", f"kind=openai_http,target={cluster.cluster.url},model=probe",
            "--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--data", f"kind=json_file,path={prompts}",
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, said.decode()[-2000:]
        assert cluster.cluster.gateway.state.outcomes["ok"] >= REQUESTS, said.decode()[-2000:]
        assert set(cluster.cluster.gateway.state.outcomes) == {"ok"}
        [run] = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
        assert {kind: len(run["requests"][kind]) for kind in ("successful", "errored", "incomplete")} == {
            "successful": REQUESTS,
            "errored": 0,
            "incomplete": 0,
        }
        assert {one["output_tokens"] for one in run["requests"]["successful"]} == {TOKENS}
        assert await cluster.all_pages_are_back()
