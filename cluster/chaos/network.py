"""Two hosts in one: a second network namespace behind a virtual link that can be cut and slowed, with a Ray node of its
own in it. Needs root, iproute2 and a kernel with veth pairs."""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cluster.chaos.plan import LINK_FAULTS
from cluster.launch.launcher import Launcher
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.ray_session import RAY_ENVIRONMENT
from cluster.launch.spec import WorkerBuilder, WorkerSpec
from kvstore.errors import Unavailable

ENGINES = frozenset({"nixl", "mooncake"})  # those that cross a network
FAR_INDEX = "1"  # prefill-1 and decode-1 live on the far host
COMMAND_TIMEOUT_S = 20.0
RAY_START_TIMEOUT_S = 120.0
# A queue that is too short for any packet: all are dropped without a word, as by a cable that was pulled.
CUT = ("bfifo", "limit", "1")
SLOW = ("burst", "16kb", "latency", "400ms")
NEAR, FAR, SHARE = "near", "far", 0.001  # Ray's names of the two nodes
RESOURCES = {NEAR: 1.0}
NODE_ENVIRONMENT = dict((*RAY_ENVIRONMENT, ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")))


class Network:
    """One link: the host's own namespace at the near end, a new one at the far end."""

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self._namespace = f"genlock-{tag}"
        self._near_device, self._far_device = f"gl{tag}a", f"gl{tag}b"
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.near_host, self.far_host = f"{subnet}.1", f"{subnet}.2"

    async def start(self) -> None:
        """Raises Unavailable naming the command that failed; nothing is left then."""
        try:
            await asyncio.to_thread(self.make)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.to_thread(self.remove)

    async def cut(self) -> None:
        await asyncio.to_thread(self._shape, *CUT)

    async def slow(self, kbit_per_s: int) -> None:
        await asyncio.to_thread(self._shape, "tbf", "rate", f"{kbit_per_s}kbit", *SLOW)

    async def heal(self) -> None:
        await asyncio.to_thread(self._shape)

    def launcher(self, builder: WorkerBuilder) -> Launcher:
        return _TwoNodes(builder, self)

    def place(self, spec: WorkerSpec) -> WorkerSpec:
        """The spec with the address of the host where its worker lives."""
        return replace(spec, host=self.far_host if is_far(spec.worker_id) else self.near_host)

    # --- blocking ---------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Raises Unavailable (`no_network`)."""
        near, far, name = self._near_device, self._far_device, self._namespace
        _ip("netns", "add", name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "netns", name)
        _ip("address", "add", f"{self.near_host}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "address", "add", f"{self.far_host}/30", "dev", far)
        _ip("-n", name, "link", "set", far, "up")
        _ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Ends everything that runs on the far host and takes the link away; never raises for what is gone."""
        for pid in _output("ip", "netns", "pids", self._namespace).split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        _output("ip", "link", "delete", self._near_device)
        _output("ip", "netns", "delete", self._namespace)

    def run_far(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Runs a command on the far host. Raises Unavailable."""
        _run("ip", "netns", "exec", self._namespace, *command, timeout_s=timeout_s)

    def _shape(self, *discipline: str) -> None:
        """Puts a queueing discipline on both ends; none: the link as it was."""
        for prefix, device in (((), self._near_device), (("-n", self._namespace), self._far_device)):
            _output("tc", *prefix, "qdisc", "delete", "dev", device, "root")
            if discipline:
                _run("tc", *prefix, "qdisc", "add", "dev", device, "root", *discipline)


class _TwoNodes(RayLauncher):
    """Ray's head on the near host and a second node on the far one."""

    def __init__(self, builder: WorkerBuilder, network: Network) -> None:
        super().__init__(builder, host=network.near_host)
        self._network = network

    def _resources(self) -> dict[str, float]:
        return RESOURCES

    def _bundle(self, spec: WorkerSpec) -> dict[str, float]:
        return {**super()._bundle(spec), FAR if is_far(spec.worker_id) else NEAR: SHARE}

    def _open(self) -> None:
        super()._open()
        ray = importlib.import_module("ray")
        self._network.run_far(
            "env", *(f"{name}={value}" for name, value in NODE_ENVIRONMENT.items()),
            str(Path(sys.executable).with_name("ray")), "start", f"--address={ray.get_runtime_context().gcs_address}",
            f"--node-ip-address={self._network.far_host}", f"--num-cpus={int(self._cpus) or 1}",
            f'--resources={{"{FAR}": 1}}', "--object-store-memory=80000000", "--disable-usage-stats",
            timeout_s=RAY_START_TIMEOUT_S,
        )  # fmt: skip


def is_far(worker_id: str) -> bool:
    return worker_id.endswith(f"-{FAR_INDEX}")


def why_not(engine: str) -> str:
    """Why there can be no link on this host, "" where there can be one. Tries it out."""
    if engine not in ENGINES:
        return f"the {engine} engine does not cross a network: use nixl or mooncake"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: install iproute2"
    trial = Network()
    try:
        trial.make()
        trial._shape("tbf", "rate", "1mbit", *SLOW)
    except Unavailable as error:
        return error.message
    finally:
        trial.remove()
    return ""


def network_of(engine: str) -> tuple[Network | None, dict[str, str]]:
    """The network of a run over `engine`, or None and why faults of the link are skipped."""
    reason = why_not(engine)
    return (None, {kind.value: reason for kind in sorted(LINK_FAULTS)}) if reason else (Network(), {})


def _ip(*args: str) -> None:
    _run("ip", *args)


def _run(*command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()[-300:]
        raise Unavailable("no_network", f"`{' '.join(command[:8])}` failed: {said}") from error


def _output(*command: str) -> str:
    """What a command says; its failure is nothing to speak of."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    return done.stdout
