"""The Llama family: grouped-query attention, rotary positions, RMSNorm, SwiGLU (Touvron et al., 2023).

Shape suffixes: N packed tokens of a step (several sequences, ragged), R rows that want logits, C hidden width,
F feed-forward width, V vocabulary, H query heads, K kv heads, D head width, S = H + 2K, P = D / 2.

Attention itself, and with it all KV storage, is behind the `KvStep` that the caller passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvstore.errors import InvalidInput
from kvstore.layout import AttentionKind, KvFormat, PageLayout
from model.attention.base import KvStep
from model.base import ModelInfo
from model.config import LlamaConfig
from model.weights import Weights

LINEARS = ("auto", "fp32", "fp16")
_FP16_MAX = 65504.0

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    input_norm_C: Tensor
    qkv: Linear
    output: Linear
    ffn_norm_C: Tensor
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Implements `LanguageModel`. Holds no state between calls; one thread at a time.

    `linears`: `fp32`; `fp16` (weights in half precision, activations and sums in fp32, through fbgemm: half the memory
    traffic, which bounds decode); `auto`: fp16 where this build of torch has it and the weights fit it, else fp32.
    The attribute of the same name says which one it became. The weights record may be dropped afterwards.
    """

    def __init__(
        self, weights: Weights, *, name: str, tokenizer_digest: str, eos_token_ids: Sequence[int] = (), linears: str
    ) -> None:
        config = weights.config
        self.config = config
        self.linears = choose_linears(weights, linears)
        self.info = ModelInfo(
            name=name,
            revision=weights.revision,
            tokenizer_digest=tokenizer_digest,
            vocab_size=config.vocab_size,
            context_tokens=config.context_tokens,
            eos_token_ids=tuple(eos_token_ids) or config.eos_token_ids,
        )
        tensors = weights.tensors
        half = self.linears == "fp16"
        self._layers = [_build_layer(weights, layer, half=half) for layer in range(config.layers)]
        embedding_VC = tensors["model.embed_tokens.weight"]
        head_VC = embedding_VC if config.tie_embeddings else tensors["lm_head.weight"]
        self._embedding_VC = embedding_VC.half() if half else embedding_VC
        self._norm_C = tensors["model.norm.weight"]
        self._head = make_linear(head_VC, None, half=half)
        self._inv_freq_P = rope_frequencies(config)

    def layout(self, page_tokens: int, kv_format: KvFormat) -> PageLayout:
        """The page layout of this model's KV; it names the weights' revision, so other weights have other layouts."""
        config = self.config
        return PageLayout(
            model=f"llama:{self.info.revision}",
            kind=AttentionKind.GQA,
            layers=config.layers,
            kv_heads=config.kv_heads,
            key_width=config.head_dim,
            value_width=config.head_dim,
            page_tokens=page_tokens,
            kv_format=kv_format,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids_N: npt.NDArray[np.int64],
        position_N: npt.NDArray[np.int64],
        logits_at_R: npt.NDArray[np.int64],
        kv: KvStep,
    ) -> Tensor:
        """Returns fp32 logits [R, V]. The q, k, v given to `kv` are views: unit stride in D, any stride in N.

        Raises InvalidInput for a token outside the vocabulary or a position outside the context, before any KV is
        written.
        """
        self._check(token_ids_N, position_N)
        # torch.tensor copies: the arrays of a step plan are read-only, which from_numpy warns about.
        config = self.config
        tokens = len(token_ids_N)
        shape_C, eps = (config.hidden,), config.rms_eps
        query_heads, rotated = config.heads, config.heads + config.kv_heads
        scale = 1.0 / math.sqrt(config.head_dim)
        cos_N1D, sin_N1D = self._rope(position_N)
        half_turn = config.head_dim // 2
        wanted_R = torch.tensor(logits_at_R)
        x_NC = F.embedding(torch.tensor(token_ids_N), self._embedding_VC).float()
        for index, layer in enumerate(self._layers):
            qkv_NSD = layer.qkv(F.rms_norm(x_NC, shape_C, layer.input_norm_C, eps)).view(tokens, -1, config.head_dim)
            qk_NSD = qkv_NSD[:, :rotated]
            qk_NSD = torch.addcmul(qk_NSD * cos_N1D, qk_NSD.roll(half_turn, -1), sin_N1D)
            streams = (qk_NSD[:, query_heads:], qkv_NSD[:, rotated:])
            mixed_NHD = kv(index, qk_NSD[:, :query_heads], streams, scale)
            if index == config.layers - 1:  # only the rows that want logits go on from here
                mixed_NHD, x_NC = mixed_NHD[wanted_R], x_NC[wanted_R]
                if not len(logits_at_R):
                    return torch.empty(0, config.vocab_size)
            x_NC = x_NC + layer.output(mixed_NHD.reshape(len(x_NC), -1))
            gate_NF, up_NF = layer.gate_up(F.rms_norm(x_NC, shape_C, layer.ffn_norm_C, eps)).chunk(2, -1)
            x_NC = x_NC + layer.down(F.silu(gate_NF) * up_NF)
        return self._head(F.rms_norm(x_NC, shape_C, self._norm_C, eps))

    def _check(self, token_ids_N: npt.NDArray[np.int64], position_N: npt.NDArray[np.int64]) -> None:
        if len(token_ids_N) != len(position_N) or not len(token_ids_N):
            raise InvalidInput("bad_step", "a step needs tokens, each with a position", field="position")
        # Read as unsigned, a negative number is a huge one: one comparison finds both.
        if int(token_ids_N.view(np.uint64).max()) >= self.config.vocab_size:
            raise InvalidInput("bad_token", "a token id is not in the vocabulary", field="token_ids")
        if int(position_N.view(np.uint64).max()) >= self.config.context_tokens:
            raise InvalidInput("context_too_long", "a position is beyond the model's context", field="position")

    def _rope(self, position_N: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """cos and signed sin [N, 1, D]: with the first half's sine negative, a rotation is one roll and one fma."""
        angle_NP = torch.tensor(position_N).float()[:, None] * self._inv_freq_P
        cos_NP, sin_NP = angle_NP.cos(), angle_NP.sin()
        return torch.cat([cos_NP, cos_NP], -1)[:, None], torch.cat([-sin_NP, sin_NP], -1)[:, None]


def _build_layer(weights: Weights, layer: int, *, half: bool) -> _Layer:
    tensors, prefix = weights.tensors, f"model.layers.{layer}."

    def fused(*names: str) -> Linear:
        weight = torch.cat([tensors[f"{prefix}{name}.weight"] for name in names])
        biases = [tensors[key] for name in names if (key := f"{prefix}{name}.bias") in tensors]
        return make_linear(weight, torch.cat(biases) if biases else None, half=half)

    return _Layer(
        input_norm_C=tensors[prefix + "input_layernorm.weight"],
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output=fused("self_attn.o_proj"),
        ffn_norm_C=tensors[prefix + "post_attention_layernorm.weight"],
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )


def make_linear(weight_OI: Tensor, bias_O: Tensor | None, *, half: bool) -> Linear:
    """x [N, I] fp32 -> [N, O] fp32. `half` packs the weight to fp16 once; fbgemm widens it tile by tile."""
    if not half:
        return lambda x_NI: F.linear(x_NI, weight_OI, bias_O)
    run = torch.ops.quantized.linear_dynamic_fp16
    packed = torch.ops.quantized.linear_prepack_fp16(weight_OI.contiguous(), bias_O)
    return lambda x_NI: run(x_NI, packed)


def choose_linears(weights: Weights, asked: str) -> str:
    """Returns `fp32` or `fp16`. Raises InvalidInput (field `linears`) for another word, or when fp16 is asked for and
    this torch or these weights (an element beyond 65504) do not allow it."""
    if asked not in LINEARS:
        raise InvalidInput("bad_linears", f"linears {asked!r} is none of {', '.join(LINEARS)}", field="linears")
    if asked == "fp32":
        return "fp32"
    refusal = _fp16_refusal(weights)
    if refusal and asked == "fp16":
        raise InvalidInput("fp16_unavailable", f"linears fp16: {refusal}", field="linears")
    return "fp32" if refusal else "fp16"


def _fp16_refusal(weights: Weights) -> str:
    try:
        make_linear(torch.zeros(8, 8), None, half=True)(torch.zeros(1, 8))
    except (RuntimeError, AttributeError) as error:
        return f"this build of torch has no fbgemm fp16 linears ({str(error).splitlines()[0]})"
    for name, tensor in weights.tensors.items():
        low, high = tensor.aminmax()
        if not (low >= -_FP16_MAX and high <= _FP16_MAX):
            return f"tensor {name} has an element beyond {_FP16_MAX}"
    return ""


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Angles per position [P], fp32 (Su et al., RoFormer, 2021), with Llama 3.1's stretching where configured.

    Llama 3.1: wavelengths below original/high keep their frequency, above original/low are divided by `factor`, and
    between the two the frequency is interpolated.
    """
    exponent_P = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    freq_P = 1.0 / (config.rope_theta**exponent_P)
    scaling = config.rope_scaling
    if scaling is None:
        return freq_P
    turns_P = scaling.original_context_tokens * freq_P / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep_P = ((turns_P - scaling.low_freq_factor) / span).clamp(0, 1)
    return keep_P * freq_P + (1 - keep_P) * freq_P / scaling.factor
