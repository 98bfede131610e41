"""The Triton attention backend: for pools in GPU memory, and for any pool under Triton's interpreter.

The arrays of a table may be torch tensors on the device (the pool and its live tags must be, on a GPU) or numpy;
small numpy arrays are copied to the device, and flags come back into them.

Legend: N packed tokens, H query heads, K kv heads, G = H / K, D key width, V value width, B rows, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore import formats
from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES, AttentionKind, KvFormat, PageLayout
from kvstore.tables import ReadTable, WriteTable
from model.attention.checks import require_layer, require_query, require_streams

BLOCK_TOKENS = 16  # tokens of one row that one program attends, where a row has that many
MIN_DOT = 16  # smallest side of a tile in a dot product

_CODE_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class TritonBackend:
    """GQA over `int8` and `none` pages of one layout.

    Raises InvalidInput naming `attention_backend` (Triton is not installed), `layout.kind` (MLA) or another unserved
    layout field; from calls also `layout`, `layer`, `query`, `streams` and `storage` (not on the query's device).
    """

    name = "triton"

    def __init__(self, layout: PageLayout) -> None:
        formats.require_working(layout)
        if layout.kind is not AttentionKind.GQA:
            raise InvalidInput("unserved_layout", "the triton backend attends over GQA pages only", field="layout.kind")
        self._kernels = _load_kernels()
        self._layout = layout
        self._code_type = torch.int8 if layout.kv_format is KvFormat.INT8 else _CODE_TYPES[layout.element]
        key, value = layout.streams
        self._constants = {
            "T": layout.page_tokens,
            "D": key.width,
            "V": value.width,
            "D_PAD": _padded(key.width),
            "V_PAD": _padded(value.width),
            "SCALED": layout.has_scales,
            "CODE_BYTES": layout.element_bytes,
        }

    def warm_up(self, layout: PageLayout) -> None:
        """Kernels compile at their first launch on a device; nothing is known about it here."""

    def write(self, layer: int, streams: Sequence[Tensor], table: WriteTable) -> None:
        """See AttentionBackend. A token whose KV is not finite in the stored type flags its row and stores nothing."""
        layout = table.layout
        self._require_own(layout)
        require_layer(layout, layer)
        tokens = int(table.slot_N.shape[0])
        require_streams(layout, streams, tokens)
        if not tokens:
            return
        key_NKD, value_NKV = (stream.detach().contiguous() for stream in streams)
        device = key_NKD.device
        codes_SW, scales_SW = self._words(table.storage_SU8, device)
        flags_B = _to(table.flags_B, device)
        self._kernels.write_tokens[(tokens,)](
            key_NKD, value_NKV, codes_SW, scales_SW, _to(table.live_S2, device), _to(table.slot_N, device),
            _to(table.offset_N, device), _to(table.expected_N2, device), _to(table.row_N, device), flags_B,
            table.live_S2.shape[0], layout.slot_bytes, *self._starts(layer), K=layout.kv_heads,
            K_PAD=_padded(layout.kv_heads, 1), CHECK=table.check_tags, enable_fp_fusion=False, **self._constants,
        )  # fmt: skip
        _bring_back(flags_B, table.flags_B)

    def attend(self, layer: int, query_NHD: Tensor, table: ReadTable, scale: float) -> Tensor:
        """See AttentionBackend."""
        layout = table.layout
        self._require_own(layout)
        require_layer(layout, layer)
        require_query(layout, query_NHD)
        tokens, heads = query_NHD.shape[:2]
        device = query_NHD.device
        out_NHV = torch.zeros(tokens, heads, layout.value_width, device=device)
        row, start, count = _blocks(np.asarray(_to(table.query_start_B1, torch.device("cpu"))))
        if not row.size:
            return out_NHV
        group = heads // layout.kv_heads
        codes_SW, scales_SW = self._words(table.storage_SU8, device)
        flags_B = _to(table.flags_B, device)
        blocks = (_to(row, device), _to(start, device), _to(count, device))
        self._kernels.attend[(row.size, layout.kv_heads)](
            query_NHD.detach().contiguous(), codes_SW, scales_SW, _to(table.live_S2, device),
            _to(table.page_ids_BP, device), _to(table.expected_BP2, device), _to(table.context_len_B, device),
            _to(table.position_N, device), *blocks, flags_B, out_NHV, table.live_S2.shape[0], layout.slot_bytes,
            table.page_ids_BP.shape[1], *self._starts(layer), scale * math.log2(math.e), H=heads, G=group,
            R=_padded(int(count.max()) * group), T_PAD=_padded(layout.page_tokens), CHECK=table.check_tags,
            **self._constants,
        )  # fmt: skip
        width = heads * layout.value_width
        self._kernels.clear_flagged[(row.size,)](*blocks, flags_B, out_NHV, W=width, W_PAD=_padded(width))
        _bring_back(flags_B, table.flags_B)
        return out_NHV

    def _words(self, storage_SU8: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """The pool as stored codes and as fp32 words; never a copy."""
        storage = storage_SU8 if isinstance(storage_SU8, Tensor) else torch.from_numpy(storage_SU8)
        if storage.device != device:
            raise InvalidInput(
                "bad_storage", f"the pool is on {storage.device}, the query on {device}", field="storage"
            )
        return storage.view(self._code_type), storage.view(torch.float32)

    def _starts(self, layer: int) -> tuple[int, int, int, int]:
        """(key codes, key scales, value codes, value scales): codes in stored elements, scales in fp32 words."""
        base = HEADER_BYTES + layer * self._layout.layer_bytes
        key, value = self._layout.streams
        size = self._layout.element_bytes
        return (
            (base + key.codes_offset) // size,
            (base + key.scales_offset) // 4,
            (base + value.codes_offset) // size,
            (base + value.scales_offset) // 4,
        )

    def _require_own(self, layout: PageLayout) -> None:
        if layout is not self._layout and layout != self._layout:
            raise InvalidInput("other_layout", "this backend was built for another layout", field="layout")


def _load_kernels() -> ModuleType:
    try:
        from model.attention import gpu_kernels
    except ImportError as error:
        raise InvalidInput(
            "triton_missing",
            "attention_backend 'triton' needs the optional dependency group 'gpu'",
            field="attention_backend",
        ) from error
    return gpu_kernels


def _blocks(query_start_B1: Any) -> tuple[Any, Any, Any]:
    """(row, first packed token, tokens) of each program, int32: rows cut into runs of at most BLOCK_TOKENS."""
    cuts = [
        (row, start, min(BLOCK_TOKENS, int(query_start_B1[row + 1]) - start))
        for row in range(len(query_start_B1) - 1)
        for start in range(int(query_start_B1[row]), int(query_start_B1[row + 1]), BLOCK_TOKENS)
    ]
    table = np.array(cuts, np.int32).reshape(-1, 3)
    row, start, count = (np.ascontiguousarray(table[:, column]) for column in range(3))
    return row, start, count


def _padded(size: int, least: int = MIN_DOT) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _to(array: Any, device: torch.device) -> Tensor:
    tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device, non_blocking=True)


def _bring_back(flags_B: Tensor, table_flags_B: Any) -> None:
    """Copies flags into the table's array where the kernel worked on a copy of it."""
    if isinstance(table_flags_B, Tensor):
        if table_flags_B.data_ptr() != flags_B.data_ptr():
            table_flags_B.copy_(flags_B)
    elif flags_B.device.type != "cpu":
        np.bitwise_or(table_flags_B, flags_B.cpu().numpy(), out=table_flags_B)
