"""Readiness and liveness of a worker as a function of its own facts."""

from __future__ import annotations

import pytest

from genlock.v1 import worker_pb2
from wire.health import HealthLimits, stuck, unready

LIMITS = HealthLimits(ready_ms=100, alive_ms=300)
PASSED = worker_pb2.PeerProof(worker_id="p", passed=True)
FAILED = worker_pb2.PeerProof(worker_id="q", passed=False, reason="digest_mismatch")


@pytest.mark.parametrize(
    ("facts", "is_ready", "is_alive"),
    [
        ({}, True, True),
        ({"step_age_ms": 100}, True, True),
        ({"step_age_ms": 101}, False, True),
        ({"step_age_ms": 301}, False, False),
        ({"draining": True}, False, True),
        # Before anybody has asked it about a peer: alone it can answer nobody.
        ({"proves_peers": True}, False, True),
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
    assert (not unready(status, LIMITS), not stuck(status, LIMITS)) == (is_ready, is_alive)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"proves_peers": True}, "has exchanged a page with nobody yet"),
        ({"proves_peers": True, "untried_peers": 1}, "its first exchange of a page is under way"),
        ({"proves_peers": True, "peers": [FAILED]}, "no exchange of a page has passed: q: digest_mismatch"),
        ({"draining": True}, "draining"),
        ({"step_age_ms": 101, "draining": True}, "its step loop has stood still for 101 ms"),
        ({"pool": {"pages": 10, "quarantined": 6}}, "6 of 10 pages are in quarantine"),
    ],
)
def test_a_worker_that_is_not_ready_says_why(facts: dict, reason: str):
    assert unready(worker_pb2.WorkerStatus(**facts), LIMITS) == reason
