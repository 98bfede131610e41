"""`genlock doctor`: what this host can do and what would go wrong."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.options import load_settings, settings_options
from cluster.output import output_option
from wire.clocks import now_ms

if TYPE_CHECKING:
    from cluster.settings import Config

OK, WARN, FAIL, SKIP = "ok", "warning", "failed", "skipped"
CONNECT_S = 3.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
CLOCK_LIMIT_MS = 1_000


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` is there where the result is not ok."""

    check: str
    result: str
    detail: str
    fix: str = ""


@click.command(
    epilog="""\b
Examples:
  genlock doctor
  genlock doctor --set registry.url=redis://10.0.0.2:6379/0
  genlock doctor --config cluster.yaml -o json

\b
Exit codes: 0 nothing failed (warnings may be there), 1 something did."""
)
@settings_options
@output_option
def command(config_file: Path | None, assignments: tuple[str, ...], output: str) -> int:
    """Checks Python, libraries, the model, transfer engines, Ray, Redis, ports, memory, clocks and what is exposed, for
    the settings as they are. Starts nothing."""
    from dataclasses import asdict

    from cluster.cli import render

    config = load_settings(config_file, assignments).config
    findings = list(examine(config))
    if output == "json":
        render.print_json([asdict(one) for one in findings])
    elif output == "yaml":
        import yaml

        click.echo(yaml.safe_dump([asdict(one) for one in findings], sort_keys=False).rstrip())
    else:
        rows = [(one.result, one.check, one.detail, one.fix) for one in findings]
        render.stdout().print(render.table("", ("result", "check", "what was found", "what to do"), rows))
    return 1 if any(one.result == FAIL for one in findings) else 0


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...]


def examine(config: Config) -> Iterator[Finding]:
    """All findings; a check that breaks is a finding too."""
    for check in CHECKS:
        try:
            yield from check(config)
        except Exception as error:
            yield Finding(check.__name__.strip("_"), FAIL, f"{type(error).__name__}: {error}"[:200], "report this")


def _versions(_config: Config) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] == (3, 11)
    yield Finding("python", OK if good else FAIL, version, "" if good else "use Python 3.11")
    for name in ("genlock", "torch", "ray", "grpcio", "protobuf", "numba", "redis"):
        try:
            yield Finding(name, OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, FAIL, "not installed", f"pip install {name}")


def _model(config: Config) -> Iterator[Finding]:
    from kvstore.errors import GenlockError
    from model.load import load_identity

    try:
        info = load_identity(config.model.path or config.model.name)[0]
    except GenlockError as error:
        yield Finding("model", FAIL, error.message[:200], "install the model or set model.path")
    else:
        yield Finding("model", OK, f"{info.name}, context {info.context_tokens} tokens")


def _engines(config: Config) -> Iterator[Finding]:
    for name, module in (("shm", ""), ("mooncake", "mooncake.engine"), ("nixl", "nixl_cu12._bindings")):
        chosen = config.transfer.engine == name
        if not module:
            there = Path("/proc/self/fd").is_dir()
            yield Finding("engine shm", OK if there else FAIL, "/proc is mounted" if there else "/proc is not mounted",
                          "" if there else "mount /proc")  # fmt: skip
            continue
        found = _importable(module)
        result = OK if not found else FAIL if chosen else SKIP
        yield Finding(f"engine {name}", result, found or "its library loads",
                      f"pip install 'genlock[{name}]'" if result == FAIL else "")  # fmt: skip


