"""Two hosts in one: a second network namespace behind a virtual link that can be cut and slowed for a pair of workers,
with a Ray node of its own in it. Needs root, iproute2 and a kernel with veth pairs, HTB and u32 filters."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.chaos.plan import LINK_FAULTS
from cluster.launch.launcher import Launcher
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.ray_session import RAY_ENVIRONMENT
from cluster.launch.spec import WorkerBuilder, WorkerSpec
from kvstore.errors import Unavailable

ENGINES = frozenset({"nixl", "mooncake"})  # those that cross a network
# The pair that an idle gateway takes first, prefill-0 and decode-0, is on two hosts.
FAR_WORKERS = frozenset({"prefill-1", "decode-0"})
COMMAND_TIMEOUT_S = 20.0
RAY_START_TIMEOUT_S = 120.0
# A queue that is too short for any packet: all are dropped without a word, as by a cable that was pulled.
CUT_BYTES = 1
SLOW_MS, GSO_BYTES = 400, 66_000  # so much of its rate a slow link's queue holds, and always one offloaded packet
FULL_KBIT = 10_000_000
FIRST_SLOT = 16
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
        self._slots = itertools.count(FIRST_SLOT)
        self.packets = 0  # that met a fault

    async def start(self) -> None:
        """Raises Unavailable naming the command that failed; nothing is left then."""
        try:
            await asyncio.to_thread(self.make)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        await asyncio.to_thread(self.remove)

    @contextlib.asynccontextmanager
    async def fault(self, near_ports: Sequence[int], far_ports: Sequence[int], kbit_per_s: int) -> AsyncIterator[None]:
        """While inside, the TCP traffic from and to these ports of the near and of the far host is slowed to so much,
        for 0 cut; all other traffic of the link goes on. Raises Unavailable where that cannot be done or undone."""
        slot = next(self._slots)
        try:
            await asyncio.to_thread(self.shape, slot, near_ports, far_ports, kbit_per_s)
        except BaseException:
            with contextlib.suppress(Unavailable):  # of what was done only a part
                await asyncio.to_thread(self.unshape, slot)
            raise
        try:
            yield
        finally:
            await asyncio.to_thread(self.unshape, slot)

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
        # What no filter sends to a class goes its way at once.
        for place, device in self._devices:
            _run("tc", *place, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb")

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

    @property
    def _devices(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Both ends of the link; each shapes what it sends."""
        return ((), self._near_device), (("-n", self._namespace), self._far_device)

    def shape(self, slot: int, near_ports: Sequence[int], far_ports: Sequence[int], kbit_per_s: int) -> None:
        """A class of this number at both ends, and the filters that lead there. Raises Unavailable."""
        rate, queue = kbit_per_s or FULL_KBIT, max(GSO_BYTES, kbit_per_s * SLOW_MS // 8) if kbit_per_s else CUT_BYTES
        ends = ((self.near_host, near_ports), (self.far_host, far_ports))
        for (place, device), (outgoing, incoming) in zip(self._devices, (ends, ends[::-1]), strict=True):
            lines = [
                f"class add dev {device} parent 1: classid 1:{slot:x} htb rate {rate}kbit quantum 60000",
                f"qdisc add dev {device} parent 1:{slot:x} handle {slot:x}0: bfifo limit {queue}",
                *(
                    f"filter add dev {device} parent 1: protocol ip prio {slot} u32 {match} flowid 1:{slot:x}"
                    for match in (*matches("src", *outgoing), *matches("dst", *incoming))
                ),
            ]
            _run("tc", *place, "-batch", "-", told="\n".join(lines))

    def unshape(self, slot: int) -> None:
        """Takes class and filters away again, and counts the packets that they met. Raises Unavailable."""
        for place, device in self._devices:
            self.packets += packets_in(
                _output("tc", *place, "-s", "class", "show", "dev", device, "classid", f"1:{slot:x}")
            )
            filters = _output("tc", *place, "filter", "show", "dev", device, "parent", "1:")
            lines = [f"filter delete dev {device} parent 1: prio {slot}"] if f"pref {slot} " in filters else []
            lines.append(f"class delete dev {device} classid 1:{slot:x}")
            _run("tc", *place, "-batch", "-", told="\n".join(lines))


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


def matches(end: str, host: str, ports: Sequence[int]) -> list[str]:
    """The u32 filters of packets that come from (`src`) or go to (`dst`) these ports."""
    tcp = f"match ip protocol 6 0xff match ip {end} {host}/32"
    return [f"{tcp} match ip {end[0]}port {port} 0xffff" for port in ports]


def packets_in(shown: str) -> int:
    """Packets that a class sent or dropped, as `tc -s` tells it."""
    found = re.search(r"Sent \d+ bytes (\d+) pkt \(dropped (\d+)", shown)
    return 0 if found is None else int(found[1]) + int(found[2])


def links_of(worker_ids: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs between which the link may be broken: a decode worker on the far host and a prefill worker on the near one.
    Not the other way round: the gateway, on the near host, calls far prefill workers on the very ports that decode
    calls."""
    decodes = [name for name in worker_ids if name.startswith("decode") and is_far(name)]
    prefills = [name for name in worker_ids if name.startswith("prefill") and not is_far(name)]
    return tuple((decode, prefill) for decode in decodes for prefill in prefills)


def is_far(worker_id: str) -> bool:
    return worker_id in FAR_WORKERS


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
        trial.shape(FIRST_SLOT, (1,), (1,), 1000)
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


def _run(*command: str, timeout_s: float = COMMAND_TIMEOUT_S, told: str | None = None) -> None:
    """`told`: what it gets on stdin. Raises Unavailable."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s, input=told)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()[-300:]
        raise Unavailable("no_network", f"`{' '.join(command[:8])}` failed: {said}") from error


def _output(*command: str) -> str:
    """What a command says; its failure is nothing to speak of."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    return done.stdout
