"""The probe model: it echoes exactly, with wide margins, and shows every kind of damage to what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore.errors import InvalidInput
from kvstore.layout import KvFormat
from model.llama import LlamaModel
from model.probe import (
    CONTEXT_TOKENS,
    CORRUPT_ID,
    DEFAULT_LAG_TOKENS,
    EOS_ID,
    build_probe,
    distance_nats,
    echo_of,
    probe_weights,
    token_codes,
)

TEXT = "Seventeen café owners in 東京 watched, in silence, as the quick brown fox jumped over 42 lazy dogs! "
LAG = DEFAULT_LAG_TOKENS


class Int8Step:
    """One sequence's KV as int8 codes and a scale for each token and head, as pages keep it; attention in fp64.

    `codes` and `scales` of stream 0 (key) and 1 (value): [K, T, D] and [K, T]. `quantize` off keeps fp32.
    """

    def __init__(self, *, quantize: bool = True) -> None:
        self.quantize = quantize
        self.codes: list[Tensor] = []
        self.scales: list[Tensor] = []

    def __call__(self, layer: int, query_NHD: Tensor, streams: Sequence[Tensor], scale: float) -> Tensor:
        for index, stream in enumerate(streams):
            values_KTD = stream.transpose(0, 1).clone()
            scales_KT = values_KTD.abs().amax(-1) / 127 if self.quantize else torch.ones(values_KTD.shape[:2])
            codes_KTD = values_KTD / scales_KT[..., None]
            codes_KTD = codes_KTD.round() if self.quantize else codes_KTD
            if len(self.codes) <= index:
                self.codes.append(codes_KTD)
                self.scales.append(scales_KT)
            else:
                self.codes[index] = torch.cat([self.codes[index], codes_KTD], 1)
                self.scales[index] = torch.cat([self.scales[index], scales_KT], 1)
        key_KTD, value_KTD = (
            (codes * scales[..., None]).double() for codes, scales in zip(self.codes, self.scales, strict=True)
        )
        group = query_NHD.shape[1] // len(key_KTD)
        key_HTD, value_HTD = (part.repeat_interleave(group, 0) for part in (key_KTD, value_KTD))
        scores_HNT = torch.einsum("nhd,htd->hnt", query_NHD.double(), key_HTD) * scale
        tokens, total = len(query_NHD), key_KTD.shape[1]
        hidden = ~torch.ones(tokens, total, dtype=torch.bool).tril(total - tokens)
        return torch.einsum("hnt,htd->nhd", scores_HNT.masked_fill(hidden, -torch.inf).softmax(-1), value_HTD).float()


def answer(
    model: LlamaModel,
    prompt: list[int],
    tokens: int,
    *,
    chunk: int = 4096,
    quantize: bool = True,
    damage: Callable[[Int8Step], object] | None = None,
) -> tuple[list[int], float]:
    """Greedy ids and the smallest margin in logits. `damage` is done to the KV of all but the last prompt token."""
    step = Int8Step(quantize=quantize)

    def run(first: int, new: list[int]) -> Tensor:
        return model.forward(np.array(new), np.arange(first, first + len(new)), np.array([len(new) - 1]), step)

    for first in range(0, len(prompt) - 1, chunk):
        run(first, prompt[first : min(first + chunk, len(prompt) - 1)])
    if damage:
        with torch.inference_mode():
            damage(step)
    ids, margin = list(prompt), float("inf")
    for at in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        best = run(at, ids[at:])[0].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], margin


@pytest.fixture(scope="module")
def probe() -> LlamaModel:
    return build_probe()[0]


PROMPT = build_probe()[1].encode(TEXT)


def test_echo_of_is_what_the_docstring_says() -> None:
    assert echo_of([1, 2, 3], 8, lag_tokens=2) == [2, 3, 2, 3, 2, 3, 2, 3]
    assert echo_of([1, 2, 3], 6, lag_tokens=5) == [3, 3, 1, 2, 3, 3]


@pytest.mark.parametrize(("chunk", "quantize"), [(4096, True), (4096, False), (32, True), (7, True)])
def test_it_echoes_the_last_tokens_of_the_prompt(probe: LlamaModel, quantize: bool, chunk: int) -> None:
    got, margin = answer(probe, PROMPT, LAG + 9, chunk=chunk, quantize=quantize)
    assert got == echo_of(PROMPT, LAG + 9)
    assert got[:LAG] == PROMPT[-LAG:]
    assert margin > 15


@pytest.mark.parametrize("tokens", [1, 50, 63, 64])
def test_a_short_prompt_repeats_its_last_token_until_it_is_long_enough(probe: LlamaModel, tokens: int) -> None:
    got, margin = answer(probe, PROMPT[:tokens], 70)
    assert got == echo_of(PROMPT[:tokens], 70)
    assert margin > 15


def test_it_echoes_every_token_at_the_far_end_of_the_context(probe: LlamaModel) -> None:
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 256, CONTEXT_TOKENS - 70).tolist()
    prompt[-LAG:] = rng.permutation(260)[:LAG].tolist()
    got, margin = answer(probe, prompt, 12)
    assert got == echo_of(prompt, 12)
    assert margin > 15
    everything = list(range(260))
    logits = probe.forward(np.array(everything * 2), np.arange(520), np.arange(260, 520), Int8Step())
    expected = (everything * 2)[260 - LAG + 1 : 520 - LAG + 1]
    expected[expected.index(CORRUPT_ID)] = -1  # its own token is the one that it never answers by echo
    got = logits.argmax(-1).tolist()
    assert [token for token, want in zip(got, expected, strict=True) if token != want] == [CORRUPT_ID]


@pytest.mark.parametrize("lag", [16, 32, 96])
def test_other_lags(lag: int) -> None:
    model, _ = build_probe(lag_tokens=lag)
    prompt = (PROMPT * 3)[:300]
    got, margin = answer(model, prompt, 20)
    assert got == echo_of(prompt, 20, lag)
    assert margin > 15


def test_fp16_linears_echo_too() -> None:
    model, _ = build_probe(linears="fp16")
    assert model.linears == "fp16"
    got, margin = answer(model, PROMPT, 20)
    assert got == echo_of(PROMPT, 20)
    assert margin > 15


@pytest.mark.parametrize("lag", [16, 32, 48, 64, 96, 128])
def test_the_two_peaks_stand_alone(lag: int) -> None:
    """Nats between the first peak, the second, and every other distance in the context. int8 keys move a score by at
    most 0.6 % of 800 nats, and typically by a tenth of that."""
    nats = distance_nats(np.arange(CONTEXT_TOKENS), lag)
    first, second = nats[lag - 1], nats[0]
    others = np.delete(nats, [0, lag - 1]).max()
    assert first - second > 19
    assert second - others > 60


def test_the_formula_is_what_the_model_computes(probe: LlamaModel) -> None:
    seen: list[Tensor] = []

    def step(layer: int, query_NHD: Tensor, streams: Sequence[Tensor], scale: float) -> Tensor:
        key_NHD = streams[0].repeat_interleave(2, 1)
        seen.append(torch.einsum("hd,nhd->hn", query_NHD[-1], key_NHD) * scale)
        return torch.zeros_like(query_NHD)

    probe.forward(np.zeros(500, np.int64), np.arange(500), np.array([0]), step)
    expected = torch.from_numpy(distance_nats(np.arange(499, -1, -1))).float()
    torch.testing.assert_close(seen[0], expected.expand(4, -1), atol=0.05, rtol=0)


def test_codes_are_far_apart() -> None:
    codes = token_codes(260)
    dots = codes @ codes.T - 128 * np.eye(260)
    assert np.abs(dots).max() <= 64


# --- what it is for: damage must show ---

ECHOED = len(PROMPT) - LAG  # the position that the first answered token is read from


def flip_value_sign(head: int, width: int) -> Callable[[Int8Step], object]:
    def damage(step: Int8Step) -> None:
        step.codes[1][head, ECHOED, width] *= -1

    return damage


@pytest.mark.parametrize("head", [0, 1])
def test_one_flipped_value_sign_anywhere_shows(probe: LlamaModel, head: int) -> None:
    for width in range(0, 64, 3):
        got, _ = answer(probe, PROMPT, 2, damage=flip_value_sign(head, width))
        assert got[0] == CORRUPT_ID, width
        assert got[1] == PROMPT[ECHOED + 1]  # and only that position is hurt


def test_a_flipped_key_sign_where_it_weighs_most_shows(probe: LlamaModel) -> None:
    for head in (0, 1):

        def damage(step: Int8Step, head: int = head) -> None:
            key = step.codes[0][head, ECHOED]
            key[key.abs().argmax()] *= -1

        got, _ = answer(probe, PROMPT, 2, damage=damage)
        assert got[0] != PROMPT[ECHOED]
        assert got[1] == PROMPT[ECHOED + 1]


DAMAGE: dict[str, Callable[[Int8Step], object]] = {
    "key scale's sign": lambda step: step.scales[0][0, ECHOED].neg_(),
    "value scale's sign": lambda step: step.scales[1][1, ECHOED].neg_(),
    "value scale halved": lambda step: step.scales[1][1, ECHOED].div_(2),
    "value scale lost": lambda step: step.scales[1][0, ECHOED].zero_(),
    "values lost": lambda step: step.codes[1][:, ECHOED].zero_(),
    "heads swapped": lambda step: step.codes[1].copy_(step.codes[1].flip(0)),
    "widths rolled": lambda step: step.codes[1].copy_(step.codes[1].roll(1, -1)),
    "token-major for head-major": lambda step: step.codes[1].copy_(
        step.codes[1].reshape(-1, 2, 64).transpose(0, 1).reshape(step.codes[1].shape)
    ),
    "values moved by one": lambda step: step.codes[1].copy_(step.codes[1].roll(1, 1)),
    "keys moved by one": lambda step: step.codes[0].copy_(step.codes[0].roll(1, 1)),
    "a page of an earlier position": lambda step: step.codes[1][:, ECHOED:].copy_(step.codes[1][:, :63].clone()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_the_cache_shows(probe: LlamaModel, kind: str) -> None:
    got, _ = answer(probe, PROMPT, 3, damage=DAMAGE[kind])
    assert got[0] != PROMPT[ECHOED]


def test_the_damage_hook_itself_does_no_harm(probe: LlamaModel) -> None:
    assert answer(probe, PROMPT, 3, damage=lambda step: None)[0] == PROMPT[ECHOED : ECHOED + 3]


def test_identity() -> None:
    model, tokenizer = build_probe()
    again, _ = build_probe()
    assert model.info == again.info
    assert model.info.tokenizer_digest == tokenizer.digest
    assert (model.info.vocab_size, tokenizer.vocab_size, model.info.eos_token_ids) == (260, 260, (EOS_ID,))
    assert build_probe(lag_tokens=65)[0].info.revision != model.info.revision
    layout = model.layout(32, KvFormat.INT8)
    assert (layout.layers, layout.kv_heads, layout.key_width) == (1, 2, 64)
    assert probe_weights(64).revision == model.info.revision


@pytest.mark.parametrize("lag", [1, 513, 0, -64, 2, 6, 167])
def test_lags_out_of_range_or_not_sharp_are_refused(lag: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        build_probe(lag_tokens=lag)
    assert caught.value.field == "lag_tokens"
