"""Finds and loads a model and its tokenizer by name or path."""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import InvalidInput
from model.base import LanguageModel, Tokenizer
from model.gguf_file import open_gguf
from model.hf_folder import weights_from_folder
from model.llama import LlamaModel
from model.probe import build_probe
from model.tokenizer import ByteLevelTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from model.weights import Weights, default_model_path, weights_from_gguf

DEFAULT_MODEL = "smollm2"
PROBE_MODEL = "probe"
_DEFAULT_NAME = "smollm2-135m-instruct"


def load_model(spec: str = DEFAULT_MODEL, *, linears: str = "auto") -> tuple[LanguageModel, Tokenizer]:
    """Loads `smollm2` (the default), `probe`, a `.gguf` file, or a folder with config.json and safetensors.

    `linears`: see `LlamaModel`. Raises InvalidInput: field `model` for a spec that is none of these or not installed,
    else the field of the config, the weights or the tokenizer that is not supported.
    """
    if spec == PROBE_MODEL:
        return build_probe(linears=linears)
    path = default_model_path() if spec == DEFAULT_MODEL else Path(spec)
    if path.suffix == ".gguf" and path.is_file():
        file = open_gguf(path)
        weights, tokenizer = weights_from_gguf(file), tokenizer_from_gguf(file.fields)
    elif (path / "config.json").is_file():
        weights = weights_from_folder(path)
        tokenizer = tokenizer_from_folder(path, weights.config.eos_token_ids)
    else:
        raise InvalidInput(
            "unknown_model",
            f"{spec!r} is not {DEFAULT_MODEL}, {PROBE_MODEL}, a .gguf file, or a folder with config.json",
            field="model",
        )
    name = _DEFAULT_NAME if spec == DEFAULT_MODEL else path.resolve().stem
    return _assemble(name, weights, tokenizer, linears), tokenizer


def _assemble(name: str, weights: Weights, tokenizer: ByteLevelTokenizer, linears: str) -> LlamaModel:
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise InvalidInput(
            "bad_tokenizer",
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {weights.config.vocab_size}",
            field="tokenizer",
        )
    return LlamaModel(weights, name=name, tokenizer_digest=tokenizer.digest, linears=linears)
