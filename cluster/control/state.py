"""What the controller knows: one row a worker, what it hears about them, and what it can have done. Pure, frozen.

A worker's name stays (`decode-0`); each start of any worker is a new life with the next number. What is heard names
the life that it is about, so news of an earlier life changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType

from cluster.registry.records import Desired, Event
from cluster.roles import Role


class Phase(StrEnum):
    STARTING = "STARTING"
    READY = "READY"
    # Takes no requests: does not answer, does not step, or is not proved. May come back by itself.
    DEGRADED = "DEGRADED"
    # Takes no new requests and ends when the running ones have.
    DRAINING = "DRAINING"
    # No process. A row that is still wanted starts again.
    STOPPED = "STOPPED"


class Step(IntEnum):
    """How far the end of a life has come. Never goes back in one life, so no action is asked for twice."""

    NONE = 0
    DRAIN = 1
    STOP = 2
    KILL = 3


@dataclass(frozen=True)
class Policy:
    """Limits of the reconciler, milliseconds. `restart` False: a worker that died stays down."""

    start_ms: int = 180_000
    drain_ms: int = 10_000
    # How long a worker that drains still takes requests that were on their way to it.
    open_ms: int = 1_500
    # Longest wait for an asked stop, and then for a kill, to be carried out.
    stop_ms: int = 15_000
    backoff_ms: int = 500
    backoff_cap_ms: int = 60_000
    # READY for so long: earlier failures do not count any more.
    healthy_ms: int = 60_000
    # Readiness: a step loop that stood still, answers that were late.
    stall_ms: int = 60_000
    late_answers: int = 3
    # Liveness, later than readiness: DEGRADED for so long without one good answer.
    kill_ms: int = 120_000
    # Workers above the desired count while others of the role still drain.
    surge: int = 1
    restart: bool = True


@dataclass(frozen=True)
class Row:
    """One worker. Times are the caller's milliseconds; 0 deadline: none."""

    worker_id: str
    role: Role
    phase: Phase
    reason: str
    since_ms: int
    life: int = 0
    endpoint: str = ""
    incarnation: int = 0
    node: str = ""
    # Of its node, where a node that comes back has another one; "" where there is no such thing.
    node_id: str = ""
    step: Step = Step.NONE
    deadline_ms: int = 0
    # Not wanted any more: the row goes with its process. Else the same name starts again.
    leaving: bool = False
    # Why this life is to end, asked for by somebody; empty: nobody asked.
    asked: str = ""
    restarts: int = 0
    # Lives in a row that ended badly.
    failures: int = 0
    not_before_ms: int = 0
    ready_ms: int = 0
    late_answers: int = 0
    # When a drain stops taking requests that were on their way.
    open_until_ms: int = 0
    # The drain's own limit where it was asked for with one.
    drain_ms: int = 0
    load: int = 0
    # Whether the last answer spoke of nothing that still runs, and when that was asked.
    idle: bool = False
    told_ms: int = 0
    # Handoffs that requests of this decode worker still need, by prefill worker.
    owed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    # This decode worker pulls only after an exchange of a page; and with which lives it has tried one.
    proves: bool = False
    tried: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def alive(self) -> bool:
        """There is, or may be, a process."""
        return self.phase is not Phase.STOPPED


@dataclass(frozen=True)
class State:
    desired: Desired = field(default_factory=Desired)
    rows: Mapping[str, Row] = field(default_factory=lambda: MappingProxyType({}))
    policy: Policy = field(default_factory=Policy)
    # The number of the last life that was begun or found.
    lives: int = 0

    def wanted(self, role: Role) -> int:
        return self.desired.prefill if role is Role.PREFILL else self.desired.decode

    def of(self, role: Role) -> tuple[Row, ...]:
        return tuple(row for row in self.rows.values() if row.role is role)


# --- what is heard ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A live worker that this controller did not start, or started in an earlier life of its own."""

    worker_id: str
    role: Role
    endpoint: str = ""
    incarnation: int = 0
    node: str = ""
    draining: bool = False
    node_id: str = ""


@dataclass(frozen=True)
class Started:
    worker_id: str
    life: int
    endpoint: str
    node: str = ""
    node_id: str = ""


@dataclass(frozen=True)
class StartFailed:
    worker_id: str
    life: int
    reason: str


@dataclass(frozen=True)
class Told:
    """An answer to a status question that was asked at `asked_ms`. `fault`: why it cannot serve, where it says so."""

    worker_id: str
    life: int
    asked_ms: int
    incarnation: int
    fault: str = ""
    running: int = 0
    waiting: int = 0
    leases: int = 0
    draining: bool = False
    step_age_ms: int = 0
    owed: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    # Whether it pulls only after an exchange of a page, and the incarnations with which it tried one, by worker.
    proves: bool = False
    tried: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Silent:
    """A status question failed. `refused`: nobody listens there; else the answer was late."""

    worker_id: str
    life: int
    detail: str
    refused: bool = False


@dataclass(frozen=True)
class Ended:
    """The process is gone, whether asked to or not."""

    worker_id: str
    life: int
    detail: str = ""


@dataclass(frozen=True)
class DrainAsked:
    """An operator's drain of one worker. `leaving` False: it starts again afterwards."""

    worker_id: str
    leaving: bool
    reason: str
    drain_ms: int = 0


Observation = Found | Started | StartFailed | Told | Silent | Ended | DrainAsked


# --- what is to be done -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """`avoid`: ids of nodes that it must not be placed on."""

    worker_id: str
    role: Role
    life: int
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Drain:
    """Tell the worker to take no new requests. It is cordoned already."""

    worker_id: str
    life: int
    deadline_ms: int


@dataclass(frozen=True)
class Stop:
    """End it now: what still runs gets a typed error."""

    worker_id: str
    life: int


@dataclass(frozen=True)
class Kill:
    worker_id: str
    life: int


@dataclass(frozen=True)
class Record:
    event: Event


Action = Start | Drain | Stop | Kill | Record
