"""One request's surprise inside a step ends that request; the others get their tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore.errors import CorruptPage, GenlockError, InvalidInput, StalePage
from kvstore.step import StepPlan
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from model.attention.reference import ReferenceBackend
from model.runner import StepHooks, StepRunner
from model.sampler import SampleRow
from model.sampling import SamplingParams
from tests.support.kv_world import history, make_guard, next_token

VOCAB = 16
POISON = 13


class TinyModel:
    """Says (mean of the values that it attends to) mod 16. A poisonous token makes it raise, or say nothing finite."""

    def __init__(self, guard, poison: str = "raise") -> None:
        self._guard = guard
        self._poison = poison
        self.forwards: list[int] = []
        self.broken = False

    def forward(self, token_ids_N, position_N, logits_at_R, kv):
        self.forwards.append(len(token_ids_N))
        if self.broken:
            raise MemoryError
        if self._poison == "raise" and POISON in token_ids_N:
            raise RuntimeError("a kernel on " + str(token_ids_N))
        if self._poison == "typed" and POISON in token_ids_N:
            raise CorruptPage("model_refuses", "typed by the model")
        layout = self._guard.layout
        values_N = torch.from_numpy(token_ids_N).float()
        if self._poison == "nan kv":
            values_N[torch.from_numpy(token_ids_N) == POISON] = float("nan")
        key = torch.zeros(len(values_N), layout.kv_heads, layout.key_width)
        value = values_N[:, None, None].expand(-1, layout.kv_heads, layout.value_width).contiguous()
        out_NHV = kv(0, torch.zeros_like(key), [key, value], 1.0)
        logits_RV = torch.full((len(logits_at_R), VOCAB), -10.0)
        for r, n in enumerate(logits_at_R.tolist()):
            logits_RV[r, int(out_NHV[n].mean().nan_to_num()) % VOCAB] = 10.0
            if self._poison == "nan logits" and token_ids_N[n] == POISON:
                logits_RV[r] = float("nan")
        return logits_RV


class Bench:
    def __init__(self, poison: str = "raise", hooks: StepHooks | None = None) -> None:
        self.guard = make_guard(MemoryEngine(MemoryFabric(), "decode"), 22, slots=16)
        self.model = TinyModel(self.guard, poison)
        self.runner = StepRunner(self.model, ReferenceBackend(self.guard.layout), self.guard, hooks)

    def plan(self, *tokens: int) -> StepPlan:
        """Row i is request i + 1 with two tokens behind it, and reads a new one."""
        rows = []
        for i, token in enumerate(tokens):
            behind = [2 * i, 2 * i + 1]
            rows.append(next_token(i + 1, behind, token, history(self.guard, i + 1, behind)))
        return StepPlan(1, tuple(rows))

    def run(self, plan: StepPlan, **sampling: object):
        params = SamplingParams(**sampling)
        return self.runner.run(plan, {r.request_no: SampleRow(params, r.context_len, 0) for r in plan.rows})


def answers(results) -> list[object]:
    return [r.output.token_id if r.output else r.error.reason for r in results]


def wanted(i: int, token: int) -> int:
    return int(np.mean([2 * i, 2 * i + 1, token])) % VOCAB


def test_a_healthy_batch_is_one_forward():
    bench = Bench()
    assert answers(bench.run(bench.plan(4, 5, 6))) == [wanted(0, 4), wanted(1, 5), wanted(2, 6)]
    assert bench.model.forwards == [3]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(("poison", "reason"), [("raise", "step_failed"), ("typed", "model_refuses")])
def test_a_kernels_surprise_ends_the_row_that_causes_it(poison, reason, at):
    bench = Bench(poison)
    tokens = [4, 5, 6]
    tokens[at] = POISON
    results = bench.run(bench.plan(*tokens))
    expected: list[object] = [wanted(i, t) for i, t in enumerate(tokens)]
    expected[at] = reason
    assert answers(results) == expected
    assert [r.request_no for r in results] == [1, 2, 3], "in the plan's order"
    assert bench.guard.counters["step_failed"] == 1


def test_the_error_of_a_surprise_names_its_class_and_none_of_its_text():
    bench = Bench()
    [result] = bench.run(bench.plan(POISON))
    assert type(result.error) is GenlockError
    assert "RuntimeError" in result.error.message
    assert str(POISON) not in result.error.message


class Spent:
    """A matcher whose schema needs more than a step may cost."""

    def allowed(self, history, generated):
        raise InvalidInput("json_schema_too_complex", field="sampling_params.json_schema")


def test_an_answer_whose_schema_fails_ends_alone_and_nothing_is_computed_again():
    bench = Bench()
    plan = bench.plan(4, 5, 6)
    rows = {r.request_no: SampleRow(SamplingParams(), r.context_len, 0) for r in plan.rows}
    rows[2] = replace(rows[2], matcher=Spent())
    results = bench.runner.run(plan, rows)
    assert answers(results) == [wanted(0, 4), "json_schema_too_complex", wanted(2, 6)]
    assert bench.model.forwards == [3]


def test_a_failure_of_the_whole_step_ends_every_row_typed_and_the_next_step_is_healthy():
    bench = Bench()
    bench.model.broken = True
    plan = bench.plan(4, 5)
    assert answers(bench.run(plan)) == ["step_failed"] * 2
    assert bench.model.forwards == [2, 1, 1]
    bench.model.broken = False
    assert answers(bench.run(plan)) == [wanted(0, 4), wanted(1, 5)], "no page stayed on hold, and none was harmed"


@pytest.mark.parametrize(("poison", "reason"), [("nan logits", "nonfinite_logits"), ("nan kv", "nonfinite_kv")])
def test_numbers_that_are_none_end_their_row_alone(poison, reason):
    bench = Bench(poison)
    results = bench.run(bench.plan(4, POISON, 6))
    assert answers(results) == [wanted(0, 4), reason, wanted(2, 6)]
    assert isinstance(results[1].error, CorruptPage)
    assert bench.model.forwards == [3], "no retry: the step itself went well"


def test_a_row_that_is_stale_at_entry_costs_the_others_nothing():
    bench = Bench()
    plan = bench.plan(4, 5, 6)
    bench.guard.condemn((plan.rows[1].pages.refs[0],))
    results = bench.run(plan)
    assert [type(r.error) for r in results] == [type(None), StalePage, type(None)]
    assert answers(results)[::2] == [wanted(0, 4), wanted(2, 6)]


def test_sampling_that_raises_ends_its_row_alone():
    bench = Bench()
    plan = bench.plan(4, 5)
    rows = {r.request_no: SampleRow(SamplingParams(), r.context_len, 0) for r in plan.rows}
    rows[1] = SampleRow(SamplingParams(temperature=1.0, seed=-5), 3, 0)  # a seed is never negative
    assert answers(bench.runner.run(plan, rows)) == ["step_failed", wanted(1, 5)]
    del rows[1]
    assert answers(bench.runner.run(plan, rows)) == ["step_failed", wanted(1, 5)]


def test_hooks_see_each_step_between_its_arrays_and_its_exit():
    seen: list[str] = []
    hooks = StepHooks(
        on_arrays=lambda arrays: seen.append("arrays"),
        wrap_kv=lambda plan, kv: seen.append("kv") or kv,
        before_exit=lambda plan: seen.append("exit"),
    )
    bench = Bench(hooks=hooks)
    bench.run(bench.plan(4))
    assert seen == ["arrays", "kv", "exit"]


def test_rows_that_want_no_logits_are_answered_with_nothing():
    bench = Bench()
    plan = bench.plan(4, 5)
    plan = StepPlan(1, (replace(plan.rows[0], wants_logits=False), plan.rows[1]))
    quiet, loud = bench.run(plan)
    assert (quiet.output, quiet.error) == (None, None)
    assert loud.output.token_id == wanted(1, 5)