def _importable(module: str) -> str:
    """Why a module cannot be found; empty when it can. It is not imported: libraries start threads."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        return f"not installed ({error})"
    return "" if spec is not None else "not installed"


def _ray(config: Config) -> Iterator[Finding]:
    if _importable("ray"):
        yield Finding("ray", FAIL, "not installed", "pip install 'ray==2.60.0'")
        return
    address = config.control.ray_address
    if address in ("local", "auto"):
        yield Finding("ray cluster", OK, f"control.ray_address is {address}: nothing to reach")
        return
    host, _, port = address.rpartition(":")
    yield _reach("ray cluster", host, port, "start Ray there, or set control.ray_address")


def _registry(config: Config) -> Iterator[Finding]:
    from cluster.registry.make import is_shared

    if not is_shared(config):
        yield Finding("registry", OK, "in memory: for one process; `genlock gateway` and `controller` need Redis")
        return
    import asyncio

    from cluster.registry.make import registry_from
    from kvstore.errors import GenlockError

    async def ask() -> tuple[int, int]:
        registry = registry_from(config, now_ms)
        await registry.open()
        try:
            return len(await registry.workers()), (await registry.desired()).revision
        finally:
            await registry.close()

    try:
        workers, revision = asyncio.run(ask())
    except GenlockError as error:
        yield Finding("registry", FAIL, error.message[:200], "start Redis, or correct registry.*")
    else:
        yield Finding("registry", OK, f"{config.registry.url} answers: {workers} workers, revision {revision}")


def _reach(name: str, host: str, port: str, fix: str) -> Finding:
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            return Finding(name, OK, f"{host}:{port} answers")
    except (OSError, ValueError) as error:
        return Finding(name, FAIL, f"{host}:{port}: {error}", fix)


def _ports(config: Config) -> Iterator[Finding]:
    wanted = (
        ("api.port", config.api.host, config.api.port),
        ("api.http_port", config.api.http_host, config.api.http_port),
        ("metrics.port", config.metrics.host, config.metrics.port),
    )
    for name, host, port in wanted:
        if port <= 0:
            yield Finding(f"port {name}", SKIP, "any free one" if port == 0 else "off")
            continue
        with contextlib.closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                yield Finding(f"port {name}", WARN, f"{host}:{port}: {error.strerror}",
                              f"in use, perhaps by a running cluster; else set {name}")  # fmt: skip
            else:
                yield Finding(f"port {name}", OK, f"{host}:{port} is free")


def _memory(config: Config) -> Iterator[Finding]:
    pages, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    size = os.sysconf("SC_PAGE_SIZE")
    low = free * size < 2 << 30
    yield Finding("memory", WARN if low else OK, f"{free * size / 2**30:.1f} of {pages * size / 2**30:.1f} GiB free",
                  "a worker of the default model needs about 1 GiB" if low else "")  # fmt: skip
    space = os.statvfs(tempfile.gettempdir())
    room = space.f_bavail * space.f_frsize
    yield Finding("temporary files", WARN if room < 1 << 30 else OK, f"{room / 2**30:.1f} GiB free",
                  "Ray keeps its sockets and logs there" if room < 1 << 30 else "")  # fmt: skip
    cpus = len(os.sched_getaffinity(0))
    demand = config.workers.cpus * (config.workers.prefill + config.workers.decode)
    enough = demand <= cpus
    yield Finding("cpus", OK if enough else WARN, f"{cpus} here, {demand:g} reserved by the configured workers",
                  "" if enough else "start fewer workers or lower workers.cpus")  # fmt: skip


def _clocks(_config: Config) -> Iterator[Finding]:
    # A wall clock that is set while this looks: leases and deadlines use the monotonic one and do not care.
    wall, mono = time.time(), time.monotonic()
    time.sleep(0.1)
    drift_ms = abs((time.time() - wall) - (time.monotonic() - mono)) * 1000
    steady = drift_ms < CLOCK_LIMIT_MS
    yield Finding("clock", OK if steady else WARN, f"moved by {drift_ms:.1f} ms in 100 ms",
                  "" if steady else "run NTP; event times will be wrong, pages stay safe")  # fmt: skip


def _exposure(config: Config) -> Iterator[Finding]:
    """Listeners that anybody may reach."""
    open_api = config.api.host not in LOOPBACK or config.api.http_host not in LOOPBACK
    if open_api and not config.api.tenants_file:
        yield Finding("front door", WARN, "listens beyond this host without credentials",
                      "set api.tenants_file, or listen on 127.0.0.1")  # fmt: skip
    if config.workers.host not in LOOPBACK:
        yield Finding("worker ports", WARN, "workers listen beyond this host",
                      "keep them in a private network; docs/security.md")  # fmt: skip
    if config.transfer.engine == "mooncake":
        yield Finding("transfer listener", WARN, "Mooncake listens on all interfaces and asks nobody who they are",
                      "let only workers reach its ports (NetworkPolicy, firewall)")  # fmt: skip
    if config.transfer.engine == "nixl" and config.workers.host not in LOOPBACK:
        yield Finding("transfer listener", WARN, "UCX listens without authentication",
                      "set UCX_NET_DEVICES to the private interface; let only workers reach it")  # fmt: skip
    if config.log.prompts:
        yield Finding("log.prompts", WARN, "prompts and answers go to the log", "turn it off after the debugging")
    if not open_api and config.workers.host in LOOPBACK:
        yield Finding("exposure", OK, "everything listens on this host alone")


CHECKS = (_versions, _model, _engines, _ray, _registry, _ports, _memory, _clocks, _exposure)
