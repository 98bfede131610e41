"""The CPU attention backend: compiled kernels over pages, split among a small team of threads.

Rows with few new tokens (decode, verification of drafts) are attended straight from the codes, page by page. Rows
with many (prefill) are decoded once into fp32, tags checked as each page is loaded, and handed to torch's attention
in blocks of queries, so that no mask is larger than one block. A step may mix both.

Legend: N packed tokens, H query heads, K kv heads, G = H / K, D key width, V value width, B rows, P pages of the
longest row, S slots, W words of a slot, C positions of a row, n new tokens of a row, q tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore import formats
from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES, AttentionKind, KvFormat, PageLayout
from kvstore.tables import FLAG_KERNEL_READ, ReadTable, WriteTable
from model.attention import cpu_kernels as kernels
from model.attention.checks import require_layer, require_query, require_streams
from model.attention.team import ThreadTeam

LOG2_E = math.log2(math.e)
QUERY_BLOCK_TOKENS = 256
# Below these sizes waking a helper costs more than it saves.
_TEAM_KEYS = 6144  # (key, kv head) pairs of one attend
_TEAM_PAGES = 16  # pages of one gather
_TEAM_ELEMENTS = 65536  # elements of one write

_Array = npt.NDArray[Any]


class CpuBackend:
    """GQA over `int8` and fp32 `none` pages of one layout.

    Safe from several threads at once, also with other backends in the process: the helpers are its own.
    Raises InvalidInput naming `layout.kind` (MLA), `layout.element` (fp16, bf16) or another unserved layout field;
    from calls also `layout` (another table's), `layer`, `query` and `streams`.
    """

    name = "cpu"

    def __init__(self, layout: PageLayout, threads: int | None = None) -> None:
        formats.require_working(layout)
        if layout.kind is not AttentionKind.GQA:
            raise InvalidInput("unserved_layout", "the cpu backend attends over GQA pages only", field="layout.kind")
        if layout.kv_format is KvFormat.NONE and layout.element != "fp32":
            raise InvalidInput("unserved_layout", "the cpu backend stores fp32 or int8", field="layout.element")
        self._layout = layout
        self._code_type = formats.code_type(layout)
        self._geometry = [_geometry(layout, layer) for layer in range(layout.layers)]
        self._team = ThreadTeam(threads or torch.get_num_threads())

    def warm_up(self, layout: PageLayout) -> None:
        """Compiles or loads every kernel, so that the first request waits for none. Takes seconds once a machine."""
        self._require_own(layout)
        heads, page_tokens = layout.kv_heads, layout.page_tokens
        tokens = kernels.SHORT_TOKENS + 2  # one short row of one token, one long row
        pages = layout.pages_for(tokens)
        storage_SU8 = np.zeros((pages + 1, layout.slot_bytes), np.uint8)
        live_S2 = np.ones((pages + 1, 2), np.int64)
        flags_B = np.zeros(2, np.int32)
        order_N = np.array([0, *range(tokens - 1)], np.int64)
        slot_N = (np.array([0, *(1 + order_N[1:] // page_tokens)])).astype(np.int32)
        row_N = np.array([0] + [1] * (tokens - 1), np.int32)
        streams = [torch.zeros(tokens, heads, spec.width) for spec in layout.streams]
        write = WriteTable(
            layout, storage_SU8, live_S2, slot_N, (order_N % page_tokens).astype(np.int32),
            np.ones((tokens, 2), np.int64), row_N, flags_B,
        )  # fmt: skip
        page_ids_BP = np.full((2, pages), -1, np.int32)
        page_ids_BP[0, 0], page_ids_BP[1] = 0, np.arange(1, pages + 1)
        read = ReadTable(
            layout, storage_SU8, live_S2, page_ids_BP, np.ones((2, pages, 2), np.int64),
            np.array([1, tokens - 1], np.int32), np.array([0, 1, tokens], np.int32), order_N, flags_B,
        )  # fmt: skip
        self.write(0, streams, write)
        self.attend(0, torch.zeros(tokens, heads, layout.key_width), read, 1.0)

    def write(self, layer: int, streams: Sequence[Tensor], table: WriteTable) -> None:
        """See AttentionBackend. A token whose KV is not finite flags its row and stores nothing.

        Which other tokens of a row that is flagged by this very call are stored is unspecified.
        """
        layout = table.layout
        self._require_own(layout)
        require_layer(layout, layer)
        tokens = table.slot_N.shape[0]
        require_streams(layout, streams, tokens)
        key_NKD, value_NKV = (stream.detach().contiguous().numpy() for stream in streams)
        codes_SW, scales_SW = self._words(table.storage_SU8)
        args = (
            key_NKD, key_NKD.view(np.int32), value_NKV, value_NKV.view(np.int32), codes_SW, scales_SW,
            _frozen(table.live_S2), _frozen(table.slot_N), _frozen(table.offset_N), _frozen(table.expected_N2),
            _frozen(table.row_N), self._geometry[layer], table.flags_B, table.check_tags,
        )  # fmt: skip
        if key_NKD.size < _TEAM_ELEMENTS:
            kernels.write_tokens(0, tokens, *args)
        else:
            self._team.run(lambda start, stop: kernels.write_tokens(start, stop, *args), tokens)

    def attend(self, layer: int, query_NHD: Tensor, table: ReadTable, scale: float) -> Tensor:
        """See AttentionBackend."""
        layout = table.layout
        self._require_own(layout)
        require_layer(layout, layer)
        require_query(layout, query_NHD)
        tokens, heads = query_NHD.shape[:2]
        query_NHD = query_NHD.detach().contiguous()
        out_NHV = torch.zeros(tokens, heads, layout.value_width)
        codes_SW, scales_SW = (_frozen(words) for words in self._words(table.storage_SU8))
        geometry = (*self._geometry[layer][:7], heads // layout.kv_heads, self._geometry[layer][8])
        args = (
            query_NHD.numpy(), codes_SW, scales_SW, _frozen(table.live_S2), _frozen(table.page_ids_BP),
            _frozen(table.expected_BP2), _frozen(table.context_len_B), _frozen(table.query_start_B1),
            _frozen(table.position_N), layout.kv_heads, geometry, np.float32(scale * LOG2_E), table.flags_B,
            table.check_tags, out_NHV.numpy(),
        )  # fmt: skip
        items = tokens * layout.kv_heads
        if int(table.context_len_B.sum()) * layout.kv_heads < _TEAM_KEYS:
            kernels.attend_short(0, items, *args)
        else:
            self._team.run(lambda start, stop: kernels.attend_short(start, stop, *args), items)
        if tokens > table.context_len_B.shape[0]:
            self._attend_long_rows(layer, query_NHD, table, scale, out_NHV)
        if table.flags_B.any():
            _clear_flagged(table, out_NHV)
        return out_NHV

    def _attend_long_rows(self, layer: int, query_NHD: Tensor, table: ReadTable, scale: float, out_NHV: Tensor) -> None:
        long_rows = np.flatnonzero(np.diff(table.query_start_B1) > kernels.SHORT_TOKENS)
        for row in long_rows.tolist():
            decoded = None if table.flags_B[row] else self._gather(layer, row, table)
            if decoded is None:
                continue
            start, stop = int(table.query_start_B1[row]), int(table.query_start_B1[row + 1])
            position_n = torch.from_numpy(table.position_N[start:stop])
            out_NHV[start:stop] = _attend_dense(query_NHD[start:stop], *decoded, position_n, scale)

    def _gather(self, layer: int, row: int, table: ReadTable) -> tuple[Tensor, Tensor] | None:
        """Decoded keys [K, C, D] and values [K, C, V] of one row; None (and its flag) where a page is not its own."""
        layout = table.layout
        context = int(table.context_len_B[row])
        pages = layout.pages_for(context)
        if pages > table.page_ids_BP.shape[1]:
            table.flags_B[row] |= FLAG_KERNEL_READ
            return None
        key_KCD = torch.empty(layout.kv_heads, context, layout.key_width)
        value_KCV = torch.empty(layout.kv_heads, context, layout.value_width)
        codes_SW, scales_SW = (_frozen(words) for words in self._words(table.storage_SU8))
        args = (
            row, codes_SW, scales_SW, _frozen(table.live_S2), _frozen(table.page_ids_BP), _frozen(table.expected_BP2),
            context, layout.kv_heads, self._geometry[layer], table.flags_B, table.check_tags, key_KCD.numpy(),
            value_KCV.numpy(),
        )  # fmt: skip
        if pages < _TEAM_PAGES:
            kernels.gather_row(0, pages, *args)
        else:
            self._team.run(lambda start, stop: kernels.gather_row(start, stop, *args), pages)
        return None if table.flags_B[row] else (key_KCD, value_KCV)

    def _words(self, storage_SU8: npt.NDArray[np.uint8]) -> tuple[_Array, _Array]:
        """The pool as codes and as fp32 (where the scales are), [S, W] each."""
        return storage_SU8.view(self._code_type), storage_SU8.view(np.float32)

    def _require_own(self, layout: PageLayout) -> None:
        if layout is not self._layout and layout != self._layout:
            raise InvalidInput("other_layout", "this backend was built for another layout", field="layout")


def _attend_dense(query_nHD: Tensor, key_KCD: Tensor, value_KCV: Tensor, position_n: Tensor, scale: float) -> Tensor:
    """Causal attention [n, H, V] of one row over its decoded positions, one block of queries at a time."""
    tokens, heads, width = query_nHD.shape
    kv_heads, context = key_KCD.shape[:2]
    group = heads // kv_heads
    query_KGnD = query_nHD.view(tokens, kv_heads, group, width).permute(1, 2, 0, 3)
    key_KGCD = key_KCD[:, None].expand(-1, group, -1, -1)  # a view: heads of a group share their keys
    value_KGCV = value_KCV[:, None].expand(-1, group, -1, -1)
    attend = torch.nn.functional.scaled_dot_product_attention
    key_at_C = torch.arange(context)
    if tokens == context and bool((position_n == key_at_C).all()):
        out_KGnV = attend(query_KGnD, key_KGCD, value_KGCV, is_causal=True, scale=scale)
    else:
        blocks = []
        for start in range(0, tokens, QUERY_BLOCK_TOKENS):
            position_q = position_n[start : start + QUERY_BLOCK_TOKENS]
            seen = max(1, min(context, int(position_q.max()) + 1))
            mask_qC = key_at_C[None, :seen] <= position_q[:, None]
            query_KGqD = query_KGnD[:, :, start : start + QUERY_BLOCK_TOKENS]
            # A token whose mask hides every key gets zeros.
            blocks.append(
                attend(query_KGqD, key_KGCD[:, :, :seen], value_KGCV[:, :, :seen], attn_mask=mask_qC, scale=scale)
            )
        out_KGnV = torch.cat(blocks, dim=2)
    # A dense kernel may answer zeros to a query that is not finite; this brings its NaN back.
    doubt_nH1 = (query_nHD * 0.0).sum(dim=-1, keepdim=True)
    return out_KGnV.permute(2, 0, 1, 3).reshape(tokens, heads, -1) + doubt_nH1


def _clear_flagged(table: ReadTable, out_NHV: Tensor) -> None:
    """Zeros all tokens of flagged rows, also those that were computed before the row's flag rose."""
    for row in np.flatnonzero(table.flags_B).tolist():
        out_NHV[int(table.query_start_B1[row]) : int(table.query_start_B1[row + 1])] = 0.0


def _frozen(array: _Array) -> _Array:
    """A read-only view. A kernel is compiled per argument type, and this makes the guard's choice no difference."""
    view = array.view()
    view.flags.writeable = False
    return view


def _geometry(layout: PageLayout, layer: int) -> tuple[int, ...]:
    """What the kernels need to find a layer in a slot: starts in units of stored codes, scale starts in fp32 words.

    (key start, key scales, value start, value scales, page tokens, key width, value width, group, scaled)
    """
    key, value = layout.streams
    base = HEADER_BYTES + layer * layout.layer_bytes
    return (
        (base + key.codes_offset) // layout.element_bytes,
        (base + key.scales_offset) // 4,
        (base + value.codes_offset) // layout.element_bytes,
        (base + value.scales_offset) // 4,
        layout.page_tokens,
        key.width,
        value.width,
        0,
        int(layout.has_scales),
    )
