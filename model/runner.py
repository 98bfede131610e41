"""Computes one step plan: entry check, forward, sampling, exit check. Shared by prefill and decode.

A failure of the whole batch is retried row by row, so that one request's surprise ends that request alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvstore.errors import CorruptPage, GenlockError
from kvstore.guard import Guard, Published
from kvstore.step import PageRun, PlanRow, StepArrays, StepPlan
from model.attention.base import AttentionBackend, KvStep, PagedStep
from model.base import LanguageModel
from model.sampler import NO_TOKEN, SampledToken, SampleRow, sample
from model.sampling import SamplingParams

WARM_OWNER = 1  # before serving starts, so no request has this number yet
WARM_TOKENS = 48


@dataclass(frozen=True)
class StepHooks:
    """Where fault injection may look into a step; production leaves them empty."""

    on_arrays: Callable[[StepArrays], None] | None = None
    wrap_kv: Callable[[StepPlan, KvStep], KvStep] | None = None
    before_exit: Callable[[StepPlan], None] | None = None


class StepRunner:
    """Binds a model and its attention kernels to a guard. Called from one thread."""

    def __init__(
        self, model: LanguageModel, backend: AttentionBackend, guard: Guard, hooks: StepHooks | None = None
    ) -> None:
        self._model = model
        self._backend = backend
        self._guard = guard
        self._hooks = hooks or StepHooks()

    def warm_up(self) -> None:
        """One small prefill step and one decode step, so that the first request pays for no compilation, no first
        touch of the weights and no thread start. Leaves the pool and its counters as they were."""
        layout = self._guard.layout
        tokens = min(WARM_TOKENS, layout.page_tokens * self._guard.slots - 1)
        pages = PageRun(self._guard.allocate(WARM_OWNER, layout.pages_for(tokens + 1)))
        sampling = {WARM_OWNER: SampleRow(SamplingParams(), tokens, 0)}
        try:
            chunk = PlanRow(WARM_OWNER, (0,) * tokens, 0, PageRun(pages.refs[: layout.pages_for(tokens)]))
            for row in (chunk, PlanRow(WARM_OWNER, (0,), tokens, pages)):
                [result] = self.run(StepPlan(0, (row,)), sampling)
                if result.error is not None:
                    raise result.error
        finally:
            self._guard.retire(pages.refs, WARM_OWNER)
            self._guard.counters.clear()

    def run(self, plan: StepPlan, sampling: Mapping[int, SampleRow]) -> list[Published[SampledToken]]:
        """One result for each row, in plan order. `sampling` has an entry for each row that wants logits."""
        try:
            return self._run(plan, sampling)
        except Exception as surprise:  # whatever a kernel throws: it must end requests, not the worker
            if len(plan.rows) > 1:
                singles = [StepPlan(plan.step_no, (row,)) for row in plan.rows]
                return [result for single in singles for result in self.run(single, sampling)]
            # The text of a surprise may quote a prompt; its class name does not.
            error = (
                surprise
                if isinstance(surprise, GenlockError)
                else GenlockError("step_failed", f"the step failed ({type(surprise).__name__})")
            )
            self._guard.count("step_failed")
            return [Published(plan.rows[0].request_no, None, error)]

    def _run(self, plan: StepPlan, sampling: Mapping[int, SampleRow]) -> list[Published[SampledToken]]:
        with torch.inference_mode(), self._guard.step(plan, self._hooks.on_arrays) as step:
            kv: KvStep = PagedStep(self._backend, step.read, step.write)
            if self._hooks.wrap_kv is not None:
                kv = self._hooks.wrap_kv(plan, kv)
            arrays = step.arrays
            logits_RV = self._model.forward(arrays.token_ids_N, arrays.position_N, arrays.logits_at_R, kv)
            wanting = [row for row in plan.rows if row.wants_logits]
            tokens = sample(logits_RV, [sampling[row.request_no] for row in wanting])
            if self._hooks.before_exit is not None:
                self._hooks.before_exit(plan)
            results = step.publish([(row.request_no, t) for row, t in zip(wanting, tokens, strict=True)])
        return [_refuse_no_token(result) for result in results]


def _refuse_no_token(result: Published[SampledToken]) -> Published[SampledToken]:
    if result.output is not None and result.output.token_id == NO_TOKEN:
        error = result.output.error
        if error is None:
            error = CorruptPage("nonfinite_logits", "the model's output for this request is not a number")
        return Published(result.request_no, None, error)
    return result
