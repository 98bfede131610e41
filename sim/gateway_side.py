"""A simulated gateway: the production fleet, ledger and router, and what its poller and request path would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.gateway.fleet import Claim, Fleet, FleetPolicy, Ledger, release_all
from cluster.roles import Role
from cluster.router import Route, WorkerView, route_many
from genlock.v1 import worker_pb2
from kvstore.errors import DeadlineExceeded, GenlockError, Unavailable

if TYPE_CHECKING:
    from sim.worker import Worker
    from sim.world import Request, World

POLL_MS = 20
STATUS_TIMEOUT_MS = 15  # less than POLL_MS: a round is over before the next one begins
LOOK_AGAIN_MS = 5


@dataclass(frozen=True)
class Entry:
    """One worker of the list."""

    role: Role
    endpoint: str
    cordoned: bool = False


class WorkerList:
    """Who there is, where, and who is cordoned: what a registry tells gateways. `up` False: nobody can read it."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.up = True

    def put(self, worker: Worker) -> None:
        """A new life of a worker; it is not cordoned."""
        self._set({**self.entries, worker.name: Entry(Role(worker.role), worker.endpoint)})

    def cordon(self, name: str, on: bool) -> int:
        """Returns the revision from which on readers know it."""
        entry = self.entries.get(name)
        if entry is not None and entry.cordoned is not on:
            self._set({**self.entries, name: replace(entry, cordoned=on)})
        return self.revision

    def drop(self, name: str) -> None:
        self._set({key: entry for key, entry in self.entries.items() if key != name})

    def _set(self, entries: dict[str, Entry]) -> None:
        self.entries = entries  # never changed in place: a reader's copy stays what it was
        self.revision += 1


