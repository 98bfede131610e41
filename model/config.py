"""What a Llama-family checkpoint says about itself, from an HF `config.json` or from GGUF metadata.

A setting that this room does not implement is refused by name (InvalidInput, reason `unsupported_model` or
`bad_model_config`): a model that is nearly right answers wrongly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvstore.errors import InvalidInput

MAX_DIMENSION = 1 << 20
MAX_CONTEXT_TOKENS = 1 << 24
HF_MODEL_TYPES = frozenset({"llama", "mistral"})


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent RoPE stretching of Llama 3.1 and later (rope_type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions and rules of one Llama-family model. Raises InvalidInput for values that contradict each other."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    rms_eps: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: Llama3RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab_size"):
            _require(1 <= getattr(self, name) <= MAX_DIMENSION, name, f"must be in [1, {MAX_DIMENSION}]")
        _require(1 <= self.context_tokens <= MAX_CONTEXT_TOKENS, "context_tokens", "is out of range")
        _require(self.heads % self.kv_heads == 0, "kv_heads", f"must divide heads {self.heads}")
        _require(self.head_dim % 2 == 0, "head_dim", "must be even: RoPE turns pairs")
        _require(math.isfinite(self.rope_theta) and self.rope_theta > 1, "rope_theta", "must be finite and above 1")
        _require(math.isfinite(self.rms_eps) and self.rms_eps > 0, "rms_eps", "must be finite and positive")
        _require(
            all(0 <= eos < self.vocab_size for eos in self.eos_token_ids), "eos_token_ids", "must be in the vocabulary"
        )

    def canonical(self) -> str:
        """Canonical JSON of all fields; part of the revision digest."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def config_from_hf(raw: Mapping[str, object], generation: Mapping[str, object] | None = None) -> LlamaConfig:
    """Reads an HF `config.json` (both the older `rope_theta`/`rope_scaling` and the newer `rope_parameters` form).

    `generation` is `generation_config.json`; its eos ids, where given, replace the config's.
    """
    model_type = raw.get("model_type")
    if model_type not in HF_MODEL_TYPES:
        _refuse("model_type", model_type, f"supported: {', '.join(sorted(HF_MODEL_TYPES))}")
    heads = _int(raw, "num_attention_heads")
    hidden = _int(raw, "hidden_size")
    context_tokens = _int(raw, "max_position_embeddings")
    _refuse_hf_extras(raw, context_tokens)
    theta, scaling = _hf_rope(raw)
    return LlamaConfig(
        hidden=hidden,
        layers=_int(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=_int(raw, "num_key_value_heads", heads),
        head_dim=_int(raw, "head_dim", hidden // max(heads, 1)),
        ffn=_int(raw, "intermediate_size"),
        vocab_size=_int(raw, "vocab_size"),
        context_tokens=context_tokens,
        rope_theta=theta,
        rms_eps=_float(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=_bool(raw, "tie_word_embeddings", default=False),
        eos_token_ids=_ids((generation or {}).get("eos_token_id"), raw.get("eos_token_id")),
        rope_scaling=scaling,
        attention_bias=_bool(raw, "attention_bias", default=False),
        mlp_bias=_bool(raw, "mlp_bias", default=False),
    )


def _refuse_hf_extras(raw: Mapping[str, object], context_tokens: int) -> None:
    """Settings that change the arithmetic and that `model.llama` does not implement."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        _refuse("hidden_act", raw.get("hidden_act"), "only silu")
    if raw.get("quantization_config"):
        _refuse("quantization_config", "present", "only unquantized safetensors")
    if raw.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        _refuse("partial_rotary_factor", raw.get("partial_rotary_factor"), "only full rotation")
    window = raw.get("sliding_window")
    if isinstance(window, int) and window < context_tokens:
        _refuse("sliding_window", window, "only full attention")


def _hf_rope(raw: Mapping[str, object]) -> tuple[float, Llama3RopeScaling | None]:
    merged: dict[str, object] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is not None and not isinstance(part, Mapping):
            _refuse(key, part, "must be an object")
        merged.update(part if isinstance(part, Mapping) else {})
    theta = _float({**raw, **merged}, "rope_theta", 10_000.0)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind in (None, "default"):
        return theta, None
    if kind != "llama3":
        _refuse("rope_scaling.rope_type", kind, "supported: default, llama3")
    return theta, Llama3RopeScaling(
        factor=_float(merged, "factor"),
        low_freq_factor=_float(merged, "low_freq_factor"),
        high_freq_factor=_float(merged, "high_freq_factor"),
        original_context_tokens=_int(merged, "original_max_position_embeddings"),
    )


def config_from_gguf(fields: Mapping[str, object], *, tie_embeddings: bool) -> LlamaConfig:
    """Reads GGUF metadata of architecture `llama`. Whether embeddings are tied shows only in the tensor list."""
    arch = fields.get("general.architecture")
    if arch != "llama":
        _refuse("general.architecture", arch, "supported: llama")
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        _refuse("llama.rope.scaling.type", scaling, "supported: none")
    if fields.get("llama.expert_count", 0):
        _refuse("llama.expert_count", fields["llama.expert_count"], "only dense models")
    heads = _int(fields, "llama.attention.head_count")
    hidden = _int(fields, "llama.embedding_length")
    head_dim = _int(fields, "llama.attention.key_length", hidden // max(heads, 1))
    if _int(fields, "llama.attention.value_length", head_dim) != head_dim:
        _refuse("llama.attention.value_length", fields["llama.attention.value_length"], "must equal key_length")
    if _int(fields, "llama.rope.dimension_count", head_dim) != head_dim:
        _refuse("llama.rope.dimension_count", fields["llama.rope.dimension_count"], "only full rotation")
    tokens = fields.get("tokenizer.ggml.tokens")
    vocab_default = len(tokens) if isinstance(tokens, list | tuple) else None
    return LlamaConfig(
        hidden=hidden,
        layers=_int(fields, "llama.block_count"),
        heads=heads,
        kv_heads=_int(fields, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=_int(fields, "llama.feed_forward_length"),
        vocab_size=_int(fields, "llama.vocab_size", vocab_default),
        context_tokens=_int(fields, "llama.context_length"),
        rope_theta=_float(fields, "llama.rope.freq_base", 10_000.0),
        rms_eps=_float(fields, "llama.attention.layer_norm_rms_epsilon"),
        tie_embeddings=tie_embeddings,
        eos_token_ids=_ids(fields.get("tokenizer.ggml.eos_token_id")),
    )


def _require(holds: bool, name: str, rule: str) -> None:
    if not holds:
        raise InvalidInput("bad_model_config", f"model config: {name} {rule}", field=f"config.{name}")


def _refuse(name: str, value: object, hint: str) -> None:
    raise InvalidInput("unsupported_model", f"model config: {name} = {value!r} ({hint})", field=f"config.{name}")


def _number(raw: Mapping[str, object], name: str, default: float | None) -> float:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(
            "bad_model_config", f"model config: {name} must be a number, got {value!r}", field=f"config.{name}"
        )
    return value


def _float(raw: Mapping[str, object], name: str, default: float | None = None) -> float:
    return float(_number(raw, name, default))


def _int(raw: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = _number(raw, name, default)
    _require(value == value // 1, name, "must be a whole number")
    return int(value)


def _bool(raw: Mapping[str, object], name: str, *, default: bool) -> bool:
    value = raw.get(name, default)
    _require(isinstance(value, bool), name, "must be true or false")
    return bool(value)


def _ids(*candidates: object) -> tuple[int, ...]:
    """The first candidate that names ids: one id or a list of them."""
    for value in candidates:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if isinstance(value, list) and value:
            _require(all(isinstance(item, int) for item in value), "eos_token_id", "must be ids")
            return tuple(value)
    return ()
