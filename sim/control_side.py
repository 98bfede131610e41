"""A simulated controller: the production reconciler, and what its shell would do: listen, perform, start anew.

Operators, too: they scale, cordon, drain and restart. A drain is gentle when its limit is longer than any request may
take and the worker heard of it: then nothing may be lost by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.control.core import reconcile, unsettled
from cluster.control.state import (
    Action,
    Drain,
    DrainAsked,
    Ended,
    Found,
    Kill,
    Observation,
    Phase,
    Policy,
    Silent,
    Start,
    Started,
    StartFailed,
    State,
    Step,
    Stop,
    Told,
)
from cluster.registry.records import Desired
from cluster.roles import Role
from kvstore.errors import GenlockError
from sim.worker import Worker

if TYPE_CHECKING:
    from sim.callers import Request
    from sim.world import World

TURN_MS = 10
ENOUGH_MS = 10_000  # more than any request may take
POLICY = Policy(
    start_ms=300, drain_ms=ENOUGH_MS, open_ms=150, stop_ms=60, backoff_ms=20, backoff_cap_ms=160, healthy_ms=200,
    kill_ms=150,
)  # fmt: skip
SLACK_MS = 3 * TURN_MS  # a decision and its message
# How a request ends when a worker went away too early.
LOST_BY_DRAIN = frozenset((
    "draining", "drain_cut", "prefill_stopped", "decode_stopped", "prefill_unreachable", "decode_unreachable",
))  # fmt: skip


@dataclass(frozen=True)
class DrainNote:
    """What the simulator knows of one drain. `life` is the worker's own count."""

    worker: Worker
    life: int
    deadline_ms: int


