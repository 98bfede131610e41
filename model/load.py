"""Finds and loads a model and its tokenizer by name or path."""

from __future__ import annotations

from pathlib import Path

from kvstore.errors import InvalidInput
from model.base import LanguageModel, ModelInfo, Tokenizer
from model.gguf_file import open_gguf
from model.hf_folder import weights_from_folder
from model.llama import LlamaModel
from model.probe import build_probe
from model.tokenizer import ByteLevelTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from model.weights import Weights, config_of_gguf, default_model_path, revision_of_gguf, weights_from_gguf

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
    return _assemble(_name(spec, path), weights, tokenizer, linears), tokenizer


def load_identity(spec: str = DEFAULT_MODEL) -> tuple[ModelInfo, Tokenizer]:
    """What `load_model(spec)` would say of itself, for who computes nothing. Raises as it does.

    Of a GGUF file no tensor is decoded: seconds and a copy of the weights are saved. Others are loaded and dropped.
    """
    path = default_model_path() if spec == DEFAULT_MODEL else Path(spec)
    if spec == PROBE_MODEL or path.suffix != ".gguf" or not path.is_file():
        model, tokenizer = load_model(spec, linears="fp32")
        return model.info, tokenizer
    file = open_gguf(path)
    config, own = config_of_gguf(file), tokenizer_from_gguf(file.fields)
    info = ModelInfo(
        name=_name(spec, path),
        revision=revision_of_gguf(file, config),
        tokenizer_digest=own.digest,
        vocab_size=config.vocab_size,
        context_tokens=config.context_tokens,
        eos_token_ids=config.eos_token_ids,
    )
    return info, own


def _name(spec: str, path: Path) -> str:
    return _DEFAULT_NAME if spec == DEFAULT_MODEL else path.resolve().stem


def _assemble(name: str, weights: Weights, tokenizer: ByteLevelTokenizer, linears: str) -> LlamaModel:
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise InvalidInput(
            "bad_tokenizer",
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {weights.config.vocab_size}",
            field="tokenizer",
        )
    return LlamaModel(weights, name=name, tokenizer_digest=tokenizer.digest, linears=linears)
