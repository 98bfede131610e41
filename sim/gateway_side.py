"""A simulated gateway: the production fleet, ledger and router, and what its poller and request path would do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cluster.gateway.fleet import Claim, Fleet, FleetPolicy, Ledger, release_all
from cluster.gateway.roll import Roll
from cluster.gateway.watch import View, follow
from cluster.registry.records import Desired, WorkerRecord
from cluster.roles import Role
from cluster.router import Route, WorkerView, another_prefill, route_elsewhere, route_many, same_layout
from genlock.v1 import worker_pb2
from kvstore.errors import DeadlineExceeded, GenlockError, Unavailable

if TYPE_CHECKING:
    from sim.callers import Asked, Places, Request
    from sim.worker import Worker
    from sim.world import World

POLL_MS = 20
STATUS_TIMEOUT_MS = 15  # less than POLL_MS: a round is over before the next one begins
LOOK_AGAIN_MS = 5
MOST_REQUESTS = 1000  # more than anybody asks


@dataclass(frozen=True)
class Listed:
    """What one reading of the list gives. `version` counts changes, so that a late reading is known to be old."""

    version: int = 0
    records: Mapping[str, WorkerRecord] = field(default_factory=lambda: MappingProxyType({}))
    desired: Desired = field(default_factory=Desired)


class WorkerList:
    """Who there is, where, and who is cordoned: what a registry tells gateways. `up` False: nobody can read it."""

    def __init__(self) -> None:
        self.now = Listed()
        self.up = True
        self._revisions = 0  # never come again, though the list forgets the last one when it is emptied

    @property
    def cordoned(self) -> frozenset[str]:
        return self.now.desired.cordoned

    def put(self, worker: Worker) -> None:
        """A new life of a worker; it is not cordoned."""
        self.beat(worker)
        self.cordon(worker.name, False)

    def beat(self, worker: Worker) -> None:
        """A living worker tells that it is there."""
        record = WorkerRecord(worker.name, Role(worker.role), worker.endpoint, worker.guard.incarnation, "")
        self._set({**self.now.records, worker.name: record}, self.now.desired)

    def cordon(self, name: str, on: bool) -> None:
        if on is not (name in self.cordoned):
            self.set_cordoned(self.cordoned | {name} if on else self.cordoned - {name})

    def set_cordoned(self, names: frozenset[str]) -> None:
        self._revisions += 1
        self._set(self.now.records, Desired(self._revisions, cordoned=names))

    def drop(self, name: str) -> None:
        self._set({key: record for key, record in self.now.records.items() if key != name}, self.now.desired)

    def empty(self) -> None:
        """The store was flushed: it answers, and has nothing."""
        self._set({}, Desired())

    def _set(self, records: Mapping[str, WorkerRecord], desired: Desired) -> None:
        self.now = Listed(self.now.version + 1, MappingProxyType(dict(records)), desired)


class Gateway:
    """`told` is the simulator's own note of why a worker must not be routed to; the router never sees it."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.name = f"gateway-{index}"
        self.life = 0
        self.start()
        if world.list.up:  # as production does: no request is taken before one look at everybody
            self._take_list(world.list.now)
            for record in list(self.fleet.workers.values()):
                self._answered(record.worker_id, record.endpoint, self._status(record.worker_id, record.endpoint))

    def start(self) -> None:
        """A new process: it knows nobody until it has read the list."""
        limits = self.world.shape.decode_limits
        self.life += 1
        self.alive = True
        self.fleet = Fleet(FleetPolicy(request_limit=limits.max_running + limits.max_waiting))
        self.ledger = Ledger()
        self.roll: Roll[Asked] = Roll(MOST_REQUESTS, retry_after_ms=0)
        self.version = 0
        self._view = View()
        self.told: dict[str, str] = {}
        self.cordons: tuple[int, frozenset[str]] = 0, frozenset()  # with their revision
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
                    self.world.callers.leave(request)

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

    def elsewhere(self, request: Request) -> Route | None:
        """Another pair for an answer that a worker which drains turned away; None where nobody else may serve."""
        left = request.route
        assert left is not None, "it came by a route"
        release_all(self._claims.pop(request.number, ()))
        self._look_again()
        views = self.fleet.view(self.ledger.loads)
        try:
            chosen = route_elsewhere(views, (left.decode.name, left.prefill.name))
        except GenlockError:
            return None
        for view in (chosen.decode, chosen.prefill):
            self._judge_told(view)
        self._judge_layouts(chosen.decode, chosen.prefill)
        if (chosen.decode.worker_id, chosen.prefill.worker_id) == (left.decode.name, left.prefill.name):
            self.world.laws.broken("routed_to_cordoned", f"{self.name} to the pair that turned it away")
        self.world.tally.reasons["turned_away"] += 1
        self.claim(request, chosen)
        return chosen

    def on_computed(self, request: Request) -> None:
        claims = self._claims.get(request.number)
        if claims is not None:
            claims[1].release()

    def on_wanted(self, request: Request, life: int, attempt: int) -> None:
        """A decode worker asks who computes a preempted request again. What it is told may come late, twice, never."""
        world, dice = self.world, self.world.dice
        if request.ended or not self.alive or life != self.life or dice.hit("assign_lost"):
            return
        assert request.at_decode is not None
        decode, _, number = request.at_decode
        answer = self._another(request)
        for _ in range(2 if dice.hit("assign_twice") else 1):
            late_ms = dice.stream("assign_late/by").randrange(300) if dice.hit("assign_late") else 0
            decode.later(1 + late_ms, "assign", decode.on_assigned, number, attempt, answer)
        if not isinstance(answer, GenlockError) and dice.hit("assigned_leaves"):
            world.mischief.leave_soon(answer.prefill)

    def _another(self, request: Request) -> Places | GenlockError:
        claim, before = self._claims[request.number], request.route
        assert before is not None, "it came by a route"
        claim[1].release()
        views = self.fleet.view(self.ledger.loads)
        try:
            chosen = another_prefill(views, before.decode.name, before.prefill.name)
        except GenlockError as error:
            self.world.tally.reasons[error.reason] += 1
            return error
        kept = chosen.worker_id == before.prefill.name
        request.last_resort = not chosen.ready
        self.world.tally.reasons["recompute_kept" if kept else "recompute_moved"] += 1
        self._judge_another(views, before, chosen, kept)
        self._claims[request.number] = claim[0], self.ledger.claim(chosen.worker_id, request.ticket.prompt_tokens)
        request.route = self.world.callers.places(before, chosen)
        request.awaits = True
        return request.route

    def _judge_another(self, views: tuple[WorkerView, ...], before: Places, chosen: WorkerView, kept: bool) -> None:
        decode = next((view for view in views if view.worker_id == before.decode.name), None)
        if chosen.ready:
            self._judge_told(chosen)
        else:  # its own one that drains: nobody else may serve
            ready = [view for view in views if view.role is Role.PREFILL and view.ready]
            others = [view.worker_id for view in ready if decode is None or same_layout(decode, view)]
            if not kept or others:
                self.world.laws.broken("routed_to_cordoned", f"{self.name} to {chosen.worker_id}, not {others}")
        if decode is None:
            return
        self._judge_layouts(decode, chosen)
        if not kept and chosen.outstanding_requests < chosen.request_limit:
            self._judge_even(views, chosen, Route(decode, chosen))

    def on_end(self, request: Request, error: GenlockError | None) -> None:
        release_all(self._claims.pop(request.number, ()))
        if isinstance(error, Unavailable) and self.alive:
            self._look_again()

    def _judge(self, views: tuple[WorkerView, ...], chosen: list[Route]) -> None:
        for route in chosen:
            for view in (route.decode, route.prefill):
                self._judge_told(view)
            self._judge_layouts(route.decode, route.prefill)
        # The second answer of one request already sees the load of the first.
        for view in (chosen[0].decode, chosen[0].prefill):
            self._judge_even(views, view, chosen[0])

    def _judge_told(self, view: WorkerView) -> None:
        why = "cordoned" if view.worker_id in self.cordons[1] else self.told.get(view.worker_id)
        if why is not None:
            self.world.laws.broken("routed_to_cordoned", f"{self.name} to {view.worker_id}, which is {why}")

    def _judge_layouts(self, decode: WorkerView, prefill: WorkerView) -> None:
        ours, theirs = decode.layout_fingerprint, prefill.layout_fingerprint
        if ours and theirs and ours != theirs:
            self.world.laws.broken("routed_across_layouts", f"{self.name}: {ours} and {theirs}")

    def _judge_even(self, views: tuple[WorkerView, ...], view: WorkerView, route: Route) -> None:
        loads = {v.worker_id: self._outstanding(v) for v in views if self._alike(v, view, route)}
        if loads[view.worker_id] > min(loads.values()):
            self.world.laws.broken("routed_unevenly", f"{self.name} to {view.worker_id}: {loads}")

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
            elif request.route.prefill.name == view.worker_id and request.awaits:
                tokens += request.ticket.prompt_tokens
        return tokens

    # --- what it knows ----------------------------------------------------------------------------------------------

    def later(self, delay_ms: int, name: str, call: Callable[..., None], *args: Any) -> None:
        self.world.heap.after(delay_ms, name, self._run, self.life, call, args)

    def _run(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive and life == self.life:
            call(*args)

    def _look_again(self) -> None:
        """A worker was unavailable: the next round comes soon, but not before this one is over."""
        self._round_no += 1
        wait = max(LOOK_AGAIN_MS, self._busy_until_ms - self.world.heap.now_ms)
        self.later(wait, "poll", self._round, self._round_no)

    def _round(self, number: int) -> None:
        if number != self._round_no:
            return
        world = self.world
        dice, rng, now_ms = world.dice, world.dice.stream("polls"), world.heap.now_ms
        if world.list.up and not dice.hit("list_unread"):
            delay = rng.randrange(1, 4) + (rng.randrange(60) if dice.hit("list_late") else 0)
            self.later(delay, "poll", self._take_list, world.list.now)
        prompt = []
        for record in self.fleet.workers.values():
            name, endpoint = record.worker_id, record.endpoint
            if dice.hit("status_lost"):
                self.later(STATUS_TIMEOUT_MS, "poll", self._failed, name, endpoint, DeadlineExceeded("late"))
            elif dice.hit("status_late"):
                late_ms = rng.randrange(1, STATUS_TIMEOUT_MS)
                self.later(late_ms, "poll", self._answered, name, endpoint, self._status(name, endpoint))
            else:
                prompt.append((name, endpoint, self._status(name, endpoint)))
        self.later(rng.randrange(1, 4), "poll", self._answered_all, prompt)
        self._busy_until_ms = now_ms + STATUS_TIMEOUT_MS + 1
        self.later(POLL_MS, "poll", self._round, number)

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

    def _take_list(self, listed: Listed) -> None:
        """Production's own rule decides who stays. What the simulator notes beside it: who is cordoned by the newest
        revision that was read, and who is new or gone."""
        if listed.version <= self.version:
            return
        self.version = listed.version
        if listed.desired.revision >= self.cordons[0]:
            self.cordons = listed.desired.revision, listed.desired.cordoned
        for name, record in listed.records.items():
            if self._endpoints.get(name) != record.endpoint:
                self._endpoints[name] = record.endpoint
                self.told[name] = "not asked yet"
        for name in self.world.names - listed.records.keys():
            if self.told.get(name) == "unreachable":  # one that answers is there, whatever the list has lost
                self.told[name] = "gone"
                self._endpoints.pop(name, None)
        done = follow(self.fleet, self._view, tuple(listed.records.values()), listed.desired)
        self.fleet, self._view = done.fleet, done.view
