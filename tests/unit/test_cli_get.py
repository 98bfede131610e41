"""What `genlock get` makes of the answers: each figure under its own heading."""

from __future__ import annotations

from cluster.cli.get import lease_tables, node_tables
from cluster.control.api import NodeRow
from cluster.operators.convert import node_message
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import worker_pb2


def test_nodes_are_listed_with_what_they_have_and_what_runs_there() -> None:
    full = NodeRow("10.0.0.1", True, 8.0, 5.5, 2.0, 1.0, ("decode-0", "prefill-1"), "id-1", drained=True)
    lost = NodeRow("10.0.0.2", False, 4.0, 3.0, 0.0, 0.0, (), cordoned=True)
    answer = pb.ListNodesResponse(nodes=[node_message(row) for row in (full, lost)])
    [(title, columns, rows)] = node_tables(answer, False)
    assert title == ""
    assert columns == ("node", "alive", "drained", "cordoned", "cpus", "free", "gpus", "free", "workers")
    assert [tuple(row) for row in rows] == [
        ("10.0.0.1", True, True, False, 8.0, 5.5, 2.0, 1.0, "decode-0, prefill-1"),
        ("10.0.0.2", False, False, True, 4.0, 3.0, 0.0, 0.0, ""),
    ]


def test_leases_are_listed_one_by_one_and_those_left_out_are_counted() -> None:
    lease = worker_pb2.Lease(
        worker_id="prefill-0", handoff="3f9c0a1b", ticket="77aa00ff", request="r1", phase="completed", pages=3,
        prompt_pages=4, age_ms=7000, left_ms=900, renewals=5,
    )  # fmt: skip
    waits = pb.AwaitedHandoffs(decode_worker="decode-0", prefill_worker="prefill-0", handoffs=2)
    answer = pb.ListLeasesResponse(leases=[lease], total=9, awaited=[waits])
    [(title, columns, rows), (_, heads, awaited)] = lease_tables(answer, True)
    assert title == "Handoffs whose pages are kept: 1 of 9, the oldest; 8 are left out"
    assert [dict(zip(columns, row, strict=True)) for row in rows] == [
        {"prefill": "prefill-0", "handoff": "3f9c0a1b", "ticket": "77aa00ff", "request": "r1", "phase": "completed",
         "pages": 3, "of": 4, "age": "7 s", "ends in": "900 ms", "renewed": 5},
    ]  # fmt: skip
    assert [dict(zip(heads, row, strict=True)) for row in awaited] == [
        {"decode": "decode-0", "from": "prefill-0", "handoffs": 2}
    ]
    [(_, narrow, [row]), _] = lease_tables(answer, False)
    assert [*narrow[:2], "ticket", *narrow[2:]] == columns
    assert "77aa00ff" not in row


def test_no_leases_are_tables_without_rows() -> None:
    assert [(title, rows) for title, _columns, rows in lease_tables(pb.ListLeasesResponse(), False)] == [
        ("Handoffs whose pages are kept", []), ("Handoffs that are awaited", []),
    ]  # fmt: skip
