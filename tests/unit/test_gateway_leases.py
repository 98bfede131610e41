"""The leases of all prefill workers as one list."""

from __future__ import annotations

from cluster.gateway.fleet import WorkerRecord
from cluster.gateway.leases import awaited, merged_leases
from cluster.roles import Role
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import worker_pb2


def told(worker_id: str, total: int, *ages_ms: int) -> worker_pb2.WorkerLeases:
    leases = [worker_pb2.Lease(worker_id=worker_id, handoff=f"{worker_id}{age}", age_ms=age) for age in ages_ms]
    return worker_pb2.WorkerLeases(leases=leases, total=total)


def test_the_oldest_of_all_workers_come_first_and_the_rest_is_counted() -> None:
    lost = pb.UnreachedWorker(worker_id="c", reason="peer_unreachable")
    merged = merged_leases((told("a", 40, 9, 5, 1), lost, told("b", 2, 7, 2)), (), 3)
    assert [one.handoff for one in merged.leases] == ["a9", "b7", "a5"]
    assert merged.total == 42
    assert list(merged.unreached) == [lost]
    assert merged_leases((), (), 3) == pb.ListLeasesResponse()


def test_what_decode_waits_for_is_what_it_last_told() -> None:
    status = worker_pb2.WorkerStatus(owed_handoffs={"prefill-1": 1, "prefill-0": 2})
    decode = WorkerRecord("decode-0", Role.DECODE, "here", status=status)
    silent = WorkerRecord("decode-1", Role.DECODE, "there")
    assert [(one.decode_worker, one.prefill_worker, one.handoffs) for one in awaited((decode, silent))] == [
        ("decode-0", "prefill-0", 2), ("decode-0", "prefill-1", 1),
    ]  # fmt: skip
