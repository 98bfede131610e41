"""Writes the default model as a folder in Hugging Face format, for systems that read no GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvstore.errors import InvalidInput
from model.gguf_file import open_gguf
from model.tokenizer import tokenizer_from_gguf
from model.weights import default_model_path, weights_from_gguf


def export_default_model(folder: Path) -> None:
    """fp32 safetensors, config and tokenizer. Raises InvalidInput: the model is not installed, or the folder is not
    empty."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput("folder_not_empty", f"{folder} is not empty", field="--export")
    file = open_gguf(default_model_path())
    weights = weights_from_gguf(file)
    config = weights.config
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: t.contiguous() for name, t in weights.tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    eos = config.eos_token_ids[0] if config.eos_token_ids else None
    _write(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32",
        "hidden_size": config.hidden, "intermediate_size": config.ffn, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_eps, "rope_theta": config.rope_theta, "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings, "bos_token_id": 1, "eos_token_id": eos,
    })  # fmt: skip
    _write_tokenizer(folder, file.fields)


def export_tokenizer(folder: Path) -> None:
    """The tokenizer alone, for load generators that count tokens themselves. Raises InvalidInput: the model is not
    installed."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, open_gguf(default_model_path()).fields)


def _write_tokenizer(folder: Path, fields: Mapping[str, object]) -> None:
    ours = tokenizer_from_gguf(fields)
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    theirs = Tokenizer(models.BPE(vocab={str(t): i for i, t in enumerate(tokens)}, merges=pairs))
    theirs.pre_tokenizer = ours.plain.pre_tokenizer
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ours.controls])
    theirs.save(str(folder / "tokenizer.json"))
    eos = str(tokens[ours.eos_token_ids[0]]) if ours.eos_token_ids else None
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos, "bos_token": eos,
        "clean_up_tokenization_spaces": False,
    })  # fmt: skip


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
