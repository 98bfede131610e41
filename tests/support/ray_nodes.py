"""A Ray cluster of real processes on this host: a head whose state is in Redis, and nodes for workers. Everything
that belongs to it carries a mark in its environment, so that a test ends its own processes and nobody else's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from cluster.launch.ray_session import RAY_ENVIRONMENT
from tests.support.valkey import free_port

MARK = "RAY_NODES_MARK"
UP_S = 90.0
ROOT = Path(__file__).parents[2]


class RayNodes:
    def __init__(self, redis_port: int) -> None:
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        # Short: the path of a Unix socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="gl-", dir="/tmp"))
        self.env = {
            **os.environ,
            # A cluster of several nodes is refused with the loopback address as Ray's own choice: it is named instead.
            **{name: value for name, value in RAY_ENVIRONMENT if name != "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"},
            MARK: self.mark,
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{redis_port}",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            # How long nodes wait for a head that is away before they end themselves, as KubeRay sets it.
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
            "PYTHONPATH": str(ROOT),
        }
        self._commands: list[subprocess.Popen[bytes]] = []

    async def start_head(self) -> None:
        """Also again, after `kill_head`, at the same address."""
        # Both nodes are on this host: Ray takes the node's traces of the former head for a head that still runs.
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        await self._start("head", "--head", f"--port={self.port}", "--num-cpus=1", "--include-dashboard=false")

    async def start_node(self, name: str = "node") -> None:
        await self._start(
            name, f"--address={self.address}", "--num-cpus=4", '--resources={"work": 10}', f"--node-name={name}"
        )

    def kill_head(self) -> None:
        """SIGKILL to everything of the head, the GCS first."""
        for pid in self.pids("head"):
            os.kill(pid, signal.SIGKILL)

    def pids(self, part: str = "", name: str = "") -> list[int]:
        """Processes of this cluster; `part`: head or a node; `name`: in the command line."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                environ, command = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
            except OSError:
                continue
            right_part = not part or f"RAY_NODES_PART={part}".encode() in environ
            if wanted in environ and right_part and name.encode() in command and int(path.name) != os.getpid():
                found.append(int(path.name))
        return found

    def command(self, *args: str) -> subprocess.Popen[bytes]:
        """`genlock ...` with this cluster's environment."""
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.main", *args], cwd=ROOT, env={**self.env, "RAY_NODES_PART": "cli"},
            stdout=subprocess.PIPE, stderr=(self.folder / "cli.log").open("ab"),
        )  # fmt: skip
        self._commands.append(process)
        return process

    def stop(self) -> None:
        for _try in range(3):
            for pid in self.pids():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for process in self._commands:
            process.wait(10)
        subprocess.run(["rm", "-rf", str(self.folder)], check=False)

    async def _start(self, part: str, *options: str) -> None:
        """Ray gives a node 30 s to start, whatever else the host does: it may try more than once."""
        for last in (False, False, True):
            log = self.folder / f"{part}.log"
            ray = str(Path(sys.executable).with_name("ray"))
            process = subprocess.Popen(
                [ray, "start", *options, "--block", "--node-ip-address=127.0.0.1",
                 f"--temp-dir={self.folder}", "--object-store-memory=80000000", "--disable-usage-stats"],
                env={**self.env, "RAY_NODES_PART": part}, stdout=log.open("wb"), stderr=subprocess.STDOUT, cwd=ROOT,
            )  # fmt: skip
            self._commands.append(process)
            async with asyncio.timeout(UP_S):
                while process.poll() is None and b"Ray runtime started" not in log.read_bytes():
                    await asyncio.sleep(0.1)
            if process.poll() is None:
                return
            said = log.read_text()[-2000:]
            assert not last, said
            assert "timed out during startup" in said, said


async def first_line(process: subprocess.Popen[bytes], limit_s: float) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(limit_s):
        return (await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)).decode().strip()
