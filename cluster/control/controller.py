"""The controller's shell: asks workers, reads what is wanted, lets the core decide, and performs what it says.

One turn after another, about five a second and at once when something was heard; a turn never raises. Each action is a
task of its own. What is wanted lives in the registry; the rows are made anew from live workers after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.control.api import Change
from cluster.control.asker import told_of
from cluster.control.core import reconcile
from cluster.control.hands import Asker, Hands, Room
from cluster.control.life import Life
from cluster.control.room import RoomKeeper
from cluster.control.state import (
    Action,
    Drain,
    Ended,
    Found,
    Kill,
    Observation,
    Phase,
    Policy,
    Record,
    Row,
    Silent,
    Start,
    Started,
    StartFailed,
    State,
    Stop,
)
from cluster.control.tally import Tally
from cluster.control.times import Clocks, Times
from cluster.control.wanted import lost, refill
from cluster.registry.base import Registry
from cluster.registry.records import Desired, Event
from cluster.registry.rules import revision_moved
from cluster.registry.tell import record_of
from cluster.roles import Role
from genlock.v1 import worker_pb2
from kvstore.errors import Conflict, GenlockError, NoCapacity, NotFound, Unavailable
from wire.ending import end_tasks
from wire.errors import surprise
from wire.loops import keep_going

log = logging.getLogger(__name__)

MAX_EVENTS_HELD = 1000
MAX_CHANGE_TRIES = 5
DRAIN_CALL_MS = 1_000
CHECK_MS = 30_000
DRAIN_RETRY_S = 0.1
# Beyond the start's own limit, which its launcher keeps.
START_MARGIN_MS = 30_000


class Controller:
    """`seed`: wanted counts where the registry knows none."""

    def __init__(
        self,
        policy: Policy,
        times: Times,
        registry: Registry,
        hands: Hands,
        asker: Asker,
        clocks: Clocks,
        seed: tuple[int, int],
        room: Room | None = None,
    ) -> None:
        self.state = State(policy=policy)
        self.registry = registry
        self.hands = hands
        self.clocks = clocks
        # Called after each turn that changed a row, with the rows before and after.
        self.on_change: Callable[[State, State], None] = lambda _before, _after: None
        self.surprises = 0
        self.tally = Tally(turned_ms=clocks.now_ms())
        # A later life of the controller has begun: this one decides nothing any more.
        self.superseded = False
        # What the registry's last failure was; empty: it answers.
        self.registry_error = ""
        self._times = times
        self._asker = asker
        self._seed = seed
        self._heard: deque[Observation] = deque()
        self._wake = asyncio.Event()
        self._turned = asyncio.Condition()
        self._lives: dict[int, Life] = {}
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS_HELD)
        self._events_wake = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.keeper: RoomKeeper | None = None
        if room is not None:
            self.keeper = RoomKeeper(
                room, registry, lambda: None if self.superseded else self.state,
                lambda message: self.record("nodes", "fleet", message), times.room_ms,
            )  # fmt: skip

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, found: Iterable[Found] = (), endpoint: str = "") -> None:
        """Reads or seeds what is wanted, rediscovers workers (`found`: those that the caller has started), then runs.
        Raises Unavailable where the registry does not answer."""
        await self.registry.open()
        wanted = await self.registry.desired()
        if wanted.revision == 0:
            wanted = replace(wanted, prefill=self._seed[0], decode=self._seed[1])
        wanted = replace(wanted, controller_starts=wanted.controller_starts + 1, controller_endpoint=endpoint)
        stored = await self.registry.replace_desired(wanted, wanted.revision)
        self.state = replace(self.state, desired=stored)
        known = {item.worker_id: item for item in await self.hands.adopt(self._lost)}
        for record in await self.registry.workers():
            item = known.get(record.worker_id)
            if item is not None and not item.endpoint:  # it did not say in time where it is
                known[record.worker_id] = replace(item, endpoint=record.endpoint, draining=record.draining)
        known.update({item.worker_id: item for item in found})
        self._heard.extend(known.values())
        names = ", ".join(sorted(known)) or "none"
        self.record("controller", "fleet", f"start {stored.controller_starts}; workers found: {names}")
        turns = {"reconcile": self._reconcile, "ask workers": self._poll, "events": self._write_events}
        if self.keeper is not None:
            turns["nodes"] = self.keeper.turn
        self._loops = [
            asyncio.create_task(keep_going(turn, f"the controller's {name}", self._surprised), name=name)
            for name, turn in turns.items()
        ]

    async def stop(self) -> None:
        """Ends the controller, not the workers."""
        tasks = [*self._loops, *self._tasks]
        self._loops = []
        await end_tasks(tasks)
        if self.keeper is not None:
            await self.keeper.room.close()
        await self._asker.close()

    def row(self, worker_id: str) -> Row:
        """Raises NotFound."""
        row = self.state.rows.get(worker_id)
        if row is None:
            known = ", ".join(sorted(self.state.rows)) or "none"
            raise NotFound("unknown_worker", f"no worker {worker_id[:64]!r}; known: {known}", field="workers")
        return row

    @property
    def closed(self) -> frozenset[str]:
        """Ids of the nodes that were drained or cordoned."""
        return self.state.desired.avoided

    @property
    def room_error(self) -> str:
        """Why the nodes could not be made to fit; empty: they could, or are not this controller's."""
        return self.keeper.error if self.keeper is not None else ""

    async def check_room(self, counts: dict[Role, int]) -> None:
        """Raises NoCapacity where so many workers can have no place, nor nodes be made for them."""
        try:
            await self.hands.check_room(counts, self.closed)
        except NoCapacity:
            if self.keeper is None:
                raise
            await self.keeper.room.check(counts)

    def status_of(self, row: Row) -> tuple[worker_pb2.WorkerStatus | None, float]:
        """The last answer of this life and when it was asked for; None while it does not answer."""
        life = self._lives.get(row.life)
        return (life.status, life.asked_ms) if life is not None and row.alive else (None, 0.0)

    def hear(self, seen: Observation) -> None:
        self._heard.append(seen)
        self._wake.set()

    @property
    def events_waiting(self) -> int:
        """Events that the registry has not taken yet."""
        return len(self._events)

    async def turned(self, true: Callable[[State], bool], timeout_ms: float) -> bool:
        """Waits until `true` of the state after some turn."""
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._turned:
                await self._turned.wait_for(lambda: true(self.state))
        except TimeoutError:
            return False
        return True

    async def change(self, make: Callable[[Desired], Desired], change: Change) -> Desired:
        """Keeps what is wanted now; only then it counts. Raises Conflict where the caller expected another revision,
        Unavailable where the registry does not answer."""
        for _try in range(MAX_CHANGE_TRIES):
            current = await self._read_desired()
            _check_revision(current, change)
            wanted = make(current)
            try:
                stored = await self.registry.replace_desired(wanted, current.revision)
            except Conflict:
                continue  # somebody else changed it in between: judge anew
            self.state = replace(self.state, desired=stored)
            self._wake.set()
            return stored
        raise Unavailable("registry_busy", "what is wanted changes faster than this change can be made: try again")

    async def expect(self, change: Change) -> None:
        """Raises Conflict where the caller expects another revision; for changes that may turn out to be none."""
        if change.expected_revision:
            _check_revision(await self._read_desired(), change)

    def record(self, kind: str, subject: str, message: str, change: Change | None = None) -> None:
        """An event; kept as soon as the registry takes it."""
        actor, reason = (change.actor, change.reason) if change is not None else ("controller", "")
        self._keep(Event(0, kind, subject, actor, message, reason, revision=self.state.desired.revision))

    # --- turns --------------------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        try:
            await self._turn()
        except Exception as unexpected:
            self._surprised()
            surprise(unexpected, "a turn of the controller")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._times.reconcile_ms / 1000):
                await self._wake.wait()
        self._wake.clear()

    def _surprised(self) -> None:
        self.surprises += 1

    async def _turn(self) -> None:
        with contextlib.suppress(GenlockError):  # the last view counts on
            await self._read_desired()
        if self.superseded:
            return
        before = self.state
        heard = [self._heard.popleft() for _ in range(len(self._heard))]
        after, actions = reconcile(before, int(self.clocks.now_ms()), heard)
        self.state = after
        for action in actions:
            self._perform(action)
        self._sweep()
        self.tally.turn(before, after, self.clocks.now_ms())
        if after.rows != before.rows:
            self.on_change(before, after)
        if self.keeper is not None and (after.rows != before.rows or not self.keeper.awake):
            self.keeper.wake()
        async with self._turned:
            self._turned.notify_all()

    async def _read_desired(self) -> Desired:
        """What the registry wants, which counts from now on. A store that lost it gets back what this controller
        knows."""
        try:
            wanted = await self._agreed()
        except GenlockError as error:
            self.registry_error = error.message
            raise
        self.registry_error = ""
        if self.superseded:
            raise Unavailable("superseded", "a later life of the controller has taken over: ask that one")
        if wanted.revision > self.state.desired.revision:
            self.state = replace(self.state, desired=wanted)
        return wanted

    async def _agreed(self) -> Desired:
        """Judged by the state as it is after each wait: a change may have been kept and acknowledged meanwhile."""
        for _try in range(MAX_CHANGE_TRIES):
            stored = await self.registry.desired()
            ours = self.state.desired
            if stored.controller_starts > ours.controller_starts:
                self.superseded = True
            if self.superseded or not lost(ours, stored):
                return stored
            try:
                again = await self.registry.replace_desired(
                    refill(ours, stored, self.clocks.unix_ms()), stored.revision
                )
            except Conflict:
                continue  # what was read is no longer there
            self.tally.refills += 1
            told = f"lost revision {ours.revision}, had {stored.revision}: written again as {again.revision}"
            self.record("registry", "fleet", told)
            if self.state.desired is ours:
                return again
        raise Unavailable("registry_busy", "what is wanted changes faster than it can be read: try again")

    def _sweep(self) -> None:
        """Forgets lives that no row has any more."""
        present = {row.life for row in self.state.rows.values() if row.alive}
        for number in [key for key in self._lives if key not in present]:
            life = self._lives.pop(number)
            if life.asking is not None:
                life.asking.cancel()

    # --- asking -------------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        for row in list(self.state.rows.values()):
            if row.alive and row.endpoint:
                life = self._life(row.life)
                if life.asking is None or life.asking.done():
                    life.asking = self._spawn(self._ask(row, life), f"ask {row.worker_id}")
        await asyncio.sleep(self._times.poll_ms / 1000)

    async def _ask(self, row: Row, life: Life) -> None:
        try:
            await self._ask_status(row, life)
        except Exception as unexpected:
            self.surprises += 1
            self.hear(Silent(row.worker_id, row.life, surprise(unexpected, f"a question to {row.worker_id}").message))

    async def _ask_status(self, row: Row, life: Life) -> None:
        asked_ms = int(self.clocks.now_ms())
        try:
            status = await self._asker.status(row.endpoint, self._times.poll_timeout_ms)
        except GenlockError as error:
            life.status = None
            refused = isinstance(error, Unavailable)
            self.hear(Silent(row.worker_id, row.life, error.message[:256], refused=refused))
            return
        prefills = [other for other in self.state.of(Role.PREFILL) if other.alive and other.incarnation]
        peers = {other.worker_id: other.incarnation for other in prefills}
        told = told_of(status, row.worker_id, row.life, asked_ms, peers)
        if not row.incarnation or row.incarnation == status.incarnation:
            life.status, life.asked_ms = status, asked_ms
            await self._feed(row, life, status)
        self.hear(told)
        if status.proves_peers and not life.checking:
            untried = [other for other in prefills if told.tried.get(other.worker_id) != other.incarnation]
            if untried:
                life.checking = True
                self._spawn(self._check(row, life, untried), f"{row.worker_id} exchanges pages")

    async def _check(self, row: Row, life: Life, prefills: list[Row]) -> None:
        """Each exchange is tried once a life; a gateway that has asked for it already makes this a short answer."""
        try:
            for prefill in prefills:
                with contextlib.suppress(GenlockError):  # the next status tells
                    await self._asker.check(row.endpoint, prefill.endpoint, prefill.worker_id, CHECK_MS)
        finally:
            life.checking = False

    async def _feed(self, row: Row, life: Life, status: worker_pb2.WorkerStatus) -> None:
        """Tells a registry of this process alone what its workers cannot."""
        if not self._times.feed_ttl_ms or status.worker_id != row.worker_id:
            return
        now = self.clocks.unix_ms()
        life.started_unix_ms = life.started_unix_ms or now
        record = record_of(
            status, row.endpoint, node=row.node, pod="", told_ms=now, started_ms=life.started_unix_ms,
            stall_ms=self.state.policy.stall_ms,
        )  # fmt: skip
        record = replace(record, draining=record.draining or row.phase is Phase.DRAINING)
        with contextlib.suppress(GenlockError):  # told again at the next look
            await self.registry.put_worker(record, self._times.feed_ttl_ms)

    # --- doing --------------------------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        if isinstance(action, Record):
            self._keep(action.event)
            return
        # Made only when its task runs: one that is stopped before leaves nothing behind that nobody awaits.
        work: Callable[[], Awaitable[None]]
        if isinstance(action, Start):
            work = partial(self._start, action)
        elif isinstance(action, Drain):
            work = partial(self._drain, action)
        elif isinstance(action, Stop):
            work = partial(self._end, action, self.hands.stop)
        else:
            work = partial(self._end, action, self.hands.kill)
        task = self._spawn(self._guarded(work, action), f"{type(action).__name__} {action.worker_id}")
        if isinstance(action, Start):
            self._life(action.life).starting = task

    async def _guarded(self, work: Callable[[], Awaitable[None]], action: Start | Drain | Stop | Kill) -> None:
        """Nothing that an action raises ends the controller; the row's deadline goes on."""
        try:
            await work()
        except Exception as unexpected:
            self.surprises += 1
            error = surprise(unexpected, f"{type(action).__name__} of {action.worker_id}")
            if isinstance(action, Start):
                self.hear(StartFailed(action.worker_id, action.life, error.message))

    async def _start(self, action: Start) -> None:
        def lost(worker_id: str, detail: str) -> None:
            self.hear(Ended(worker_id, action.life, detail))

        limit_ms = self.state.policy.start_ms + START_MARGIN_MS
        try:
            async with asyncio.timeout(limit_ms / 1000):
                place = await self.hands.start(action.worker_id, action.role, lost, action.avoid)
        except TimeoutError:
            self.hear(StartFailed(action.worker_id, action.life, f"no answer within {limit_ms} ms"))
        except GenlockError as error:
            # It may lack a node because none could be made.
            why = filter(None, (error.message, self.room_error if isinstance(error, NoCapacity) else ""))
            self.hear(StartFailed(action.worker_id, action.life, "; ".join(why)))
        else:
            self.hear(Started(action.worker_id, action.life, place.endpoint, place.node, place.node_id))

    async def _drain(self, action: Drain) -> None:
        """Until the worker has heard it, at most until the drain's deadline."""
        while (left_ms := action.deadline_ms - self.clocks.now_ms()) > 0:
            row = self.state.rows.get(action.worker_id)
            if row is None or row.life != action.life or not row.endpoint:
                return
            # A prefill worker takes handoffs to its end: decode workers have been promised them.
            open_ms = (
                int(left_ms) if row.role is Role.PREFILL else max(0, row.open_until_ms - int(self.clocks.now_ms()))
            )
            try:
                await self._asker.drain(row.endpoint, open_ms, int(min(DRAIN_CALL_MS, max(left_ms, 1))))
                return
            except GenlockError as error:
                log.info("%s has not heard of its drain: %s", action.worker_id, error.message)
                await asyncio.sleep(DRAIN_RETRY_S)

    async def _end(self, action: Stop | Kill, end: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        life = self._lives.get(action.life)
        starting = life.starting if life is not None else None
        if starting is not None and not starting.done():
            starting.cancel()  # its launcher takes back what it began
            await asyncio.wait([starting], timeout=self.state.policy.stop_ms / 1000)
        row = self.state.rows.get(action.worker_id)
        with contextlib.suppress(NotFound):
            await end(action.worker_id)
        self.hear(Ended(action.worker_id, action.life, row.reason if row is not None else ""))
        if row is not None and row.incarnation:
            with contextlib.suppress(GenlockError):  # else it runs out by itself
                await self.registry.remove_worker(action.worker_id, row.incarnation)

    def _lost(self, worker_id: str, detail: str) -> None:
        """An adopted worker ended."""
        row = self.state.rows.get(worker_id)
        if row is not None:
            self.hear(Ended(worker_id, row.life, detail))

    # --- events -------------------------------------------------------------------------------------------------------

    def _keep(self, event: Event) -> None:
        self._events.append(replace(event, at_ms=self.clocks.unix_ms()))
        self._events_wake.set()

    async def _write_events(self) -> None:
        """In order; a registry that is away gets them later, the newest MAX_EVENTS_HELD of them. One that surprises is
        dropped: else none of the later ones would ever be written."""
        while not self._events:
            self._events_wake.clear()
            await self._events_wake.wait()
        while self._events:
            event, through = self._events[0], True
            try:
                await self.registry.append_event(event)
                self.tally.events += 1
            except GenlockError:
                through = False
                await asyncio.sleep(1.0)
            finally:
                if through and self._events and self._events[0] is event:
                    self._events.popleft()

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _life(self, number: int) -> Life:
        return self._lives.setdefault(number, Life())

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _check_revision(current: Desired, change: Change) -> None:
    if change.expected_revision and current.revision != change.expected_revision:
        raise revision_moved(current.revision, change.expected_revision)
