"""Our Llama against transformers' on tiny random checkpoints; RoPE stretching; ragged packing; refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from kvstore.errors import InvalidInput
from kvstore.layout import KvFormat
from model.config import config_from_hf
from model.hf_folder import weights_from_folder
from model.llama import LlamaModel
from tests.support.dense_step import DenseStep
from tests.support.threads import one_thread

__all__ = ["one_thread"]

TOLERANCE = 1e-4


def run(model: LlamaModel, step: DenseStep, rows: list[tuple[int, int, list[int]]]) -> Tensor:
    """One step; rows of (sequence, first position, token ids). Logits of every packed token."""
    step.rows = [(sequence, len(ids)) for sequence, _, ids in rows]
    ids = np.concatenate([np.array(ids, np.int64) for _, _, ids in rows])
    positions = np.concatenate([np.arange(first, first + len(ids), dtype=np.int64) for _, first, ids in rows])
    return model.forward(ids, positions, np.arange(len(ids)), step)


def checkpoint(folder: Path, **changes: object) -> LlamaForCausalLM:
    settings = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        **changes,
    }
    torch.manual_seed(7)
    reference = LlamaForCausalLM(HfConfig(**settings)).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    reference.save_pretrained(folder)
    return reference


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "gqa": {},
    "multi_head": {"num_key_value_heads": 6},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
}
IDS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def load(folder: Path, linears: str = "fp32") -> LlamaModel:
    return LlamaModel(weights_from_folder(folder), name="tiny", tokenizer_digest="", linears=linears)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, **VARIANTS[variant])
    ours = run(load(tmp_path), DenseStep(), [(0, 0, IDS)])
    with torch.inference_mode():
        theirs = reference(torch.tensor([IDS])).logits[0]
    assert theirs.std() > 0.3  # logits that differ from token to token, else equality says little
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_old_style_rope_fields_mean_the_same(tmp_path: Path) -> None:
    checkpoint(tmp_path, rope_parameters=LLAMA3)
    raw = json.loads((tmp_path / "config.json").read_text())
    parameters = raw.pop("rope_parameters")
    old = {**raw, "rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
    new = json.loads((tmp_path / "config.json").read_text())
    assert config_from_hf(old) == config_from_hf(new)
    assert config_from_hf(old).rope_scaling is not None


def test_chunks_ragged_packing_and_single_tokens_equal_the_whole(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    model = load(tmp_path)
    whole = run(model, DenseStep(), [(0, 0, IDS)])
    other = run(model, DenseStep(), [(0, 0, IDS[::-1])])
    step = DenseStep()
    first = run(model, step, [(0, 0, IDS[:7]), (1, 0, IDS[::-1][:11])])
    second = run(model, step, [(1, 11, IDS[::-1][11:12]), (0, 7, IDS[7:])])
    torch.testing.assert_close(torch.cat([first[:7], second[1:]]), whole, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.cat([first[7:], second[:1]]), other[:12], atol=TOLERANCE, rtol=0)


def test_only_the_wanted_rows_come_back_in_the_wanted_order(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    model = load(tmp_path)
    whole = run(model, DenseStep(), [(0, 0, IDS)])
    step = DenseStep()
    step.rows = [(0, len(IDS))]
    ids, positions = np.array(IDS), np.arange(len(IDS))
    some = model.forward(ids, positions, np.array([9, 3]), step)
    torch.testing.assert_close(some, whole[[9, 3]], atol=TOLERANCE, rtol=0)
    step = DenseStep()
    step.rows = [(0, len(IDS))]
    assert model.forward(ids, positions, np.array([], np.int64), step).shape == (0, 97)
    assert len(step.cache) == 3  # every layer's KV was stored all the same


def test_fp16_linears_stay_close(tmp_path: Path) -> None:
    """fp16 rounds each weight by at most 2^-11 of itself; through three layers logits move by under 1 % of their
    deviation, as a root mean square."""
    checkpoint(tmp_path)
    exact, half = load(tmp_path), load(tmp_path, "fp16")
    assert half.linears == "fp16"
    a, b = (run(model, DenseStep(), [(0, 0, IDS)]) for model in (exact, half))
    assert 0 < (a - b).square().mean().sqrt() < 0.01 * a.std()


def test_fp16_is_refused_or_left_when_a_weight_does_not_fit(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    weights = weights_from_folder(tmp_path)
    weights.tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 70_000.0
    assert LlamaModel(weights, name="t", tokenizer_digest="", linears="auto").linears == "fp32"
    with pytest.raises(InvalidInput) as caught:
        LlamaModel(weights, name="t", tokenizer_digest="", linears="fp16")
    assert caught.value.field == "linears"
    with pytest.raises(InvalidInput):
        LlamaModel(weights, name="t", tokenizer_digest="", linears="int3")


@pytest.mark.parametrize(
    ("ids", "positions", "field"),
    [([97], [0], "token_ids"), ([-1], [0], "token_ids"), ([1], [256], "position"), ([1], [-1], "position")],
)
def test_tokens_and_positions_are_checked_before_any_kv_is_written(
    ids: list[int], positions: list[int], field: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path)
    step = DenseStep()
    step.rows = [(0, 1)]
    with pytest.raises(InvalidInput) as caught:
        load(tmp_path).forward(np.array(ids), np.array(positions), np.array([0]), step)
    assert caught.value.field == field
    assert not step.cache


def test_read_only_step_arrays_are_welcome(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    checkpoint(tmp_path)
    arrays = [np.array([5]), np.array([0]), np.array([0])]
    for array in arrays:
        array.setflags(write=False)
    step = DenseStep()
    step.rows = [(0, 1)]
    model = load(tmp_path)
    recwarn.clear()
    model.forward(*arrays, step)
    assert not recwarn.list


def test_layout_names_the_revision(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    layout = load(tmp_path).layout(16, KvFormat.INT8)
    assert (layout.layers, layout.kv_heads, layout.key_width, layout.page_tokens) == (3, 2, 8, 16)
    weights = weights_from_folder(tmp_path)
    assert layout.model == f"llama:{weights.revision}"
