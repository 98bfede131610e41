"""What `genlock get` makes of the answers: each figure under its own heading."""

from __future__ import annotations

from cluster.cli.get import node_tables
from cluster.control.api import NodeRow
from cluster.operators.convert import node_message
from genlock.v1 import operator_pb2 as pb


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
