"""The autoscaler as the controller asks it: the fleet's rows in, a verdict with its record out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cluster.autoscale.decide import Counts
from cluster.autoscale.scaler import Scaler, Told, decision_message
from cluster.control.api import FleetView, WorkerRow
from cluster.control.hands import Verdict
from cluster.control.state import Phase

# Their load counts; what a worker does that is about to stop still has to be done.
_COUNTED = frozenset({Phase.READY.value, Phase.DEGRADED.value, Phase.DRAINING.value})


class PolicyScaler:
    """Decides by the policy that the fleet's desired state carries."""

    def __init__(self, unix_ms: Callable[[], int], arrivals: Callable[[], Awaitable[float | None]]) -> None:
        """`arrivals`: requests that came to gateways since it was last asked; None: nobody tells."""
        self._unix_ms = unix_ms
        self._arrivals = arrivals
        self._scaler = Scaler()

    async def decide(self, view: FleetView, now_ms: float) -> Verdict | None:
        """Raises InvalidInput for a policy that cannot be read."""
        desired = view.desired
        current = Counts(desired.prefill, desired.decode)
        told = [_told(row) for row in view.workers if row.phase in _COUNTED]
        decision = self._scaler.decide(desired.autoscale, told, current, now_ms, await self._arrivals())
        record = decision_message(decision, self._unix_ms())
        reason = "; ".join(decision.reasons)[:500]
        if decision.held:
            return Verdict(None, None, reason, record)
        return Verdict(decision.target.prefill, decision.target.decode, reason, record)


def _told(row: WorkerRow) -> Told:
    ready = row.phase == Phase.READY.value and not row.cordoned
    return Told(row.worker_id, row.role.value, ready, row.status, row.asked_ms)
