"""A worker's heartbeat from its own process, where the registry is shared. In-memory registries are the controller's to
feed."""

from __future__ import annotations

import socket
from collections.abc import Callable

from cluster.launch.spec import WorkerSpec
from cluster.registry.heartbeat import Heartbeat
from cluster.registry.make import is_shared, registry_from
from cluster.registry.records import WorkerRecord
from cluster.registry.tell import record_of
from genlock.v1 import worker_pb2
from wire.clocks import now_ms, unix_ms


def heartbeat_of(
    spec: WorkerSpec, facts: Callable[[], worker_pb2.WorkerStatus], endpoint: Callable[[], str]
) -> Heartbeat | None:
    """Not started; None where the registry is this process's own. Raises InvalidInput for settings that cannot be."""
    config = spec.config
    if not is_shared(config):
        return None
    node = config.registry.node or socket.gethostname()
    started_ms = unix_ms()

    def record() -> WorkerRecord:
        return record_of(
            facts(), endpoint(), node=node, pod=config.registry.pod,
            told_ms=unix_ms(), started_ms=started_ms, stall_ms=config.workers.stall_ms,
        )  # fmt: skip

    registry = registry_from(config, now_ms)
    return Heartbeat(registry, record, config.registry.ttl_ms, now_ms)
