"""`genlock doctor`: what this host can do and what would go wrong."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.doctor_exposure import exposure
from cluster.cli.doctor_finding import FAIL, OK, SKIP, WARN, Finding
from cluster.cli.doctor_parts import CLOCK_LIMIT_MS, engines, ray, registry, versions
from cluster.cli.options import load_settings, settings_options
from cluster.output import output_option

if TYPE_CHECKING:
    from cluster.settings import Config


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


def _model(config: Config) -> Iterator[Finding]:
    from kvstore.errors import GenlockError
    from model.load import load_identity

    try:
        info = load_identity(config.model.path or config.model.name)[0]
    except GenlockError as error:
        yield Finding("model", FAIL, error.message[:200], "install the model or set model.path")
    else:
        yield Finding("model", OK, f"{info.name}, context {info.context_tokens} tokens")


def _shared_memory(_config: Config) -> Iterator[Finding]:
    there = Path("/proc/self/fd").is_dir()
    yield Finding("engine shm", OK if there else FAIL, "/proc is mounted" if there else "/proc is not mounted",
                  "" if there else "mount /proc")  # fmt: skip


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


def _clock(_config: Config) -> Iterator[Finding]:
    # A wall clock that is set while this looks: leases and deadlines use the monotonic one and do not care.
    wall, mono = time.time(), time.monotonic()
    time.sleep(0.1)
    drift_ms = abs((time.time() - wall) - (time.monotonic() - mono)) * 1000
    steady = drift_ms < CLOCK_LIMIT_MS
    yield Finding("clock", OK if steady else WARN, f"moved by {drift_ms:.1f} ms in 100 ms",
                  "" if steady else "run NTP; event times will be wrong, pages stay safe")  # fmt: skip


CHECKS = (
    versions, _model, _shared_memory, engines, ray, registry, _ports, _memory, _clock, exposure,
)  # fmt: skip
