"""A cluster of scripted workers in a process of its own, behind `genlock up`'s own code.

python -m tests.support.fake_cluster [ray|here] [hang|echo] [http]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from cluster.cli.up import serve
from cluster.launch.launcher import InProcessLauncher, Launcher
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.spec import WorkerSpec
from cluster.launch.up import Cluster
from cluster.openai.server import HttpDoor
from tests.support.fake_workers import BuiltFake, build_fake, config, hang, load_fake


def build_hanging(spec: WorkerSpec) -> BuiltFake:
    worker = build_fake(spec)
    worker.script = hang
    return worker


def make(report: Callable[[str], None]) -> Cluster:
    builder = build_hanging if "hang" in sys.argv else build_fake
    launcher: Launcher = RayLauncher(builder, cpus=2.0) if "ray" in sys.argv else InProcessLauncher(builder)
    settings = config(workers__drain_timeout_ms=20_000, api__http_port=0)
    make_door = HttpDoor if "http" in sys.argv else None
    return Cluster(settings, launcher, load_fake, report=report, make_door=make_door)


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(make)))
