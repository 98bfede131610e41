"""A second load generator that others wrote, as docs/openai.md runs it, against a real cluster in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from bench.peers.export import export_tokenizer
from tests.support.http_door import ProbeCluster
from tests.support.programs import program

LIMIT_S = 110
REQUESTS, TOKENS = 6, 16


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(program("aiperf") is None, reason="aiperf is not installed (pip install aiperf)")
async def test_aiperf_completes_every_request(tmp_path: Path):
    line = json.dumps({"text": "The quick brown fox", "output_length": TOKENS}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(line * REQUESTS)
    # It wants one, and with the server's counts it counts by it nothing.
    export_tokenizer(tmp_path / "tokenizer")
    async with ProbeCluster() as cluster:
        command = [
            str(program("aiperf")), "profile", "--model", "probe", "--url", cluster.cluster.url,
            "--endpoint-type", "chat", "--streaming", "--request-count", str(REQUESTS), "--concurrency", "2",
            "--input-file", "prompts.jsonl", "--custom-dataset-type", "single_turn",
            "--tokenizer", "tokenizer", "--use-server-token-count", "--extra-inputs", "ignore_eos:true",
            "--ui", "none", "--output-artifact-dir", str(tmp_path / "out"),
        ]  # fmt: skip
        # Offline it takes no folder for a tokenizer; a folder needs no network.
        environ = {
            key: value for key, value in os.environ.items() if key not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        }
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, env=environ, start_new_session=True,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_S):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, said.decode()[-2000:]
        assert set(cluster.cluster.gateway.state.outcomes) == {"ok"}
        assert cluster.cluster.gateway.state.outcomes["ok"] >= REQUESTS
        [report] = (tmp_path / "out").rglob("profile_export_aiperf.json")
        told = json.loads(report.read_text())
        assert (told["request_count"]["avg"], told["error_summary"]) == (REQUESTS, [])
        assert {told["output_sequence_length"][key] for key in ("min", "max")} == {TOKENS}
        assert await cluster.all_pages_are_back()