class Controller:
    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.dice.stream("controller")
        self.desired = Desired(1, world.shape.prefills, world.shape.decodes)  # the registry's, so it outlives us
        self.life = 0
        self.alive = False
        self._notes: list[DrainNote] = []
        self._gentle: set[tuple[str, int]] = set()  # (name, life) of workers that go or went without haste
        self._rude: set[tuple[str, int]] = set()
        self.start()

    @property
    def settled(self) -> bool:
        return self.alive and not unsettled(self.state)

    def start(self) -> None:
        """A new process: it finds who is there, and knows no more than the registry does."""
        self.life += 1
        self.alive = True
        self.state = State(self.desired, policy=POLICY)
        self._written = self._world.list.now.desired  # what it knows of the list's cordons
        # A drain that is found begins again. One that its worker had not heard of is forgotten, and the next record
        # that the controller writes of the worker says so.
        for note in self._notes:
            if self._present(note) and not note.worker.admission.draining:
                self._cordon(note.worker.name, False)
        self._notes = []
        self._heard: list[Observation] = [
            Found(w.name, Role(w.role), w.endpoint, w.guard.incarnation, draining=w.admission.draining)
            for w in self._world.workers if w.alive
        ]  # fmt: skip
        self._lives: dict[tuple[str, int], int] = {}  # (name, the reconciler's life) to the worker's own count
        self._failed: Counter[str] = Counter()  # starts in a row that failed
        self._failed_ms: dict[str, int] = {}
        self._turn()

    def die(self) -> None:
        self.alive = False

    # --- what operators and faults do -----------------------------------------------------------------------------

    def cordon(self, worker: Worker) -> None:
        """For a while; a drain that began meanwhile keeps it."""
        if worker.alive and not self._noted(worker):
            self._cordon(worker.name, True)
            self._world.heap.after(self._rng.randrange(10, 80), "uncordon", self._uncordon, worker, worker.life)

    def scale_down(self, worker: Worker) -> None:
        """One fewer of the worker's role; who goes is the reconciler's choice. Later it comes back."""
        if self._scaled(worker.role, -1):
            self._world.heap.after(self._rng.randrange(20, 200), "scale-up", self._scale_up, worker.role)

    def _scale_up(self, role: str) -> None:
        self._scaled(role, 1)

    def drain_short(self, worker: Worker) -> None:
        self._hear(DrainAsked(worker.name, False, "asked for", self._rng.randrange(5, 60)))

    def drain_gently(self, worker: Worker) -> None:
        self._hear(DrainAsked(worker.name, False, "asked for"))

    def drain_rude(self, worker: Worker) -> None:
        """The bare call, past the controller: gateways learn of it from the worker's status."""
        if worker.alive:
            self._rude.add((worker.name, worker.life))
            worker.admission.drain(self._rng.randrange(50))

    def restart(self, worker: Worker) -> None:
        """Kept in the registry: the life with this incarnation is to end."""
        if worker.alive:
            kept = {**self.desired.restarts, worker.name: worker.guard.incarnation}
            self._want(replace(self.desired, restarts=kept))

    def restore(self) -> None:
        """Faults are over: the full fleet is wanted, and somebody sees to it."""
        shape = self._world.shape
        self._want(replace(self.desired, prefill=shape.prefills, decode=shape.decodes))
        if not self.alive:
            self.start()

    def crashed(self, worker: Worker) -> None:
        """The worker died by itself: what it lost is not the drain's fault."""
        self._forget(worker)
        self._gentle.discard((worker.name, worker.life))
        self._tell_end(worker, "died")

    # --- laws -----------------------------------------------------------------------------------------------------

    def judge_end(self, request: Request, error: GenlockError) -> None:
        if error.reason not in LOST_BY_DRAIN or request.last_resort:
            return
        assert request.route is not None, "a worker refused it, so it had been routed"
        decode, prefill = request.route.lives
        place = prefill if "prefill" in error.reason + error.message else decode
        if self._world.dice.injected["clock_jump"]:
            return  # a door is timed by its worker's clock, which does not jump in a real one: a jump shuts it early
        # A door that a rude drain has shut stays shut: a gentle one that comes later cannot keep a promise there.
        if place in self._gentle and place not in self._rude:
            self._world.laws.broken("drain_lost_request", f"request {request.number} at {place}: {error.reason}")

    def judge_overdue(self) -> None:
        """A drain is over at its deadline, whatever the worker does."""
        for note in self._notes if self.alive else ():
            if self._world.heap.now_ms > note.deadline_ms + SLACK_MS and self._present(note):
                self._world.laws.broken("drain_overdue", f"{note.worker.name} since {note.deadline_ms} ms")

    def _judge_drained(self, worker: Worker) -> None:
        """By the book of the pool, not by the counts that the drain waited for. A preempted request that came back for
        want of another takes its chance: the drain did not wait for it."""
        for request in self._world.requests:
            if request.last_resort and not request.ended and request.route and request.route.prefill is worker:
                return
        slots = [worker.guard.book_slot(i) for i in range(worker.guard.slots)]
        kept = sum(bool(s.leases or s.shares) for s in slots)
        self._world.laws.require(not kept, "drained_with_lease", f"{worker.name}: {kept} pages are promised or in use")

    def _judge_start(self, action: Start) -> None:
        world, name = self._world, action.worker_id
        alive = sum(w.alive and w.role == action.role.value for w in world.workers)
        wanted = self.state.wanted(action.role)
        world.laws.require(alive <= wanted + POLICY.surge, "too_many_workers", f"{alive} of {wanted} {action.role}")
        failed = self._failed[name]
        if failed:
            waited = world.heap.now_ms - self._failed_ms[name]
            least = min(POLICY.backoff_ms * 2 ** (failed - 1), POLICY.backoff_cap_ms)
            world.laws.require(waited >= least, "restarted_too_soon", f"{name} {waited} ms after failure {failed}")

    # --- turns ----------------------------------------------------------------------------------------------------

    def _later(self, delay_ms: int, name: str, call: Callable[..., None], *args: Any) -> None:
        self._world.heap.after(delay_ms, name, self._run, self.life, call, args)

    def _run(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive and life == self.life:
            call(*args)

    def _hear(self, seen: Observation) -> None:
        self._heard.append(seen)

    def _turn(self) -> None:
        world = self._world
        self._sync()
        heard, self._heard = self._heard, []
        for seen in heard:
            self._count(seen)
            row = self.state.rows.get(seen.worker_id)
            world.tally.meet("worker", row.phase.lower() if row is not None else "unknown", type(seen).__name__)
        self.state = replace(self.state, desired=self.desired)
        self.state, actions = reconcile(self.state, world.heap.now_ms, heard)
        for seen in heard:
            if isinstance(seen, Found):
                row = self.state.rows[seen.worker_id]
                self._lives[seen.worker_id, row.life] = world.worker(seen.worker_id).life
        for action in actions:
            self._perform(action)
        self._ask_all()
        self._later(TURN_MS, "poll", self._turn)

    def _count(self, seen: Observation) -> None:
        """Failed starts in a row, as the law counts them."""
        if isinstance(seen, StartFailed):
            self._failed[seen.worker_id] += 1
            self._failed_ms[seen.worker_id] = self._world.heap.now_ms
        elif isinstance(seen, (Told, DrainAsked, Ended)):  # it lived, or somebody wants it at once
            self._failed.pop(seen.worker_id, None)

    def _ask_all(self) -> None:
        """One status question to everybody; the answers come together."""
        told: list[Observation] = []
        for row in self.state.rows.values():
            worker = self._process(row.worker_id, row.life)
            if not row.alive or not row.endpoint:
                continue
            if self._world.dice.hit("status_lost"):
                told.append(Silent(row.worker_id, row.life, "late"))
                continue
            if worker is None:
                told.append(Silent(row.worker_id, row.life, "refused", refused=True))
                continue
            work = worker.told_work()
            told.append(Told(
                row.worker_id, row.life, self._world.heap.now_ms, worker.guard.incarnation, running=work.running,
                waiting=work.waiting, leases=work.leases, draining=worker.admission.draining, owed=work.owed,
            ))  # fmt: skip
        self._later(self._rng.randrange(1, 4), "poll", self._heard.extend, told)

    def _process(self, name: str, life: int) -> Worker | None:
        """The process of one of the reconciler's lives, if it lives."""
        worker = self._world.find(name)
        own = self._lives.get((name, life))
        return worker if worker is not None and worker.alive and worker.life == own else None

    # --- actions --------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        rng = self._rng
        if isinstance(action, Start):
            self._judge_start(action)
            self._later(rng.randrange(5, 30), "start", self._start_worker, action)
        elif isinstance(action, Drain):
            self._drain(action)
        elif isinstance(action, (Stop, Kill)):
            self._judge_stop(action)
            self._later(rng.randrange(1, 4), "stop", self._end_worker, action)

    def _start_worker(self, action: Start) -> None:
        world, name, life = self._world, action.worker_id, action.life
        row = self.state.rows.get(name)
        if row is None or row.life != life or row.step is not Step.NONE:
            return  # stopped before it came up
        if world.dice.hit("start_fails"):
            self._hear(StartFailed(name, life, "there is no place"))
            return
        self._sync()  # the new life is not cordoned, whatever an emptied list is reminded of
        worker = world.bring_up(name)
        self._lives[name, life] = worker.life
        self._hear(Started(name, life, worker.endpoint))

    def _drain(self, action: Drain) -> None:
        world, worker = self._world, self._process(action.worker_id, action.life)
        if worker is None:
            return
        self._cordon(worker.name, True)
        self._notes.append(DrainNote(worker, worker.life, action.deadline_ms))
        enough = action.deadline_ms - world.heap.now_ms >= ENOUGH_MS
        if world.dice.hit("drain_lost"):
            return
        if enough and not worker.admission.draining:
            self._gentle.add((worker.name, worker.life))
        open_ms = self.open_ms(worker.role, action.deadline_ms - world.heap.now_ms)
        worker.later(self._rng.randrange(1, 4), "drain", worker.admission.drain, open_ms)

    def open_ms(self, role: str, limit_ms: int) -> int:
        """How long a draining worker takes what is on its way. Prefill's door stays open: decode workers still come
        for what they were promised, and the reconciler knows what they are owed."""
        return min(POLICY.open_ms, limit_ms) if role == "decode" else limit_ms

    def _judge_stop(self, action: Stop | Kill) -> None:
        """A drain that ends before its deadline says that nothing is left."""
        worker = self._process(action.worker_id, action.life)
        for note in self._notes:
            if note.worker is worker and self._present(note) and self._world.heap.now_ms < note.deadline_ms:
                self._judge_drained(note.worker)

    def _end_worker(self, action: Stop | Kill) -> None:
        world, worker = self._world, self._process(action.worker_id, action.life)
        if worker is None:
            self._hear(Ended(action.worker_id, action.life, "there was none"))
            return
        if isinstance(action, Stop):
            worker.cut()
        world.list.drop(worker.name)
        self._forget(worker)
        world.stop_worker(worker, "stopped" if isinstance(action, Stop) else "lost")
        self._tell_end(worker, "stopped")

    def _tell_end(self, worker: Worker, how: str) -> None:
        """Whoever supervises processes tells of their ends; a lost notice shows as silence."""
        life = next((own for (name, own), n in self._lives.items() if (name, n) == (worker.name, worker.life)), 0)
        if self.alive and life and not self._world.dice.hit("end_unheard"):
            self._later(self._rng.randrange(1, 6), "ended", self._hear, Ended(worker.name, life, how))

    # --- inside ---------------------------------------------------------------------------------------------------

    def _cordon(self, name: str, on: bool) -> None:
        self._sync()
        self._world.list.cordon(name, on)
        self._sync()

    def _sync(self) -> None:
        """A list that was emptied is given back what this controller knows of it."""
        listed = self._world.list
        if listed.now.desired.revision < self._written.revision:
            listed.set_cordoned(self._written.cordoned)
        self._written = listed.now.desired

    def _scaled(self, role: str, by: int) -> bool:
        """Never below one worker, never above the shape's count."""
        most = self._world.shape.prefills if role == "prefill" else self._world.shape.decodes
        count = (self.desired.prefill if role == "prefill" else self.desired.decode) + by
        if not 1 <= count <= most:
            return False
        prefill = role == "prefill"
        self._want(replace(self.desired, prefill=count) if prefill else replace(self.desired, decode=count))
        return True

    def _want(self, desired: Desired) -> None:
        self.desired = replace(desired, revision=self.desired.revision + 1)

    def _present(self, note: DrainNote) -> bool:
        return note.worker.alive and note.worker.life == note.life

    def _noted(self, worker: Worker) -> bool:
        return any(n.worker is worker and self._present(n) for n in self._notes)

    def _forget(self, worker: Worker) -> None:
        self._notes = [n for n in self._notes if n.worker is not worker]

    def _uncordon(self, worker: Worker, life: int) -> None:
        """By name, as an operator does it: a life that came meanwhile is meant too. A drain keeps its own cordon."""
        row = self.state.rows.get(worker.name)
        if worker.alive and not (row is not None and row.phase is Phase.DRAINING):
            self._cordon(worker.name, False)
        elif worker.name in self._world.list.now.records:
            self._world.heap.after(20, "uncordon", self._uncordon, worker, life)
