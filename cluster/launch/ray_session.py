"""A connection to Ray: an isolated Ray of our own that goes with it, or one that is there already."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.errors import Unavailable

# No objects travel through the store; this is the least that Ray accepts, with some air.
OBJECT_STORE_BYTES = 80 << 20
LOCAL = "local"
# Ray reads these from the environment alone: no telemetry, no token file in the home folder, loopback only, no
# memory monitor that would kill workers of its choice.
RAY_ENVIRONMENT = (
    ("RAY_USAGE_STATS_ENABLED", "0"),
    ("RAY_AUTH_MODE", "disabled"),
    ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"),
    ("RAY_memory_monitor_refresh_ms", "0"),
    ("RAY_DEDUP_LOGS", "0"),
    ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"),
    # Ray starts its workers at nice 15, so that they starve on a busy host; these serve.
    ("RAY_worker_niceness", "0"),
)


class RaySession:
    """Blocking; all calls from one thread. `ray` is there once opened."""

    def __init__(self, address: str, namespace: str) -> None:
        self.address = address
        self.namespace = namespace
        self.ray: Any = None
        self.folder: Path | None = None
        self._borrowed = False

    @property
    def local(self) -> bool:
        return self.address == LOCAL

    def open(self, *, cpus: float, host: str, resources: dict[str, float]) -> None:
        """Starts Ray with so much to hand out, or attaches. Raises Unavailable (`ray_in_use`, `ray_failed`)."""
        if self.local:
            with environment(RAY_ENVIRONMENT):
                self._start(cpus, host, resources)
        else:
            self._attach()

    def close(self) -> None:
        """Ends the Ray that this session started, or leaves the one that it was attached to."""
        if self.ray is not None and not self._borrowed:
            self.ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _start(self, cpus: float, host: str, resources: dict[str, float]) -> None:
        ray = importlib.import_module("ray")
        if ray.is_initialized():
            raise Unavailable("ray_in_use", "this process is already connected to a Ray cluster")
        self.ray = ray
        # Short: the path of a Unix socket has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="genlock-"))
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=0,
                namespace=self.namespace,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=host,
                resources=resources,
                _temp_dir=str(self.folder),
            )
        except Exception as exc:
            raise Unavailable("ray_failed", f"Ray did not start: {first_line(exc)}") from exc

    def _attach(self) -> None:
        ray = importlib.import_module("ray")
        self.ray = ray
        if ray.is_initialized():
            self._borrowed = True  # we run inside of it, as an actor
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=self.address, namespace=self.namespace, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as exc:
            raise Unavailable(
                "ray_failed",
                f"no Ray cluster at {self.address}: {first_line(exc)}; start one with `ray start`, or name another",
                field="control.ray_address",
            ) from exc


@contextlib.contextmanager
def environment(values: tuple[tuple[str, str], ...]) -> Iterator[None]:
    """Sets variables for a while; processes that are started inside keep them."""
    before = {name: os.environ.get(name) for name, _value in values}
    os.environ.update(dict(values))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def cause(exc: BaseException) -> str:
    """Ray quotes the other process's traceback; its last line says what it was."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if any("Traceback" in line or line.startswith('File "') for line in lines):
        return lines[-1][:300]
    return first_line(exc)


def first_line(exc: BaseException) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0][:200] if lines else type(exc).__name__
