"""A simulated decode worker: the production core, guard, receiver and handoff rules, and what its shell would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decode.core import (
    DecodeCore,
    DecodeLimits,
    Emitted,
    Failed,
    Finished,
    Outcome,
    Preempted,
    PrefillWanted,
    StartHandoff,
)
from decode.handoff import Accepted, Completed, HandoffEvent, HandoffReceiver, PagePromised
from decode.peers import PeerTable
from kvstore.errors import Cancelled, GenlockError, PageFault, TransferError, TransferTimeout, Unavailable
from kvstore.guard import Published
from kvstore.receive import PageOrder, PageReceiver, Pull
from kvstore.registry import IncarnationRegistry
from kvstore.step import StepPlan
from kvstore.transfer.base import Peer
from kvstore.transfer.faults import Ending
from kvstore.transfer.memory import MemoryTransfer
from model.ticket import finish_reason
from sim.compute import EOS, Compute, SimToken
from sim.net import Call
from sim.prefill_side import PrefillWorker
from sim.steps import StepDriver
from sim.worker import Work, Worker

if TYPE_CHECKING:
    from sim.callers import Places, Request
    from sim.world import World

PULL_TIMEOUT_MS = 60
HANG_UP_MS = 40
FINISH_MS = 3  # what a worker needs at most between the data and the source's tags


_EVENTS: dict[type[object], str] = {Accepted: "accepted", PagePromised: "page", Completed: "completed"}


def kind_of(outcome: Outcome[SimToken]) -> str:
    """What happened to a request, as the coverage names it."""
    if isinstance(outcome, Failed):
        return outcome.error.reason if outcome.error.reason in ("cancelled", "deadline_exceeded") else "failed"
    return {Emitted: "token", Finished: "finished", Preempted: "preempted"}[type(outcome)]


@dataclass
class Copy:
    """A pull under way, and what the simulator knows of it."""

    pull: Pull
    attempt: Attempt
    source_live: bool | None = None  # whether every source page was live when the last byte landed
    arrived: bool = False  # its end was seen
    finished: bool = False
    begun_ms: int = 0
    quiet_ms: int | None = None  # when it could write no more and its end was known


class DecodeWorker(Worker):
    role = "decode"

    def __init__(self, world: World, index: int, limits: DecodeLimits) -> None:
        super().__init__(world, f"decode-{index}")
        self.layout = world.kit.layouts[world.shape.layout]
        self.compute = Compute(self.layout)
        self.limits = limits
        self.start()

    def start(self) -> None:
        world = self.world
        self.begin_life(self.layout, world.shape.decode_slots)
        self._core: DecodeCore[SimToken] = DecodeCore(
            self.guard, world.keyer, self.limits, (EOS,), world.dice.stream("ids").randbytes
        )
        self.receiver = PageReceiver(self.guard, self.engine)
        self.registry = IncarnationRegistry()
        self.peers = PeerTable(self.engine, self.registry)
        self.requests: dict[int, Request] = {}
        self.places: dict[int, Places] = {}  # who computes each request, as this worker was told
        self.asked_ms: dict[int, int] = {}  # preempted ones that wait for that, since when in true time
        self.stages: dict[int, str] = {}  # how far each request has come, for the coverage
        self.attempts: dict[int, Attempt] = {}
        self.copies: list[Copy] = []  # not yet quiet
        self.steps = StepDriver(self)
        self.schedule_tick()

    @property
    def core(self) -> DecodeCore[SimToken]:
        self.touched = True
        return self._core

    @property
    def working(self) -> bool:
        core = self._core
        landing = any(t.due_ms is not None for t in self._transfers())
        pulling = not all(c.finished for c in self.copies)
        return bool(core.waiting or core.running or landing or pulling or not self.steps.idle)

    def told_work(self) -> Work:
        owed: Counter[str] = Counter()
        for number, places in self.places.items():
            held = self._core.request(number)
            if held is not None and not held.joined and held.routed:
                owed[places.prefill.name] += 1
        return Work(self._core.running, self._core.waiting, owed=owed)

    def cut(self) -> None:
        error = Unavailable("drain_cut", "the decode worker was drained and did not finish")
        for number in list(self.requests):
            self.deliver(self.core.fail(number, error))

    def busy(self, page_id: int) -> bool:
        if page_id in self.steps.writing:
            return True
        return any(
            page_id == order.local.page_id
            for copy in self.copies if not copy.pull.transfer.quiesced()
            for order in copy.pull.orders
        )  # fmt: skip

    def landing(self) -> list[int]:
        return [order.local.page_id for copy in self.copies for order in copy.pull.orders]

    def _transfers(self) -> list[MemoryTransfer]:
        found = [c.pull.transfer for c in self.copies if not c.pull.transfer.quiesced()]
        return [t for t in found if isinstance(t, MemoryTransfer)]

    # --- callers ----------------------------------------------------------------------------------------------------

    def on_submit(self, request: Request, places: Places) -> None:
        world = self.world
        try:
            self.admission.require()
            number = self.core.submit(request.ticket, self.now, self.now + request.deadline_ms)
        except GenlockError as error:
            world.tally.reasons[error.reason] += 1
            world.on_end(request, error)
            return
        self.requests[number], self.places[number] = request, places
        self.stages[number] = "waiting"
        request.at_decode = (self, self.life, number)
        self.steps.kick()

    def on_assigned(self, number: int, attempt: int, answer: Places | GenlockError) -> None:
        """A gateway's answer: who computes a preempted request again, or why nobody does."""
        if isinstance(answer, GenlockError):
            self.deliver(self.core.refused(number, attempt, answer))
        elif self.core.assigned(number, attempt):
            self.world.tally.meet("request", self.stages[number], "assigned")
            self.places[number] = answer
            del self.asked_ms[number]
        self.steps.kick()

    def abandon(self, request_no: int) -> None:
        self.on_cancel(request_no)

    def on_cancel(self, number: int) -> None:
        self.deliver(self.core.fail(number, Cancelled("cancelled", "the caller went away")))
        self.steps.kick()

    def deliver(self, outcomes: Sequence[Outcome[SimToken]]) -> None:
        world = self.world
        for outcome in outcomes:
            number = outcome.request_no
            request = self.requests[number]
            world.tally.meet("request", self.stages[number], kind_of(outcome))
            if isinstance(outcome, Emitted):
                if not request.given_up:
                    world.on_token(request, outcome.token.token_id)
                continue
            attempt = self.attempts.pop(number, None)
            if attempt is not None:
                attempt.close()
            if isinstance(outcome, Preempted):
                world.tally.reasons["preempted"] += 1
                self.stages[number] = "waiting"
                continue
            del self.requests[number], self.stages[number], self.places[number]
            self.asked_ms.pop(number, None)
            error = None if isinstance(outcome, Finished) else outcome.error
            if error is not None:
                world.tally.reasons[error.reason] += 1
            if not request.given_up:
                world.on_end(request, error)

    # --- steps ------------------------------------------------------------------------------------------------------

    def turn(self) -> StepPlan | None:
        self.housekeeping()
        for start in self.core.admit(self.now):
            if isinstance(start, PrefillWanted):
                self.asked_ms[start.request_no] = self.world.heap.now_ms
                self.world.callers.wanted(self.requests[start.request_no], start.attempt)
                continue
            assert start.queue_ms >= 0, "a gateway takes no negative durations"
            places = self.places[start.request_no]
            attempt = Attempt(self, start, places.prefill, places.prefill_endpoint)
            self.attempts[start.request_no] = attempt
            self.stages[start.request_no] = "handoff"
            attempt.open()
        plan, outcomes = self.core.plan(self.now)
        self.deliver(outcomes)
        return plan

    def apply(self, plan: StepPlan, published: Sequence[Published[SimToken]]) -> None:
        self.deliver(self.core.apply(plan, published, self.now))

    def tick(self) -> None:
        self.housekeeping()
        self.steps.kick()

    def housekeeping(self) -> None:
        if self.receiver.unproved_transfers:
            self.receiver.sweep()
        self.drop_proved()
        self.deliver(self.core.expire(self.now))

    def drop_proved(self) -> None:
        """After each sweep: the copies that are left are exactly those that hold pages."""
        self.copies = [c for c in self.copies if not (c.finished and c.pull.transfer.quiesced())]


