"""What a controller counts through its turns, for whoever scrapes it. Pure: turns go in, plain integers stay."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.control.state import Phase, State
from cluster.roles import Role


def _none() -> dict[Role, int]:
    return dict.fromkeys(Role, 0)


@dataclass
class Tally:
    """Of one life of the controller. Written by its loop alone; others may read at any time."""

    # Lives that were begun under a name that had lived before.
    restarts: dict[Role, int] = field(default_factory=_none)
    # Lives that ended before they had been ready once, other than by being asked to.
    failed_starts: dict[Role, int] = field(default_factory=_none)
    # Events that the registry has taken.
    events: int = 0
    # Times that the registry had lost what is wanted and got it back.
    refills: int = 0
    # When the last turn ended, the caller's milliseconds.
    turned_ms: float = 0.0

    def turn(self, before: State, after: State, now_ms: float) -> None:
        """Compares the rows before and after one turn that has ended."""
        self.turned_ms = now_ms
        if after.rows is before.rows:
            return
        for worker_id, row in after.rows.items():
            earlier = before.rows.get(worker_id)
            if earlier is None:
                continue
            self.restarts[row.role] += max(0, row.restarts - earlier.restarts)
            never_ready = earlier.phase is Phase.STARTING and not earlier.ready_ms
            if never_ready and row.phase is Phase.STOPPED and row.failures > earlier.failures:
                self.failed_starts[row.role] += 1
