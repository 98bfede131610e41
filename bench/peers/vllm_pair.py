"""vLLM's split serving on this host: one prefill and one decode server with NixlConnector (pull), as processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import DeadlineExceeded, Unavailable

BLOCK_TOKENS = 32
PREFILL_BLOCKS = 48
LEASE_S = 6
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 25.0
REQUEST_TIMEOUT_S = 100.0
Params = dict[str, Any]  # vLLM's kv_transfer_params, whose fields are its own affair


@dataclass(frozen=True)
class HttpReply:
    """`status` 0: no answer in time, or the connection broke."""

    status: int
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        choices = self.body.get("choices")
        return choices[0]["text"] if isinstance(choices, list) and choices else None


class Server:
    """One vLLM process in a session of its own, so that its children end with it."""

    def __init__(self, python: Path, model: Path, role: str, port: int, logs: Path) -> None:
        self.role = role
        self.port = port
        self._python = python
        self._model = model
        self._logs = logs
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._logs / f"{self.role}-{self._starts}.log"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        self._starts += 1
        cores = sorted(os.sched_getaffinity(0))
        core = cores[0] if self.role == "prefill" else cores[-1]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port + 1000),
            "UCX_TLS": "tcp,self",
        }
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                self._command(), env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _command(self) -> list[str]:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        arguments = [
            str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model),
            "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--max-model-len", "1024", "--enforce-eager", "--block-size", str(BLOCK_TOKENS),
            "--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(transfer),
        ]  # fmt: skip
        # A small prefill pool is recycled by a few requests.
        return arguments + (["--num-gpu-blocks-override", str(PREFILL_BLOCKS)] if self.role == "prefill" else [])

    def wait_ready(self) -> None:
        """Raises Unavailable (it ended) or DeadlineExceeded."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._get("/health", 2.0).status != 200:
            if not self.alive:
                raise Unavailable("vllm_ended", f"vLLM's {self.role} server ended; see {self.log}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded("vllm_slow", f"vLLM's {self.role} server is not ready; see {self.log}")
            time.sleep(0.5)

    def healthy(self) -> bool:
        return self.alive and self._get("/health", 5.0).status == 200

    def send(self, number: int) -> None:
        """To the whole session, which is this server's alone."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def stop(self, number: int = signal.SIGINT) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for each in (number, signal.SIGKILL):
            try:
                os.killpg(process.pid, each)
                process.wait(STOP_TIMEOUT_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def complete(self, tokens: list[int], max_tokens: int, params: Params | None = None,
                 timeout_s: float = REQUEST_TIMEOUT_S) -> HttpReply:  # fmt: skip
        """One greedy completion."""
        body: Params = {"model": "m", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"content-type": "application/json", "x-request-id": uuid.uuid4().hex}
        return self._call("POST", "/v1/completions", json.dumps(body), headers, timeout_s)

    def _get(self, path: str, timeout_s: float) -> HttpReply:
        return self._call("GET", path, None, {}, timeout_s)

    def _call(self, method: str, path: str, body: str | None, headers: dict[str, str], timeout_s: float) -> HttpReply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException):
            return HttpReply(0)
        finally:
            connection.close()
        try:
            parsed = json.loads(raw)
        except ValueError:
            parsed = {}
        return HttpReply(response.status, parsed if isinstance(parsed, dict) else {})


class Pair:
    """A prefill and a decode server. `restart` heals whatever a case left behind."""

    def __init__(self, python: Path, model: Path, logs: Path, port: int) -> None:
        self.prefill = Server(python, model, "prefill", port, logs)
        self.decode = Server(python, model, "decode", port + 1, logs)

    def start(self) -> None:
        for server in (self.prefill, self.decode):
            server.start()
        for server in (self.prefill, self.decode):
            server.wait_ready()

    def heal(self) -> None:
        """Starts again whichever server is not healthy."""
        for server in (self.prefill, self.decode):
            if not server.healthy():
                server.stop(signal.SIGKILL)
                server.start()
                server.wait_ready()

    def stop(self) -> None:
        for server in (self.prefill, self.decode):
            server.send(signal.SIGCONT)
            server.stop()

    # --- the two legs, as a router drives them --------------------------------------------------------------------

    def hand_over(self, tokens: list[int]) -> Params:
        """Prefill's leg: its reference for decode. Raises Unavailable."""
        reply = self.prefill.complete(tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        params = reply.body.get("kv_transfer_params")
        if reply.status != 200 or not isinstance(params, dict):
            raise Unavailable("no_reference", f"vLLM's prefill server answered {reply.status} without a reference")
        return params


def block_ids(params: Params) -> list[list[int]]:
    """The reference's block ids, by group."""
    ids = params["remote_block_ids"]
    return [list(group) for group in ids] if ids and isinstance(ids[0], list) else [list(ids)]


def with_blocks(params: Params, groups: list[list[int]]) -> Params:
    """The same reference with other block ids, nested as it was."""
    ids = params["remote_block_ids"]
    nested = bool(ids) and isinstance(ids[0], list)
    return {**params, "remote_block_ids": groups if nested else groups[0]}
