"""Both cores over real guards and the memory engine, with a model so small that its answers are computed by hand.

A step's output is the mean of the token values that it attends to (tests/support/kv_world.py); the next token follows
from that mean and the length. One foreign, missing or stale page gives another token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
from kvstore.errors import GenlockError
from kvstore.guard import Published
from kvstore.step import StepPlan
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from model.sampling import SamplingParams
from model.ticket import Ticket, finish_reason
from prefill.core import HandoffCompleted, HandoffFailed, PageSealed, PrefillCore, PrefillLimits, PrefillSequence
from tests.support.kv_world import Moments, World, make_guard, make_keyer, run_step

EOS = 3


@dataclass(frozen=True)
class Token:
    token_id: int


def next_token(mean: float, length: int) -> int:
    return (math.floor(mean * 16 + 0.3) * 7 + length) % 60 + 4


def expected_answer(prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
    """What a right cluster answers."""
    ids = list(prompt)
    while True:
        ids.append(next_token(sum(ids) / len(ids), len(ids)))
        if finish_reason(ids[-1], len(ids) - len(prompt), sampling, {EOS}) is not None:
            return ids[len(prompt) :]


def counting_ids() -> Callable[[int], bytes]:
    counter = itertools.count(1)
    return lambda size: next(counter).to_bytes(size, "little")


def make_ticket(tokens: Sequence[int], max_tokens: int = 4, tenant: str = "t", **sampling: object) -> Ticket:
    params = replace(SamplingParams(), max_tokens=max_tokens, **sampling)
    return Ticket(b"ticket-of-a-test", tenant, tuple(tokens), params, "rev", "tok")


def computed(plan: StepPlan, guard: object, moments: Moments | None = None) -> list[Published[Token]]:
    """One step through the guard."""
    means = run_step(guard, plan, moments)  # type: ignore[arg-type]
    out = []
    for row in plan.rows:
        result = means[row.request_no]
        token = None if result.output is None else Token(next_token(result.output, row.context_len))
        out.append(Published(row.request_no, token if row.wants_logits else None, result.error))
    return out


@dataclass
class PrefillSide:
    """A prefill core and what became of its events."""

    slots: int = 16
    limits: PrefillLimits = field(default_factory=lambda: PrefillLimits(chunk_tokens=8))
    max_cached_pages: int | None = None
    world: World | None = None
    now: int = 0

    def __post_init__(self) -> None:
        self.guard = (
            make_guard(MemoryEngine(MemoryFabric(), "prefill"), 11, slots=self.slots)
            if self.world is None
            else self.world.source
        )
        self.core: PrefillCore[Token] = PrefillCore(
            self.guard, make_keyer(), self.limits, counting_ids(), max_cached_pages=self.max_cached_pages
        )
        self.sealed: dict[int, list] = {}
        self.done: dict[int, HandoffCompleted[Token]] = {}
        self.failed: dict[int, GenlockError] = {}

    def submit(self, tokens: Sequence[int], tenant: str = "t") -> PrefillSequence:
        return self.core.submit(make_ticket(tokens, tenant=tenant), self.now)

    def take(self, events) -> None:
        for event in events:
            if isinstance(event, PageSealed):
                self.sealed.setdefault(event.request_no, []).append(event.desc)
            elif isinstance(event, HandoffCompleted):
                self.done[event.request_no] = event
            else:
                assert isinstance(event, HandoffFailed)
                self.failed[event.request_no] = event.error

    def step(self, moments: Moments | None = None) -> StepPlan | None:
        self.take(self.core.expire(self.now))
        plan, events = self.core.plan(self.now)
        self.take(events)
        if plan is not None:
            self.take(self.core.apply(plan, computed(plan, self.guard, moments), self.now))
        return plan

    def run(self) -> None:
        for _ in range(100):
            if self.step() is None:
                return
        raise AssertionError("prefill does not come to an end")

    def prefill(self, tokens: Sequence[int], tenant: str = "t", *, release: bool = True) -> PrefillSequence:
        """One prompt from beginning to end."""
        seq = self.submit(tokens, tenant)
        self.run()
        assert seq.completed
        if release:
            self.core.release(seq.handoff_id)
        return seq

    @property
    def used(self) -> int:
        """Pages that are not free and not merely cached."""
        return self.guard.slots - self.guard.free_pages - self.core.cached_pages

    def require_baseline(self) -> None:
        """Nothing is left of any request, and the cache gives all its pages back."""
        assert (self.core.waiting, self.core.running, len(self.core.leases)) == (0, 0, 0)
        self.core.evict_all()
        assert self.guard.free_pages == self.guard.slots, self.guard.counts()
        assert self.core.cached_pages == 0


@dataclass
class DecodeSide:
    """A decode core fed by a real prefill core through real pulls."""

    slots: int = 8
    limits: DecodeLimits = field(default_factory=DecodeLimits)
    now: int = 0

    def __post_init__(self) -> None:
        self.world = World(slots=self.slots)
        self.world.source = make_guard(MemoryEngine(self.world.fabric, "big prefill"), 12, slots=64)
        self.world.peer = self.world.engine.connect(self.world.source.export)
        self.prefill = PrefillSide(world=self.world)
        self.guard = self.world.sink
        self.core: DecodeCore[Token] = DecodeCore(self.guard, make_keyer(), self.limits, (EOS,), counting_ids())
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.failed: dict[int, GenlockError] = {}
        self.starts: list[StartHandoff] = []
        self.preempted: list[int] = []
        self.wanted: list[PrefillWanted] = []  # not answered yet
        self.assigns = True  # somebody answers at once

    def submit(self, tokens: Sequence[int], max_tokens: int = 4, deadline_ms: int = 1 << 40, **sampling: object) -> int:
        return self.core.submit(make_ticket(tokens, max_tokens, **sampling), self.now, deadline_ms)

    def take(self, outcomes: Sequence[Outcome[Token]]) -> None:
        for outcome in outcomes:
            number = outcome.request_no
            assert number not in self.finished, "nothing follows the end"
            assert number not in self.failed, "nothing follows the end"
            if isinstance(outcome, Emitted):
                self.tokens.setdefault(number, []).append(outcome.token.token_id)
            elif isinstance(outcome, Finished):
                self.finished[number] = outcome
            elif isinstance(outcome, Failed):
                self.failed[number] = outcome.error
            else:
                assert isinstance(outcome, Preempted)
                self.preempted.append(number)

    def admit(self) -> list[StartHandoff]:
        starts: list[StartHandoff] = []
        while True:
            found = self.core.admit(self.now)
            starts += [one for one in found if isinstance(one, StartHandoff)]
            asked = [one for one in found if isinstance(one, PrefillWanted)]
            self.wanted += asked
            if not asked or not self.assigns:
                self.starts.extend(starts)
                return starts
            for one in asked:
                self.wanted.remove(one)
                assert self.core.assigned(one.request_no, one.attempt)

    def handoff(self, start: StartHandoff) -> None:
        """Prefill computes, the pages are pulled and judged, the request joins."""
        core = self.prefill.core
        seq = core.submit(start.ticket, self.now)
        self.prefill.run()
        descs = self.prefill.sealed.pop(seq.request_no)
        ids = start.ticket.token_ids
        self.world.pull(descs, ids, local=start.local, owner=start.request_no)
        core.release(seq.handoff_id)
        self.take(self.core.joined(start.request_no, self.prefill.done[seq.request_no].first, self.now))

    def step(self, moments: Moments | None = None) -> StepPlan | None:
        plan, outcomes = self.core.plan(self.now)
        self.take(outcomes)
        if plan is not None:
            self.take(self.core.apply(plan, computed(plan, self.guard, moments), self.now))
        return plan

    def turn(self) -> bool:
        """What the engine does in a turn, with handoffs that take no time. True if there is more to do."""
        self.take(self.core.expire(self.now))
        for start in self.admit():
            self.handoff(start)
        self.step()
        return bool(self.core.waiting or self.core.running)

    def run(self) -> None:
        for _ in range(1000):
            if not self.turn():
                return
        raise AssertionError("decode does not come to an end")

    def require_baseline(self) -> None:
        assert (self.core.waiting, self.core.running) == (0, 0)
        assert self.guard.free_pages == self.guard.slots, self.guard.counts()
        self.prefill.require_baseline()
