"""What the controller offers to the operators' service. Each change carries a `Change` and goes to the event log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.registry.records import Desired, Event
from cluster.roles import Role
from genlock.v1 import operator_pb2, worker_pb2


@dataclass(frozen=True)
class Change:
    """Who changes something, why, and against which state. `expected_revision` 0: any. `asked`: the RPC and a digest of
    its request; an idempotency key belongs to the actor and to what was asked with it."""

    actor: str
    reason: str = ""
    expected_revision: int = 0
    idempotency_key: str = ""
    dry_run: bool = False
    asked: str = ""


@dataclass(frozen=True)
class WorkerRow:
    """One worker as the controller sees it. `phase`: STARTING, READY, DEGRADED, DRAINING or STOPPED."""

    worker_id: str
    role: Role
    phase: str
    reason: str
    phase_age_ms: int
    cordoned: bool = False
    endpoint: str = ""
    incarnation: int = 0
    node: str = ""
    restarts: int = 0
    drain_left_ms: int = 0
    # As it was last told, not to be changed; None when the worker does not answer.
    status: worker_pb2.WorkerStatus | None = None
    # When that was asked, milliseconds of the controller's own clock.
    asked_ms: float = 0.0


@dataclass(frozen=True)
class FleetView:
    desired: Desired
    workers: tuple[WorkerRow, ...]
    settled: bool
    reason: str = ""
    repeated: bool = False
    endpoint: str = ""


@dataclass(frozen=True)
class ScalePlan:
    """What a scale does: workers that go (least loaded first), and how many come."""

    fleet: FleetView
    removed: tuple[str, ...]
    added_prefill: int
    added_decode: int


@dataclass(frozen=True)
class NodeRow:
    node: str
    alive: bool
    cpus: float
    cpus_free: float
    gpus: float
    gpus_free: float
    workers: tuple[str, ...]
    node_id: str = ""
    # Either way no worker is placed there until it leaves or is uncordoned.
    drained: bool = False
    cordoned: bool = False


class FleetControl(Protocol):
    """Changes are checked against their key and their expected revision before all else, dry runs and such as change
    nothing too. Raises Conflict (`revision_moved`, `counts_moved`, `key_used`), Refused (`last_worker`,
    `no_autoscaler`...), NotFound (`unknown_worker`, `unknown_node`), InvalidInput naming the field, NoCapacity
    (`no_place`) naming demand and supply,
    Unavailable (`registry_unreachable`)."""

    async def view(self) -> FleetView: ...

    async def scale(
        self,
        prefill: int | None,
        decode: int | None,
        change: Change,
        *,
        current: tuple[int | None, int | None] = (None, None),
    ) -> ScalePlan: ...

    async def cordon(self, workers: Sequence[str], nodes: Sequence[str], on: bool, change: Change) -> FleetView: ...

    async def drain(
        self,
        workers: Sequence[str],
        nodes: Sequence[str],
        change: Change,
        *,
        deadline_ms: int = 0,
        force: bool = False,
        replace: bool = False,
    ) -> FleetView:
        """Returns at once; the view tells when it is done. `deadline_ms` 0: the configured one."""
        ...

    async def restart(self, worker: str, change: Change, *, deadline_ms: int = 0, force: bool = False) -> FleetView: ...

    async def set_autoscale(self, policy: Callable[[str], str], paused: bool | None, change: Change) -> FleetView:
        """`policy`: from the YAML that is kept to what is wanted, validated; empty turns autoscaling off. It may be
        asked again where somebody else changes the fleet in between. `paused` None: stays."""
        ...

    async def apply(
        self, prefill: int | None, decode: int | None, policy: Callable[[str], str] | None, change: Change
    ) -> FleetView:
        """Counts and policy as one change. None: stays."""
        ...

    async def decisions(self, limit: int) -> tuple[operator_pb2.AutoscaleDecision, ...]:
        """The autoscaler's last decisions, newest first."""
        ...

    async def nodes(self) -> tuple[NodeRow, ...]: ...

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """Those after a sequence number, oldest first."""
        ...

    async def last_events(self, limit: int = 100) -> tuple[Event, ...]:
        """The newest, oldest of them first."""
        ...