class Attempt:
    """One handoff of one request: what `decode/pull.py` does, as events."""

    def __init__(self, decode: DecodeWorker, start: StartHandoff, prefill: PrefillWorker, endpoint: str) -> None:
        self.decode = decode
        self.start = start
        self.prefill = prefill
        self.endpoint = endpoint  # the route's; the worker may have moved since
        self.world = decode.world
        self.rules: HandoffReceiver[SimToken] = HandoffReceiver(
            start.ticket.ticket_id, decode.guard.layout, start.expected, start.local, decode.guard.checks
        )
        self.closed = False
        self._orders: list[PageOrder] = []
        self._peer: Peer | None = None
        self._call: Call | None = None
        self._pulling = False

    @property
    def request_no(self) -> int:
        return self.start.request_no

    def open(self) -> None:
        self._call = self.world.net.call(self, self.decode, self.prefill, self.endpoint, self.start.ticket)

    def close(self) -> None:
        """The request ended or went on: prefill's call has no more use. A copy under way goes on."""
        self.closed = True
        if self._call is not None:
            self.world.net.hang_up(self._call)

    # --- what prefill says --------------------------------------------------------------------------------------------

    def on_event(self, event: HandoffEvent[SimToken]) -> None:
        if self.closed:
            return
        self.world.tally.meet("handoff", self.rules.state, _EVENTS[type(event)])
        try:
            order = self.rules.on_event(event)
            if isinstance(event, Accepted):
                self._peer = self.decode.peers.connect(self.prefill.name, event.export)
                self._renew_later(event)
        except GenlockError as error:
            self._refused(error)
            return
        if order is not None:
            self._orders.append(order)
        if self.world.dice.hit("release_early"):
            self._release(suspect=False)
        self._pull_soon()
        self._check_ready()

    def on_end(self, error: GenlockError | None) -> None:
        if self.closed:
            return
        self.world.tally.meet("handoff", self.rules.state, "error" if error else "end")
        try:
            self.rules.on_end(error)
        except GenlockError as ended:
            self._refused(ended)
            return
        if self.rules.completed is None:  # only a control gets here: an end taken for completion
            if not self.rules.ready:
                self.world.laws.broken("waits_for_nobody", f"{self.decode.name} request {self.request_no}")
            self.rules.completed = Completed(b"", 0, SimToken(EOS), 0.0, 0.0)
            self._check_ready()

    def _renew_later(self, accepted: Accepted) -> None:
        self.decode.later(max(10, accepted.lease_ms // 3), "renew-timer", self._renew, accepted)

    def _renew(self, accepted: Accepted) -> None:
        if not self.closed and self._call is not None:
            self.world.net.renew(self._call, accepted.handoff_id)
            self._renew_later(accepted)

    # --- pulls --------------------------------------------------------------------------------------------------------

    def _pull_soon(self) -> None:
        if self._orders and not self._pulling:
            self._pulling = True
            self.decode.later(self.world.dice.stream("pulls").randrange(4), "pull", self._begin)

    def _begin(self) -> None:
        world, decode = self.world, self.decode
        batch, self._orders = tuple(self._orders), []
        if self.closed or not batch:
            self._pulling = False
            return
        assert self._peer is not None, "pages are only promised after the handoff was accepted"
        self._lease_may_end("before the pull")
        world.copies.starting = (self.prefill, decode)
        world.land()  # the fabric's clock is what its copies start from
        try:
            pull = decode.receiver.begin(self._peer, batch, self.request_no, self.start.expected)
        except GenlockError as error:
            self._pulling = False
            self._lose(error)
            self._refused(error)
            return
        world.copies.judge_begun(self._peer, batch, self.start.expected)
        copy = Copy(pull, self, begun_ms=world.heap.now_ms)
        decode.copies.append(copy)
        assert isinstance(pull.transfer, MemoryTransfer)
        due = pull.transfer.due_ms
        wait = PULL_TIMEOUT_MS if due is None else max(0, min(due - world.heap.now_ms, PULL_TIMEOUT_MS))
        if world.copies.last_ending not in (Ending.HONEST, Ending.DROP):
            wait = world.dice.stream("pulls").randrange(wait + 1)
        if world.dice.hit("lease_expires"):
            decode.later(world.dice.stream("lease_expires/when").randrange(wait + 1), "lease", self._end_lease, copy)
        if due is not None:
            world.heap.after(due - world.heap.now_ms, "land", world.land)
        decode.later(wait, "pulled", self._judge_data, copy)

    def _judge_data(self, copy: Copy) -> None:
        """The pull's thread works on, whether or not its request has ended."""
        world, decode = self.world, self.decode
        world.land()
        copy.arrived = True
        world.tally.operations["verify"] += len(copy.pull.orders)
        try:
            decode.receiver.judge_data(copy.pull, 0)
        except GenlockError as error:
            self._end_copy(copy)
            self._lose(error)
            self._refused(error)
            return
        self._lease_may_end("between data and tags")
        decode.later(world.dice.stream("tags").randrange(FINISH_MS + 1), "tags", self._adopt, copy)

    def _adopt(self, copy: Copy) -> None:
        world, decode, batch = self.world, self.decode, copy.pull.orders
        try:
            decode.receiver.adopt(copy.pull, 0)
        except GenlockError as error:
            self._end_copy(copy)
            self._lose(error)
            self._refused(error)
            return
        self._end_copy(copy)
        world.copies.judge_adopted(copy)
        if self.closed:
            return
        self.rules.verified(batch)
        self._pull_soon()
        self._check_ready()

    def _end_copy(self, copy: Copy) -> None:
        copy.finished, self._pulling = True, False
        self.decode.receiver.end(copy.pull)
        self.decode.drop_proved()

    def _lease_may_end(self, gap: str) -> None:
        if self.world.dice.hit("lease_expires"):
            self.world.mischief.end_lease(self, gap)

    def _end_lease(self, copy: Copy) -> None:
        if not copy.arrived:
            self.world.mischief.end_lease(self, "during the copy")

    def _lose(self, error: GenlockError) -> None:
        """As the shell does: a read that failed by itself forgets the connection."""
        if self._peer is not None and isinstance(error, TransferError) and not isinstance(error, TransferTimeout):
            self.decode.peers.lost(self._peer)

    def _check_ready(self) -> None:
        done, ticket = self.rules.completed, self.start.ticket
        if done is None or self.closed:
            return
        ends = finish_reason(done.first.token_id, ticket.generated_tokens + 1, ticket.sampling, (EOS,)) is not None
        if not (self.rules.ready or ends):
            return
        if self.rules.ready:
            self._lease_may_end("before the release")
        self._release(suspect=False)
        self.decode.attempts.pop(self.request_no, None)
        self.decode.stages[self.request_no] = "joined"
        self.closed = True
        if self._call is not None:  # it stays open for the release to arrive
            self.decode.later(HANG_UP_MS, "hang-up", self.world.net.hang_up, self._call)
        self.decode.deliver(self.decode.core.joined(self.request_no, done.first, self.decode.now))
        self.decode.steps.kick()

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _refused(self, error: GenlockError) -> None:
        """A check said no; where the request has ended already nobody else is told."""
        self.world.tally.rejects[error.reason] += 1
        if not self.closed:
            self.fail(error)

    def fail(self, error: GenlockError) -> None:
        self.world.tally.reasons[error.reason] += 1
        if isinstance(error, PageFault):
            self._release(suspect=True)
        self.decode.deliver(self.decode.core.fail(self.request_no, error))
        self.decode.steps.kick()

    def _release(self, *, suspect: bool) -> None:
        accepted = self.rules.accepted
        if accepted is not None and self._call is not None:
            self.world.net.release(self._call, accepted.handoff_id, suspect)
