"""A worker's own facts as its record. Pure."""

from __future__ import annotations

from cluster.registry.records import WorkerRecord
from cluster.roles import Role
from genlock.v1 import worker_pb2


def record_of(
    facts: worker_pb2.WorkerStatus,
    endpoint: str,
    *,
    node: str,
    pod: str,
    told_ms: int,
    started_ms: int,
    stall_ms: int,
) -> WorkerRecord:
    """`told_ms` and `started_ms` are Unix milliseconds. A step loop that stood still for `stall_ms` is not healthy."""
    stalled = facts.step_age_ms > stall_ms
    return WorkerRecord(
        worker_id=facts.worker_id,
        role=Role(facts.role),
        endpoint=endpoint,
        incarnation=facts.incarnation,
        layout_fingerprint=facts.layout_fingerprint,
        draining=facts.draining,
        healthy=not stalled,
        detail=f"its step loop has stood still for {facts.step_age_ms} ms" if stalled else "",
        running=facts.running_requests,
        waiting=facts.waiting_requests,
        free_pages=facts.pool.free,
        total_pages=facts.pool.pages,
        node=node,
        pod=pod,
        pid=facts.pid,
        metrics_endpoint=facts.metrics_endpoint,
        told_ms=told_ms,
        started_ms=started_ms,
    )
