"""Simulated calls from decode to prefill: ordered streams that can be slow, cut, crossed and altered."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from decode.handoff import Accepted, Completed, HandoffEvent, PagePromised
from kvstore.descriptor import PageDescriptor
from kvstore.errors import GenlockError, Unavailable
from kvstore.ids import Tag
from model.ticket import Ticket
from sim.compute import SimToken

if TYPE_CHECKING:
    from sim.decode_side import Attempt, DecodeWorker
    from sim.prefill_side import PrefillWorker
    from sim.world import World

_WIDE = 1 << 61


@dataclass
class Call:
    """One handoff call. Both ends name a life of their worker; what comes for another life is lost."""

    number: int
    decode: DecodeWorker
    decode_life: int
    prefill: PrefillWorker
    prefill_life: int
    attempt: Attempt
    request_no: int = 0  # at prefill, once submitted
    handoff_id: bytes = b""
    ended: bool = False  # prefill's end was sent
    over: bool = False  # decode is not interested any more
    up_ms: int = 0
    down_ms: int = 0


class Net:
    """All open calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.dice
        self._rng = world.dice.stream("net")
        self._number = 0
        self.open: dict[int, Call] = {}
        self._completions: deque[Completed[SimToken]] = deque(maxlen=16)

    def call(
        self, attempt: Attempt, decode: DecodeWorker, prefill: PrefillWorker, endpoint: str, ticket: Ticket
    ) -> Call:
        self._number += 1
        call = Call(self._number, decode, decode.life, prefill, prefill.life, attempt)
        self.open[call.number] = call
        self._world.judge_id(ticket.ticket_id, f"an attempt at {decode.name}")
        if not prefill.alive or prefill.endpoint != endpoint:
            self.end(call, Unavailable("prefill_unreachable", "nobody answers"))
        elif not self._dice.hit("call_lost"):
            self._down(call, "call", prefill.on_call, call, ticket)
        return call

    # --- down: decode to prefill ----------------------------------------------------------------------------------

    def release(self, call: Call, handoff_id: bytes, suspect: bool) -> None:
        if self._dice.hit("release_lost"):
            return
        for _ in range(2 if self._dice.hit("release_twice") else 1):
            self._down(call, "release", call.prefill.on_release, call, handoff_id, suspect)

    def renew(self, call: Call, handoff_id: bytes) -> None:
        if not self._dice.hit("renew_lost"):
            self._down(call, "renew", call.prefill.on_renew, call, handoff_id)

    def hang_up(self, call: Call) -> None:
        """Decode ends the call; prefill sees a cancel, unless it is lost."""
        if call.over:
            return
        call.over = True
        self.open.pop(call.number, None)
        if self._dice.hit("cancel_lost"):
            return
        for _ in range(2 if self._dice.hit("cancel_twice") else 1):
            self._down(call, "cancel", call.prefill.on_cancel, call)

    def _down(self, call: Call, name: str, method: Any, *args: Any) -> None:
        world = self._world
        call.down_ms = max(call.down_ms, world.heap.now_ms + self._rng.randrange(4) + world.blocked_ms(call))
        world.heap.after(call.down_ms - world.heap.now_ms, name, self._arrive_down, call, method, args)

    def _arrive_down(self, call: Call, method: Any, args: tuple[Any, ...]) -> None:
        if call.prefill.life == call.prefill_life and call.prefill.alive:
            method(*args)

    # --- up: prefill to decode ------------------------------------------------------------------------------------

    def send(self, call: Call, event: HandoffEvent[SimToken]) -> None:
        dice = self._dice
        if call.ended or call.over:
            return
        if dice.hit("stream_cut"):
            self._broken(call, None)
            return
        if dice.hit("stream_error"):
            self._broken(call, Unavailable("stream_broken", "the connection was reset"))
            return
        if dice.hit("event_lost"):
            return
        event = self._altered(call, event)
        if isinstance(event, Completed):
            event = self._other_completion(event)
        if dice.hit("event_crossed"):
            call, event = self._crossed(call, event)
        for _ in range(2 if dice.hit("event_twice") else 1):
            self._up(call, "event", event)

    def end(self, call: Call, error: GenlockError | None) -> None:
        """Prefill's side of the stream ends."""
        if not call.ended:
            call.ended = True
            self._up(call, "end", error)

    def prefill_lost(self, prefill: PrefillWorker, how: str) -> None:
        for call in list(self.open.values()):
            if call.prefill is prefill:
                self.end(call, Unavailable(f"prefill_{how}", "the prefill worker is gone"))

    def decode_lost(self, decode: DecodeWorker) -> None:
        for call in list(self.open.values()):
            if call.decode is decode:
                self.hang_up(call)

    def _broken(self, call: Call, error: GenlockError | None) -> None:
        self.end(call, error)
        if not self._dice.hit("cancel_lost"):
            self._down(call, "cancel", call.prefill.on_cancel, call)

    def _up(self, call: Call, name: str, message: HandoffEvent[SimToken] | GenlockError | None) -> None:
        world = self._world
        slow = self._rng.randrange(80) if self._dice.hit("stream_slow") else 0
        at_ms = max(call.up_ms, world.heap.now_ms + self._rng.randrange(3) + slow + world.blocked_ms(call))
        if self._dice.hit("events_reordered"):
            at_ms += self._dice.stream("events_reordered/by").randrange(1, 12)  # and later ones may overtake it
        else:
            call.up_ms = at_ms
        world.heap.after(at_ms - world.heap.now_ms, name, self._arrive_up, call, name, message)

    def _arrive_up(self, call: Call, name: str, message: Any) -> None:
        if call.over or call.decode.life != call.decode_life or not call.decode.alive:
            return
        if name == "end":
            call.attempt.on_end(message)
        else:
            call.attempt.on_event(message)

    def _crossed(self, call: Call, event: HandoffEvent[SimToken]) -> tuple[Call, HandoffEvent[SimToken]]:
        """The event goes to another call."""
        others = [c for c in self.open.values() if c.decode is call.decode and c is not call]
        return (self._dice.stream("event_crossed/which").choice(others) if others else call), event

    def _other_completion(self, event: Completed[SimToken]) -> Completed[SimToken]:
        """What another handoff of as many pages was completed with."""
        alike = [c for c in self._completions if c.page_count == event.page_count and c.first != event.first]
        self._completions.append(event)
        if alike and self._dice.hit("completion_crossed"):
            return self._dice.stream("completion_crossed/which").choice(alike)
        return event

    # --- what is sent may be wrong --------------------------------------------------------------------------------

    def _altered(self, call: Call, event: HandoffEvent[SimToken]) -> HandoffEvent[SimToken]:
        if isinstance(event, PagePromised) and self._dice.hit("foreign_page"):
            found = self._foreign(call, event.desc)
            if found is not None:
                return replace(event, desc=found)
        if not self._dice.hit("event_altered"):
            return event
        rng = self._dice.stream("event_altered/how")
        if isinstance(event, Accepted):
            return replace(event, ticket_id=rng.randbytes(16))
        if rng.random() < 0.1:
            return replace(event, handoff_id=rng.randbytes(16))
        if isinstance(event, Completed):
            return replace(event, page_count=event.page_count + rng.choice((-1, 1)))
        return replace(event, desc=self._alter(call, event.desc))

    def _alter(self, call: Call, desc: PageDescriptor) -> PageDescriptor:
        rng = self._dice.stream("event_altered/how")
        slots, (page_id, tag) = call.prefill.guard.slots, desc.ref
        made: dict[str, Any] = rng.choice((
            {"ref": desc.ref._replace(page_id=page_id + slots)},
            {"ref": desc.ref._replace(page_id=rng.choice((-1, slots, _WIDE)))},
            {"ref": desc.ref._replace(page_id=rng.randrange(slots))},
            {"ref": desc.ref._replace(tag=Tag(tag.incarnation, tag.generation + rng.choice((-2, 2))))},
            {"ref": desc.ref._replace(tag=Tag(rng.randrange(1, _WIDE), tag.generation))},
            {"logical_index": desc.logical_index + rng.choice((-1, 1))},
            {"first_position": desc.first_position + rng.choice((-4, 4, 1))},
            {"valid_rows": desc.valid_rows + rng.choice((-1, 1))},
            {"byte_length": rng.choice((0, 128, desc.byte_length * 2))},
            {"layout_fingerprint": desc.layout_fingerprint ^ 1},
            {"prefix_key": rng.randbytes(32)},
            {"digest": desc.digest ^ (1 << rng.randrange(60))},
        ))  # fmt: skip
        return replace(desc, **made)

    def _foreign(self, call: Call, desc: PageDescriptor) -> PageDescriptor | None:
        """Another prompt's page that is true in everything but whose it is."""
        guard = call.prefill.guard
        found = [
            d for ref, d in guard.ledger.items()
            if d.prefix_key != desc.prefix_key and d.valid_rows == desc.valid_rows
            and d.first_position == desc.first_position and guard.is_live(ref)
        ]  # fmt: skip
        return self._dice.stream("foreign_page/which").choice(found) if found else None
