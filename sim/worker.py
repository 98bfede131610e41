"""What both simulated workers share: lives under one name, a clock of their own, a tick."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genlock.v1 import worker_pb2
from kvstore.guard import Published
from kvstore.ids import draw_incarnation
from kvstore.layout import PageLayout
from kvstore.step import StepPlan
from kvstore.transfer.memory import MemoryEngine
from sim.compute import Compute, SimToken
from sim.steps import StepDriver
from sim.watch import WatchedGuard
from wire.admission import Admission

if TYPE_CHECKING:
    from sim.world import World

TICK_MS = 25


@dataclass(frozen=True)
class Work:
    """`owed`: handoffs that a decode worker's requests still need, by prefill worker."""

    running: int
    waiting: int
    leases: int = 0
    owed: Mapping[str, int] = field(default_factory=dict)


class Worker:
    """`life` counts restarts; an event that was scheduled for a former life is dropped."""

    role = ""
    compute: Compute
    steps: StepDriver

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.life = 0
        self.alive = False
        # Since its books were audited last, an event of its own ran or somebody took hold of its guard or core. Nothing
        # else changes them.
        self.touched = True
        self.skew_ms = 0
        self.behind_ms = 0  # how far its clock has jumped back in all
        if world.dice.hit("clock_skew"):
            self.skew_ms = world.dice.stream("clock_skew/by").randrange(60_000)

    @property
    def guard(self) -> WatchedGuard:
        self.touched = True
        return self._guard

    @property
    def now(self) -> int:
        """The worker's own clock."""
        return self.world.heap.now_ms + self.skew_ms

    @property
    def endpoint(self) -> str:
        """Where this life listens."""
        return self.name if self.world.shape.fixed_endpoints else f"{self.name}:{self.life}"

    def told_work(self) -> Work:
        """What the worker's status tells of its work."""
        raise NotImplementedError

    def cut(self) -> None:
        """It stops: everything that is left ends with a typed error."""
        raise NotImplementedError

    def told_layout(self) -> str:
        """The layout fingerprint that the worker's status tells."""
        return str(self.guard.layout.fingerprint)

    def status(self) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(
            worker_id=self.name, role=self.role, incarnation=self.guard.incarnation,
            layout_fingerprint=self.told_layout(), draining=self.admission.draining,
        )  # fmt: skip

    @property
    def working(self) -> bool:
        """Whether something here still waits for time to pass."""
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def turn(self) -> StepPlan | None:
        raise NotImplementedError

    def apply(self, plan: StepPlan, published: Sequence[Published[SimToken]]) -> None:
        raise NotImplementedError

    def abandon(self, request_no: int) -> None:
        """The caller of a request goes away, whatever its state."""
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def busy(self, page_id: int) -> bool:
        """Whether a step or a copy may still write the slot."""
        return page_id in self.steps.writing

    def landing(self) -> Collection[int]:
        """Slots that copies still hold, once for each."""
        return ()

    def begin_life(self, layout: PageLayout, slots: int) -> None:
        world = self.world
        self.life += 1
        self.alive = True
        self.admission = Admission(self.role, lambda: self.now)
        self.engine = MemoryEngine(world.fabric, self.name)
        incarnation = draw_incarnation(world.dice.stream("incarnations").randbytes)
        self._guard = WatchedGuard(
            layout, slots, self.engine, incarnation, world.kit.digester, checks=world.checks, scrub=world.shape.scrub
        )
        world.laws.require(incarnation not in world.incarnations, "incarnation_repeats", self.name)
        world.incarnations.add(incarnation)
        self.guard.watch(world.laws, world.tally, self.busy)
        world.list.put(self)

    def die(self) -> None:
        """The process is gone, its memory with it."""
        self.alive = False
        self.engine.close()

    def later(self, delay_ms: int, name: str, call: Callable[..., None], *args: Any) -> None:
        self.world.heap.after(delay_ms, name, self._run, self.life, call, args)

    def schedule_tick(self) -> None:
        self.later(TICK_MS, "tick", self._tick)

    def _run(self, life: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive and life == self.life:
            self.touched = True
            call(*args)

    def _tick(self) -> None:
        if self.world.dice.hit("clock_jump"):
            by_ms = self.world.dice.stream("clock_jump/by").choice((-300, 200, 1000))
            self.skew_ms += by_ms
            self.behind_ms += max(0, -by_ms)
        self.tick()
        self.schedule_tick()
