"""What the registry keeps. Pure, frozen; all times are Unix milliseconds told by the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cluster.roles import Role


@dataclass(frozen=True)
class WorkerRecord:
    """One life of one worker, as it was last told. Never proof of anything about its pages."""

    worker_id: str
    role: Role
    endpoint: str
    incarnation: int
    layout_fingerprint: str
    # True: takes no new requests.
    draining: bool = False
    # The router must not choose it, whatever it says itself.
    cordoned: bool = False
    healthy: bool = True
    detail: str = ""
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
    node: str = ""
    pod: str = ""
    pid: int = 0
    metrics_endpoint: str = ""
    told_ms: int = 0
    # When this life began, on its host's clock: of two lives of one name the later one is the present.
    started_ms: int = 0


@dataclass(frozen=True)
class GatewayRecord:
    """What one life of a gateway tells of its door."""

    gateway_id: str
    # Requests that were admitted, since it started.
    arrived: int = 0
    # Requests that wait for a worker now.
    waiting: int = 0
    # Where other gateways ask it; empty: a release that told none, or it does not know.
    endpoint: str = ""


@dataclass(frozen=True)
class Desired:
    """What the operator (or the autoscaler) wants. Each change has the next revision; 0: nothing was ever asked."""

    revision: int = 0
    prefill: int = 0
    decode: int = 0
    # Worker ids that the router must not choose.
    cordoned: frozenset[str] = frozenset()
    # The autoscaler's policy as YAML; empty: none.
    autoscale: str = ""
    autoscale_paused: bool = False
    # Starts of the controller that led to this state, counted through restarts.
    controller_starts: int = 0
    # Where the controller of a shared registry can be called; empty: it is in the gateway's process, or never was.
    controller_endpoint: str = ""
    # Restarts that were asked for, by worker id: a drain that ends in a new worker.
    restarts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    # How often the controller found a store that had lost this and wrote it again, and when it did so last (0: never).
    refills: int = 0
    refilled_ms: int = 0
    # Nodes that were drained: no worker is placed there. Ray's id by name: a node that comes back has another id, and
    # takes workers again.
    closed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # Nodes that were cordoned: no worker is placed there either, and those that are there stay. Ids by name, as above;
    # "" for the only node there is, which cannot be closed.
    cordoned_nodes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # Lives that the router must not choose because of where they are: incarnations by worker id. What follows such a
    # life is placed elsewhere, and serves.
    cordoned_lives: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def avoided(self) -> frozenset[str]:
        """Ids of the nodes that take no worker: drained or cordoned."""
        return frozenset((*self.closed.values(), *self.cordoned_nodes.values())) - {""}

    def is_cordoned(self, worker_id: str, incarnation: int) -> bool:
        """Whether new requests must not go to this life of a worker."""
        return worker_id in self.cordoned or self.cordoned_lives.get(worker_id, 0) == incarnation != 0


@dataclass(frozen=True)
class Event:
    """One line of the event log. `sequence` is the registry's; 0 before it is kept."""

    at_ms: int
    kind: str
    subject: str
    actor: str
    message: str
    reason: str = ""
    revision: int = 0
    sequence: int = 0