class Gateway:
    """`told` is the simulator's own note of why a worker must not be routed to; the router never sees it."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.name = f"gateway-{index}"
        self.life = 0
        self.start()
        if world.list.up:  # as production does: no request is taken before one look at everybody
            self._take_list(world.list.revision, world.list.entries)
            for record in list(self.fleet.workers.values()):
                self._answered(record.worker_id, record.endpoint, self._status(record.worker_id, record.endpoint))

    def start(self) -> None:
        """A new process: it knows nobody until it has read the list."""
        limits = self.world.shape.decode_limits
        self.life += 1
        self.alive = True
        self.fleet = Fleet(FleetPolicy(request_limit=limits.max_running + limits.max_waiting))
        self.ledger = Ledger()
        self.revision = 0
        self.told: dict[str, str] = {}
        self._endpoints: dict[str, str] = {}
        self._claims: dict[int, tuple[Claim, Claim]] = {}
        self._round_no = 0
        self._busy_until_ms = 0
        self._round(0)

    def die(self) -> None:
        """The process is gone; the calls that it made to decode workers are cancelled."""
        self.alive = False
        for request in self.world.requests:
            if request.gateway is self and not request.ended:
                if request.at_decode is None:
                    self.world.on_end(request, Unavailable("gateway_lost", "the gateway died"))
                else:
                    self.world.leave(request)

    # --- requests ---------------------------------------------------------------------------------------------------

    def routes(self, tokens: int, count: int) -> list[Route]:
        """Raises what the router raises."""
        views = self.fleet.view(self.ledger.loads)
        chosen = route_many(views, tokens, count)
        self._judge(views, chosen)
        return chosen

    def claim(self, request: Request, chosen: Route) -> None:
        decode = self.ledger.claim(chosen.decode.worker_id, request.most_tokens)
        prefill = self.ledger.claim(chosen.prefill.worker_id, request.ticket.prompt_tokens)
        self._claims[request.number] = decode, prefill

    def on_first_token(self, request: Request) -> None:
        claims = self._claims.get(request.number)
        if claims is not None:
            claims[1].release()

    def on_end(self, request: Request, error: GenlockError | None) -> None:
        release_all(self._claims.pop(request.number, ()))
        if isinstance(error, Unavailable) and self.alive:
            self._look_again()

    def quiet_about(self, name: str, revision: int) -> bool:
        """It has read the list of `revision`, and none of its requests is at the worker."""
        return not self.alive or (self.revision >= revision and name not in self.ledger.loads)

    def _judge(self, views: tuple[WorkerView, ...], chosen: list[Route]) -> None:
        laws = self.world.laws
        for route in chosen:
            for view in (route.decode, route.prefill):
                why = self.told.get(view.worker_id)
                if why is not None:
                    laws.broken("routed_to_cordoned", f"{self.name} to {view.worker_id}, which is {why}")
            ours, theirs = route.decode.layout_fingerprint, route.prefill.layout_fingerprint
            if ours and theirs and ours != theirs:
                laws.broken("routed_across_layouts", f"{self.name}: {ours} and {theirs}")
        # The second answer of one request already sees the load of the first.
        for view in (chosen[0].decode, chosen[0].prefill):
            loads = {v.worker_id: self._outstanding(v) for v in views if self._alike(v, view, chosen[0])}
            if loads[view.worker_id] > min(loads.values()):
                laws.broken("routed_unevenly", f"{self.name} to {view.worker_id}: {loads}")

    def _alike(self, other: WorkerView, view: WorkerView, route: Route) -> bool:
        """Whether `other` could have been chosen instead."""
        ours, theirs = route.decode.layout_fingerprint, other.layout_fingerprint
        fits = not ours or not theirs or ours == theirs
        return other.role is view.role and other.ready and other.outstanding_requests < other.request_limit and fits

    def _outstanding(self, view: WorkerView) -> int:
        """Tokens that this life of the gateway has at a worker, by what callers have seen."""
        tokens = 0
        for request in self.world.requests:
            if request.ended or request.gateway is not self or request.gateway_life != self.life:
                continue
            if request.route is None:  # the one that is being routed
                continue
            if request.route.decode.name == view.worker_id:
                tokens += request.most_tokens
            elif request.route.prefill.name == view.worker_id and not request.tokens:
                tokens += request.ticket.prompt_tokens
        return tokens

    # --- what it knows ----------------------------------------------------------------------------------------------

    def _later(self, delay_ms: int, name: str, call: Callable[..., None], *args: Any) -> None:
        self.world.heap.after(delay_ms, name, self._run, self.life, call, args)

    def _run(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive and life == self.life:
            call(*args)

    def _look_again(self) -> None:
        """A worker was unavailable: the next round comes soon, but not before this one is over."""
        self._round_no += 1
        wait = max(LOOK_AGAIN_MS, self._busy_until_ms - self.world.heap.now_ms)
        self._later(wait, "poll", self._round, self._round_no)

    def _round(self, number: int) -> None:
        if number != self._round_no:
            return
        world = self.world
        dice, rng, now_ms = world.dice, world.dice.stream("polls"), world.heap.now_ms
        if world.list.up and not dice.hit("list_unread"):
            delay = rng.randrange(1, 4) + (rng.randrange(60) if dice.hit("list_late") else 0)
            self._later(delay, "poll", self._take_list, world.list.revision, world.list.entries)
        prompt = []
        for record in self.fleet.workers.values():
            name, endpoint = record.worker_id, record.endpoint
            if dice.hit("status_lost"):
                self._later(STATUS_TIMEOUT_MS, "poll", self._failed, name, endpoint, DeadlineExceeded("late"))
            elif dice.hit("status_late"):
                late_ms = rng.randrange(1, STATUS_TIMEOUT_MS)
                self._later(late_ms, "poll", self._answered, name, endpoint, self._status(name, endpoint))
            else:
                prompt.append((name, endpoint, self._status(name, endpoint)))
        self._later(rng.randrange(1, 4), "poll", self._answered_all, prompt)
        self._busy_until_ms = now_ms + STATUS_TIMEOUT_MS + 1
        self._later(POLL_MS, "poll", self._round, number)

    def _status(self, name: str, endpoint: str) -> worker_pb2.WorkerStatus | None:
        """What the worker at an endpoint says now; None when nobody answers there."""
        worker = self.world.worker(name)
        return worker.status() if worker.alive and worker.endpoint == endpoint else None

    def _answered_all(self, answers: list[tuple[str, str, worker_pb2.WorkerStatus | None]]) -> None:
        for name, endpoint, status in answers:
            self._answered(name, endpoint, status)

    def _answered(self, name: str, endpoint: str, status: worker_pb2.WorkerStatus | None) -> None:
        if status is None:
            self._failed(name, endpoint, Unavailable("worker_unreachable", "the connection was refused"))
            return
        self.fleet = self.fleet.answered(name, endpoint, status)
        if self._current(name, endpoint):
            self.told.pop(name, None)
            if status.draining:
                self.told[name] = "draining"

    def _failed(self, name: str, endpoint: str, error: GenlockError) -> None:
        self.fleet = self.fleet.failed(name, endpoint, error)
        if isinstance(error, Unavailable) and self._current(name, endpoint):
            self.told[name] = "unreachable"

    def _current(self, name: str, endpoint: str) -> bool:
        """Whether an answer is about the worker that the last list named: news of a former place is no news."""
        return self._endpoints.get(name) == endpoint

    def _take_list(self, revision: int, entries: dict[str, Entry]) -> None:
        if revision <= self.revision:
            return
        self.revision = revision
        known = {name: record.endpoint for name, record in self.fleet.workers.items()}
        open_now = {name: entry for name, entry in entries.items() if not entry.cordoned}
        self._endpoints = {name: entry.endpoint for name, entry in open_now.items()}
        for name in sorted(known.keys() - open_now.keys()):
            self.fleet = self.fleet.removed(name)
        for name, entry in open_now.items():
            if known.get(name) != entry.endpoint:
                self.fleet = self.fleet.added(name, entry.role, entry.endpoint)
                self.told[name] = "not asked yet"
        for name in sorted(self.world.names - open_now.keys()):
            self.told[name] = "cordoned" if name in entries else "gone"
