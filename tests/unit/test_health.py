"""Readiness and liveness of a worker as a function of its own facts."""

from __future__ import annotations

import pytest

from genlock.v1 import worker_pb2
from wire.health import HealthLimits, alive, ready

LIMITS = HealthLimits(ready_ms=100, alive_ms=300)
PASSED, FAILED = worker_pb2.PeerProof(worker_id="p", passed=True), worker_pb2.PeerProof(worker_id="q", passed=False)


@pytest.mark.parametrize(
    ("facts", "is_ready", "is_alive"),
    [
        ({}, True, True),
        ({"step_age_ms": 100}, True, True),
        ({"step_age_ms": 101}, False, True),
        ({"step_age_ms": 301}, False, False),
        ({"draining": True}, False, True),
        # A fleet of one role: nobody to prove anything with.
        ({"proves_peers": True}, True, True),
        ({"proves_peers": True, "untried_peers": 1}, False, True),
        ({"proves_peers": True, "untried_peers": 1, "peers": [FAILED]}, False, True),
        ({"proves_peers": True, "untried_peers": 1, "peers": [PASSED]}, True, True),
        ({"untried_peers": 1}, True, True),
        ({"proves_peers": True, "peers": [FAILED]}, False, True),
        ({"proves_peers": True, "peers": [FAILED, PASSED]}, True, True),
        ({"pool": {"pages": 10, "quarantined": 5}}, True, True),
        ({"pool": {"pages": 10, "quarantined": 6, "free": 4}}, False, True),
        # Load alone is no illness.
        ({"running_requests": 4096, "waiting_requests": 65_536, "leases": 256, "step_age_ms": 99}, True, True),
    ],
)
def test_health(facts: dict, is_ready: bool, is_alive: bool):
    status = worker_pb2.WorkerStatus(**facts)
    assert (ready(status, LIMITS), alive(status, LIMITS)) == (is_ready, is_alive)
