"""Reads a Hugging Face model folder: config.json, *.safetensors (one file or sharded), tokenizer files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvstore.errors import InvalidInput
from kvstore.files import FileReader
from kvstore.json_text import parse_json
from model.config import config_from_hf
from model.weights import Weights, fingerprint_tensor, revision_of

MAX_JSON_BYTES = 256 << 20
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Buffers that older checkpoints saved; they follow from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def read_json(path: Path, *, required: bool = True) -> dict[str, object]:
    """A JSON object from a model folder; {} when it is absent and not required. Raises InvalidInput (field `model`)."""
    if not path.is_file() and not required:
        return {}
    try:
        value = parse_json(FileReader("bad_model_folder", "model", limit=MAX_JSON_BYTES).text(path))
    except ValueError as error:
        raise InvalidInput("bad_model_folder", f"cannot read {path}: {error}", field="model") from error
    if not isinstance(value, dict):
        raise InvalidInput("bad_model_folder", f"{path} is not a JSON object", field="model")
    return value


def weights_from_folder(folder: Path) -> Weights:
    """Loads all tensors as fp32. Raises InvalidInput naming the config field, the tensor or the file."""
    config = config_from_hf(
        read_json(folder / "config.json"), read_json(folder / "generation_config.json", required=False)
    )
    tensors: dict[str, Tensor] = {}
    fingerprints: list[str] = []
    for path in _tensor_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 -- not a mapping: it has keys() and no iterator
                    if name.endswith(_IGNORED_SUFFIXES) or (config.tie_embeddings and name == "lm_head.weight"):
                        continue
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in _FLOATS:
                        raise InvalidInput(
                            "unsupported_model", f"tensor {name} is {tensor.dtype}", field=f"weights.{name}"
                        )
                    raw = tensor.reshape(-1).view(torch.uint8).numpy()
                    fingerprints.append(fingerprint_tensor(name, str(tensor.dtype), raw))
                    tensors[name] = tensor.float()
        except (OSError, SafetensorError) as error:
            raise InvalidInput("bad_model_folder", f"cannot read {path}: {error}", field="model") from error
    return Weights(config, tensors, revision_of(config, fingerprints))


def _tensor_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise InvalidInput("bad_model_folder", f"{_INDEX} has no weight_map", field="model")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise InvalidInput("bad_model_folder", f"{_INDEX} names a file outside: {name!r}", field="model")
        return [folder / name for name in names]
    return [folder / _SINGLE]
