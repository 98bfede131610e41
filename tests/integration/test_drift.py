"""Accuracy of each page format: the split answer is exactly one process's over the same format, and near the one over
unquantized pages. The bounds are about twice what was measured (docs/benchmarks.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from bench.drift import PROMPTS, measure, prompts_of
from cluster.selftest.lab import load_subject
from kvstore.layout import WORKING_FORMATS, KvFormat


@dataclass(frozen=True)
class Bound:
    mean: float
    most: float
    same_token: float


BOUNDS = {KvFormat.NONE: Bound(0.0, 0.0, 1.0), KvFormat.INT8: Bound(0.06, 0.4, 0.95)}


def test_every_format_that_works_has_a_bound():
    assert set(BOUNDS) == WORKING_FORMATS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv_format", sorted(WORKING_FORMATS))
@pytest.mark.parametrize("model", ["probe", "smollm2"])
async def test_split_answers_are_near_unquantized_ones_and_exactly_one_processs(model, kv_format):
    subject = load_subject(model)
    drift = await measure(subject, KvFormat(kv_format), prompts_of(subject))
    bound = BOUNDS[KvFormat(kv_format)]
    assert drift.prompts == PROMPTS
    assert drift.equals_one_process, "the split adds nothing"
    assert drift.mean_gap <= bound.mean
    assert drift.max_gap <= bound.most
    assert drift.same_token >= bound.same_token


class Coarse:
    """A model whose keys and values have 15 levels before they go into a page."""

    def __init__(self, model) -> None:
        self._model = model
        self.info = model.info

    def layout(self, page_tokens, kv_format):
        return self._model.layout(page_tokens, kv_format)

    def forward(self, token_ids_N, position_N, logits_at_R, kv):
        def coarse(layer, query, streams, scale):
            return kv(layer, query, [fifteen_levels(stream) for stream in streams], scale)

        return self._model.forward(token_ids_N, position_N, logits_at_R, coarse)


def fifteen_levels(stream: torch.Tensor) -> torch.Tensor:
    step = stream.abs().amax(dim=-1, keepdim=True).clamp_min(1e-20) / 7
    return torch.round(stream / step) * step


@pytest.mark.slow
async def test_control_a_coarser_format_would_be_seen():
    """Four bits in place of eight at the cluster alone: both verdicts turn."""
    subject = load_subject("smollm2")
    served = replace(subject, model=Coarse(subject.model))
    drift = await measure(subject, KvFormat.INT8, prompts_of(subject, 8), served)
    bound = BOUNDS[KvFormat.INT8]
    assert not drift.equals_one_process
    assert drift.mean_gap > bound.mean
    assert drift.max_gap > bound.most
