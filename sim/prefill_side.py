"""A simulated prefill worker: the production core and guard, and what its gRPC face and step thread would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from decode.handoff import Accepted, Completed, PagePromised
from kvstore.errors import Cancelled, GenlockError, NotFound, Unavailable
from kvstore.guard import Published
from kvstore.step import StepPlan
from model.ticket import Ticket
from prefill.core import Event, HandoffCompleted, HandoffFailed, PageSealed, PrefillCore, PrefillLimits, PrefillSequence
from sim.compute import Compute, SimToken
from sim.net import Call
from sim.steps import StepDriver
from sim.worker import Work, Worker

if TYPE_CHECKING:
    from sim.world import World


class PrefillWorker(Worker):
    role = "prefill"

    def __init__(self, world: World, index: int, limits: PrefillLimits) -> None:
        super().__init__(world, f"prefill-{index}")
        self.layout, self._tells_layout = world.prefill_layout(index)
        self.compute = Compute(self.layout)
        self.limits = limits
        self.start()

    def start(self) -> None:
        """A new life: empty pool, new incarnation, same name and slots."""
        world = self.world
        self.begin_life(self.layout, world.shape.prefill_slots)
        self.calls: dict[int, Call] = {}
        self.promised_ms: dict[bytes, int] = {}  # when each handoff was last promised anything, in true time
        self._core: PrefillCore[SimToken] = PrefillCore(
            self.guard, world.keyer, self.limits, world.dice.stream("ids").randbytes
        )
        self.steps = StepDriver(self)
        self.schedule_tick()

    @property
    def core(self) -> PrefillCore[SimToken]:
        self.touched = True
        return self._core

    @property
    def working(self) -> bool:
        core = self._core
        return bool(core.waiting or core.running or len(core.leases)) or not self.steps.idle

    def told_work(self) -> Work:
        return Work(self._core.running, self._core.waiting, len(self._core.leases))

    def told_layout(self) -> str:
        return super().told_layout() if self._tells_layout else ""

    def cut(self) -> None:
        for number, call in list(self.calls.items()):
            self.core.cancel(number)
            self.world.net.end(call, Unavailable("drain_cut", "the prefill worker was drained and did not finish"))
        self.calls.clear()

    # --- commands ---------------------------------------------------------------------------------------------------

    def on_call(self, call: Call, ticket: Ticket) -> None:
        try:
            self.admission.require()
            seq = self.core.submit(ticket, self.now)
        except GenlockError as error:
            self.world.tally.reasons[error.reason] += 1
            self.world.net.end(call, error)
            return
        self.world.judge_id(seq.handoff_id, f"a handoff of {self.name}")
        call.request_no, call.handoff_id = seq.request_no, seq.handoff_id
        self.calls[seq.request_no] = call
        self.promised_ms[seq.handoff_id] = self.world.heap.now_ms
        accepted = Accepted(seq.handoff_id, ticket.ticket_id, self.guard.export, self.limits.lease_ms)
        self.world.net.send(call, accepted)
        self.steps.kick()

    def on_cancel(self, call: Call) -> None:
        self.core.cancel(call.request_no)
        self.calls.pop(call.request_no, None)
        self.steps.kick()

    def abandon(self, request_no: int) -> None:
        call = self.calls.get(request_no)
        if call is not None:
            self.world.net.end(call, Cancelled("cancelled", "the caller went away"))
            self.on_cancel(call)

    def on_renew(self, call: Call, handoff_id: bytes) -> None:
        def work() -> None:
            self.core.renew(handoff_id, self.now)
            self.promised_ms[handoff_id] = self.world.heap.now_ms

        self._known(call, work)

    def on_release(self, call: Call, handoff_id: bytes, suspect: bool) -> None:
        def work() -> None:
            self.core.release(handoff_id, suspect=suspect)
            self.world.net.end(call, None)

        self._known(call, work)
        self.calls.pop(call.request_no, None)
        self.steps.kick()

    def _known(self, call: Call, work: Callable[[], None]) -> None:
        try:
            work()
        except NotFound as error:
            self.world.tally.reasons[error.reason] += 1
            self.world.net.end(call, error)

    # --- steps ------------------------------------------------------------------------------------------------------

    def turn(self) -> StepPlan | None:
        self._send(self.core.expire(self.now))
        plan, events = self.core.plan(self.now)
        self._send(events)
        return plan

    def apply(self, plan: StepPlan, published: Sequence[Published[SimToken]]) -> None:
        self._send(self.core.apply(plan, published, self.now))

    def tick(self) -> None:
        self._send(self.core.expire(self.now))
        self.steps.kick()

    def _send(self, events: Sequence[Event[SimToken]]) -> None:
        net = self.world.net
        for event in events:
            call = self.calls.get(event.request_no)
            seq = self.core.sequence(event.request_no)
            if isinstance(event, HandoffFailed):
                self.world.tally.reasons[event.error.reason] += 1
                if call is not None:
                    net.end(call, event.error)
                    del self.calls[event.request_no]
                continue
            if isinstance(event, PageSealed) and seq is not None:
                self.promised_ms[seq.handoff_id] = self.world.heap.now_ms
                self._judge(seq, event)
            if call is None:
                continue
            if isinstance(event, HandoffCompleted):
                assert min(event.queue_ms, event.prefill_ms) >= 0, "decode takes no negative durations"
                done = Completed(call.handoff_id, event.page_count, event.first, event.queue_ms, event.prefill_ms)
                net.send(call, done)
            else:
                net.send(call, PagePromised(call.handoff_id, event.desc))

    def _judge(self, seq: PrefillSequence, event: PageSealed) -> None:
        """What is promised holds this request's KV, by the tokens alone."""
        desc, world = event.desc, self.world
        rows = desc.valid_rows
        held = self.compute.kv_of_page(self.guard.bytes_of(desc.ref.page_id), rows)
        wanted = world.oracle(seq.ticket.token_ids).kv(desc.first_position, desc.first_position + rows)
        world.laws.require(held == wanted, "sealed_wrong_bytes", f"{self.name} page {desc.ref.page_id}")
