"""Hands and answers of workers that a test holds in its own hands: no processes, no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.control.api import NodeRow
from cluster.control.controller import Controller
from cluster.control.hands import OnLost, Place
from cluster.control.operations import Operations
from cluster.control.state import Found, Policy, State
from cluster.control.times import Clocks, Times
from cluster.registry.base import Registry
from cluster.registry.memory import MemoryRegistry
from cluster.roles import Role
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError, NoCapacity, NotFound, Unavailable
from wire.clocks import now_ms, unix_ms

POLICY = Policy(
    start_ms=2000, drain_ms=1500, open_ms=20, stop_ms=500, backoff_ms=20, backoff_cap_ms=80, healthy_ms=10_000,
    stall_ms=500, kill_ms=300,
)  # fmt: skip
TIMES = Times(reconcile_ms=10, poll_ms=10, poll_timeout_ms=200, feed_ttl_ms=2000)
WAIT_MS = 10_000


class FakeFleet:
    """Hands and asker in one. `refuse`: what the next starts raise; `silent`: who does not answer."""

    def __init__(self) -> None:
        self.workers: dict[str, worker_pb2.WorkerStatus] = {}
        self.lost: dict[str, OnLost] = {}
        self.refuse: list[GenlockError] = []
        self.hang: asyncio.Event | None = None
        self.silent: set[str] = set()
        self.done: list[tuple[str, str]] = []
        self.room = 256
        # Names and ids; a worker starts on the first that it need not avoid.
        self.nodes_there = {"node-a": "id-a"}
        self.places: dict[str, tuple[str, str]] = {}
        self._next = 100

    def put(self, worker_id: str) -> worker_pb2.WorkerStatus:
        self._next += 1
        status = worker_pb2.WorkerStatus(
            worker_id=worker_id, role=worker_id.split("-")[0], incarnation=self._next, layout_fingerprint="f"
        )
        self.workers[worker_id] = status
        return status

    async def start(self, worker_id: str, role: Role, on_lost: OnLost, avoid: frozenset[str] = frozenset()) -> Place:
        self.done.append(("start", worker_id))
        if self.refuse:
            raise self.refuse.pop(0)
        if self.hang is not None:
            await self.hang.wait()
        free = [(node, node_id) for node, node_id in self.nodes_there.items() if node_id not in avoid]
        if not free:
            raise NoCapacity("no_place", f"{worker_id} has no node beside those that it must avoid")
        self.put(worker_id)
        self.lost[worker_id] = on_lost
        self.places[worker_id] = free[0]
        return Place(worker_id, *free[0])

    async def stop(self, worker_id: str) -> None:
        await self._end("stop", worker_id)

    async def kill(self, worker_id: str) -> None:
        await self._end("kill", worker_id)

    async def adopt(self, on_lost: OnLost) -> Sequence[Found]:
        self.lost = dict.fromkeys(self.workers, on_lost)
        return [
            Found(name, Role(status.role), name, status.incarnation, node, status.draining, node_id=node_id)
            for name, status in self.workers.items()
            for node, node_id in [self.places.get(name, ("node-a", ""))]
        ]

    async def check_room(self, counts: dict[Role, int], avoid: frozenset[str] = frozenset()) -> None:
        if sum(counts.values()) > self.room or avoid.issuperset(self.nodes_there.values()):
            raise NoCapacity("no_place", f"{sum(counts.values())} workers, place for {self.room}")

    async def nodes(self) -> Sequence[NodeRow]:
        return [
            NodeRow(node, True, 2.0, 1.0, 0.0, 0.0, tuple(self.workers), node_id)
            for node, node_id in self.nodes_there.items()
        ]

    async def status(self, endpoint: str, timeout_ms: int) -> worker_pb2.WorkerStatus:
        if endpoint in self.silent or endpoint not in self.workers:
            raise Unavailable("unreachable", f"nobody listens at {endpoint}")
        answer = worker_pb2.WorkerStatus()
        answer.CopyFrom(self.workers[endpoint])
        return answer

    async def drain(self, endpoint: str, open_ms: int, timeout_ms: int) -> None:
        (await self.status(endpoint, timeout_ms)).draining = True
        self.workers[endpoint].draining = True
        self.done.append(("drain", endpoint))

    async def check(self, endpoint: str, prefill_endpoint: str, prefill_worker: str, timeout_ms: int) -> None:
        raise AssertionError("these workers prove nobody")

    async def close(self) -> None:
        return None

    def die(self, worker_id: str, detail: str = "SIGKILL") -> None:
        del self.workers[worker_id]
        self.lost[worker_id](worker_id, detail)

    async def _end(self, what: str, worker_id: str) -> None:
        self.done.append((what, worker_id))
        if self.workers.pop(worker_id, None) is None:
            raise NotFound("unknown_worker")


class World:
    """A controller over a fake fleet. `async with` runs it."""

    def __init__(
        self, fleet: FakeFleet | None = None, registry: Registry | None = None, seed: tuple[int, int] = (1, 1),
        policy: Policy = POLICY,
    ) -> None:  # fmt: skip
        self.fleet = fleet or FakeFleet()
        self.registry = registry or MemoryRegistry(now_ms)
        clocks = Clocks(now_ms, unix_ms)
        self.controller = Controller(policy, TIMES, self.registry, self.fleet, self.fleet, clocks, seed)
        self.operations = Operations(self.controller)

    async def __aenter__(self) -> World:
        await self.controller.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.controller.stop()

    async def until(self, true, what: str = "") -> State:
        if not await self.controller.turned(true, WAIT_MS):
            raise AssertionError(f"{what or 'it'} did not happen: {self.controller.state}")
        return self.controller.state

    async def settled(self) -> None:
        await self.until(lambda _state: not (self.operations._view().reason), "settling")
