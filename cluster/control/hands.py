"""What the controller has done for it, by whoever knows how: launchers, workers, an autoscaler. Interfaces only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.control.api import FleetView, NodeRow
from cluster.control.state import Found
from cluster.roles import Role
from genlock.v1 import operator_pb2, worker_pb2

# Called with the worker's id and what is known about its end; never for a worker that was asked to stop.
OnLost = Callable[[str, str], None]


@dataclass(frozen=True)
class Place:
    """Where a worker came up."""

    endpoint: str
    node: str = ""
    node_id: str = ""


class Hands(Protocol):
    """Starts and ends workers. Every call ends in bounded time."""

    async def start(self, worker_id: str, role: Role, on_lost: OnLost, avoid: frozenset[str] = frozenset()) -> Place:
        """On a node whose id is none of `avoid`. Raises a GenlockError; nothing of the worker is left then, nor when
        the call is cancelled."""
        ...

    async def stop(self, worker_id: str) -> None:
        """Ends it now; what still runs there gets a typed error. Raises NotFound."""
        ...

    async def kill(self, worker_id: str) -> None:
        """As a crash would. Raises NotFound."""
        ...

    async def adopt(self, on_lost: OnLost) -> Sequence[Found]:
        """Live workers of this cluster that an earlier controller started; from here on they are owned."""
        ...

    async def check_room(self, counts: dict[Role, int], avoid: frozenset[str] = frozenset()) -> None:
        """Raises NoCapacity (`no_place`) naming demand and supply where so many in all could never have a place on
        nodes whose id is none of `avoid`."""
        ...

    async def nodes(self) -> Sequence[NodeRow]: ...


@dataclass(frozen=True)
class Need:
    """What one role needs of the nodes. `wanted`: workers. `placing`: some worker has, or looks for, a place that is
    not known. `places`: for each other worker the names that its node may go by."""

    wanted: int
    placing: bool = False
    places: tuple[frozenset[str], ...] = ()


class Room(Protocol):
    """Owns the nodes that workers are placed on: makes them, and takes away those that hold no worker. Every call ends
    in bounded time."""

    async def check(self, counts: Mapping[Role, int]) -> None:
        """Raises NoCapacity naming demand and supply where so many workers can never have nodes."""
        ...

    async def fit(self, look: Callable[[], Awaitable[Mapping[Role, Need]]]) -> Sequence[str]:
        """Makes the nodes fit once, and says what was changed. `look` is asked after everything else was read. Raises
        a GenlockError; no node that holds a worker was given up then either."""
        ...

    async def close(self) -> None: ...


class Asker(Protocol):
    """Talks to workers. All raise a GenlockError: Unavailable where nobody listens."""

    async def status(self, endpoint: str, timeout_ms: int) -> worker_pb2.WorkerStatus: ...

    async def drain(self, endpoint: str, open_ms: int, timeout_ms: int) -> None:
        """The worker takes no new requests from now on, and late ones for `open_ms`. Does not wait for its end."""
        ...

    async def check(self, endpoint: str, prefill_endpoint: str, prefill_worker: str, timeout_ms: int) -> None:
        """Has a decode worker exchange a page with a prefill worker; its next status says how that went."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """What an autoscaler decided. None: stays. `record`: how it came to that, for whoever asks later."""

    prefill: int | None
    decode: int | None
    reason: str
    record: operator_pb2.AutoscaleDecision | None = None


class Autoscaler(Protocol):
    async def decide(self, view: FleetView, now_ms: float) -> Verdict | None:
        """Asked again and again while a policy is there and not paused. `now_ms` is monotonic. None: nothing to say."""
        ...
