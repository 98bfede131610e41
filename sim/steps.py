"""One worker's steps as events: turn → entry → write → read → exit, with time for everybody else in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.errors import GenlockError
from kvstore.guard import GuardedStep, Published
from kvstore.ids import PageRef, Tag
from kvstore.lifecycle import SlotState
from kvstore.step import PlanRow, StepArrays, StepPlan
from kvstore.tables import FLAG_NONFINITE, I64
from sim.compute import Compute, SimToken
from sim.watch import WatchedGuard

if TYPE_CHECKING:
    from sim.world import World

_PERMUTED = (
    "token_ids_N", "position_N", "page_ids_BP", "expected_BP2", "context_len_B", "request_no_B", "seal_B", "slot_N",
    "offset_N", "logits_row_R", "logits_at_R",
)  # fmt: skip


class Stepping(Protocol):
    """What the driver needs of a worker."""

    name: str
    world: World
    compute: Compute

    @property
    def guard(self) -> WatchedGuard: ...

    def later(self, delay_ms: int, name: str, call: Callable[..., None], *args: Any) -> None: ...
    def abandon(self, request_no: int) -> None: ...
    def landing(self) -> Collection[int]: ...
    def turn(self) -> StepPlan | None: ...
    def apply(self, plan: StepPlan, published: Sequence[Published[SimToken]]) -> None: ...


class StepDriver:
    """Runs one step at a time. A step that fails as a whole is run again row by row, as production does."""

    def __init__(self, worker: Stepping) -> None:
        self._worker = worker
        self._dice = worker.world.dice
        self._pace = self._dice.stream("pace")
        self._scheduled = False
        self._plan: StepPlan | None = None
        self._todo: list[StepPlan] = []
        self._results: list[Published[SimToken]] = []
        self._context: AbstractContextManager[GuardedStep] | None = None
        self.writing: set[int] = set()  # slots that the step under way may still write
        self.holding: set[int] = set()  # slots that the step under way keeps from being handed out

    @property
    def idle(self) -> bool:
        return self._plan is None

    def kick(self) -> None:
        """Something changed: look for work soon."""
        if self._plan is None and not self._scheduled:
            self._scheduled = True
            self._worker.later(self._delay(), "turn", self._turn)

    def _delay(self) -> int:
        slow = 25 if self._dice.hit("slow_worker") else 1
        return self._pace.randrange(3) * slow

    def _turn(self) -> None:
        self._scheduled = False
        if self._plan is not None:
            return
        plan = self._worker.turn()
        if plan is not None:
            self._plan, self._todo, self._results = plan, [plan], []
            self._enter()

    def _enter(self) -> None:
        worker, plan = self._worker, self._todo[0]
        if self._dice.hit("page_taken_before"):
            self._take_page(plan, "page_taken_before")
        permute = self._permute if self._dice.hit("batch_permuted") else None
        self._context = worker.guard.step(plan, permute)
        step = self._context.__enter__()
        self._judge_entry(step)
        if self._dice.hit("page_taken_during"):
            self._take_page(step.plan, "page_taken_during")
        worker.later(self._delay() + self._stall(plan), "write", self._write, step)

    def _write(self, step: GuardedStep) -> None:
        if self._dice.hit("step_fails"):
            self._step_failed(step)
            return
        self._worker.compute.write(step, self._on_read, self._on_write)
        if self._dice.hit("row_fails"):
            row = self._dice.stream("row_fails/which").randrange(len(step.plan.rows))
            step.arrays.flags_B[row] |= FLAG_NONFINITE
        self._worker.later(self._delay(), "read", self._read, step)

    def _read(self, step: GuardedStep) -> None:
        if self._dice.hit("page_taken_during"):
            self._take_page(step.plan, "page_taken_during")
        outputs = self._worker.compute.read(step, self._on_read)
        if len(outputs) > 1 and self._dice.hit("outputs_permuted"):
            outputs = outputs[1:] + outputs[:1]
        self._worker.later(self._delay(), "exit", self._exit, step, outputs)

    def _exit(self, step: GuardedStep, outputs: list[tuple[int, SimToken]]) -> None:
        if self._dice.hit("page_taken_after"):
            self._take_page(step.plan, "page_taken_after")
        published: list[Published[SimToken]] = step.publish(outputs)
        self._leave()
        self._judge_exit(step.plan, published)
        self._results += published
        self._next()

    def _step_failed(self, step: GuardedStep) -> None:
        self._leave()
        rows = step.plan.rows
        if len(rows) > 1:
            self._todo[:1] = [step.plan, *(StepPlan(step.plan.step_no, (row,)) for row in rows)]
        else:
            error = GenlockError("step_failed", "a kernel failed")
            self._results.append(Published(rows[0].request_no, None, error))
        self._next()

    def _leave(self) -> None:
        assert self._context is not None
        self.writing, self.holding = set(), set()
        self._context.__exit__(None, None, None)
        self._context = None

    def _next(self) -> None:
        del self._todo[0]
        if self._todo:
            self._enter()
            return
        plan, results = self._plan, self._results
        assert plan is not None
        self._plan = None
        self._worker.apply(plan, results)
        self.kick()

    # --- faults ---------------------------------------------------------------------------------------------------

    def _stall(self, plan: StepPlan) -> int:
        """The kernel is held up, and while it is a request of the step is cancelled. Returns how long, in ms."""
        if not self._dice.hit("kernel_stalls"):
            return 0
        rng = self._dice.stream("kernel_stalls/how")
        row = plan.rows[rng.randrange(len(plan.rows))]
        self._worker.later(rng.randrange(10), "leave-midstep", self._worker.abandon, row.request_no)
        return rng.randrange(20, 120)

    def _take_page(self, plan: StepPlan, site: str) -> None:
        """Somebody takes a page away from a running request."""
        rng = self._dice.stream(site + "/which")
        row = plan.rows[rng.randrange(len(plan.rows))]
        if row.pages.refs:
            self._worker.guard.condemn((row.pages.refs[rng.randrange(len(row.pages.refs))],))

    def _permute(self, arrays: StepArrays) -> None:
        """Two neighbouring entries of one array change places."""
        rng = self._dice.stream("batch_permuted/which")
        array = getattr(arrays, rng.choice(_PERMUTED))
        if len(array) > 1:
            i = rng.randrange(len(array) - 1)
            array[[i, i + 1]] = array[[i + 1, i]]

    # --- laws -----------------------------------------------------------------------------------------------------

    def _judge_entry(self, step: GuardedStep) -> None:
        guard, laws = self._worker.guard, self._worker.world.laws
        tokens = guard.layout.page_tokens
        self._worker.world.tally.operations["verify"] += sum(len(r.pages.refs) for r in step.plan.rows)
        for row, flags in zip(step.plan.rows, step.arrays.flags_B.tolist(), strict=True):
            written = row.pages.refs[row.first_position // tokens : (row.context_len - 1) // tokens + 1]
            if self._worker.world.checks.write and all(self._claimable(ref, row) for ref in written):
                self.holding.update(ref.page_id for ref in written)
            if flags:
                continue
            if not all(map(guard.is_live, row.pages.refs)):
                laws.broken("stale_row_admitted", f"{self._worker.name} row of request {row.request_no}")
            self.writing.update(ref.page_id for ref in written)
            if not all(self._writable(ref, row) for ref in written):
                laws.broken("unwritable_row_admitted", f"{self._worker.name} row of request {row.request_no}")

    def _claimable(self, ref: PageRef, row: PlanRow) -> bool:
        """A step takes its own open pages, and none that a copy may write."""
        return self._writable(ref, row) and ref.page_id not in self._worker.landing()

    def _writable(self, ref: PageRef, row: PlanRow) -> bool:
        slot = self._worker.guard.book_slot(ref.page_id)
        own = slot.owner == row.request_no and slot.state is SlotState.OPEN
        return own and self._worker.guard.is_live(ref)

    def _judge_exit(self, plan: StepPlan, published: Sequence[Published[SimToken]]) -> None:
        guard, world = self._worker.guard, self._worker.world
        world.tally.operations["verify"] += sum(len(r.pages.refs) for r in plan.rows)
        for row, result in zip(plan.rows, published, strict=True):
            if result.error is not None:
                world.tally.reasons[result.error.reason] += 1
                world.tally.rejects[result.error.reason] += 1
            elif not all(map(guard.is_live, row.pages.refs)):
                world.laws.broken("published_stale", f"{self._worker.name} request {row.request_no}")

    def _on_read(self, step: GuardedStep, b: int, page_ids: Sequence[int], expected_n2: I64) -> None:
        guard, world = self._worker.guard, self._worker.world
        world.tally.operations["read"] += len(page_ids)
        for page_id, tag in zip(page_ids, expected_n2.tolist(), strict=True):
            if not guard.is_live(PageRef(page_id, Tag(*tag))):
                world.laws.broken("kernel_read_stale", f"{self._worker.name} page {page_id}")

    def _on_write(self, step: GuardedStep, b: int, page_ids: Sequence[int], expected_n2: I64) -> None:
        world = self._worker.world
        world.tally.operations["write"] += len(set(page_ids))
        row = step.plan.rows[b]
        for page_id, tag in set(zip(page_ids, map(tuple, expected_n2.tolist()), strict=True)):
            if not self._writable(PageRef(page_id, Tag(*tag)), row):
                world.laws.broken("kernel_wrote_foreign", f"{self._worker.name} page {page_id} by {row.request_no}")
