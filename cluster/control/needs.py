"""What the fleet needs of the nodes below it, from the controller's rows and the workers' own records. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.control.hands import Need
from cluster.control.state import State
from cluster.registry.records import WorkerRecord
from cluster.roles import Role


def needs_of(state: State, records: Iterable[WorkerRecord] = ()) -> dict[Role, Need]:
    """A record of a worker without a live row counts as a worker too: its process tells that it is there."""
    listed = tuple(records)
    return {role: _need(state, role, listed) for role in Role}


def _need(state: State, role: Role, records: tuple[WorkerRecord, ...]) -> Need:
    told = {record.worker_id: {record.node, record.pod} - {""} for record in records if record.role is role}
    placing, places = False, []
    for row in state.of(role):
        if not row.alive:
            continue
        names = ({row.node} - {""}) | told.pop(row.worker_id, set())
        if row.endpoint and names:
            places.append(frozenset(names))
        else:  # its node is that of its last life, or none
            placing = True
    places += [frozenset(names) for names in told.values() if names]
    return Need(state.wanted(role), placing, tuple(places))
