"""The readable attention backend: the oracle for the others, and the only one for MLA pages.

It serves every layout kind and format, one row and one page at a time, in float64 between page and result.

Legend: N packed tokens, H query heads, K kv heads, G = H / K query heads of one kv head, D key width, V value width,
B rows, n new tokens of one row, C positions of one row, T page tokens, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore import formats
from kvstore.layout import AttentionKind, PageLayout
from kvstore.tables import FLAG_KERNEL_READ, FLAG_KERNEL_WRITE, FLAG_NONFINITE, I64, ReadTable, WriteTable
from model.attention.checks import require_layer, require_query, require_streams, value_width

F64 = npt.NDArray[np.float64]


class ReferenceBackend:
    """Attention as the contract words it. Slow; for tests, tiny models and MLA.

    Raises InvalidInput naming `layout.*` (no codec), `query` or `streams` (shape).
    """

    name = "reference"

    def __init__(self, layout: PageLayout) -> None:
        formats.require_working(layout)

    def warm_up(self, layout: PageLayout) -> None:
        """Nothing is compiled here."""

    def write(self, layer: int, streams: Sequence[Tensor], table: WriteTable) -> None:
        """See AttentionBackend. A token whose KV is not finite in the stored type flags its row and stores nothing."""
        layout = table.layout
        require_layer(layout, layer)
        require_streams(layout, streams, table.slot_N.shape[0])
        encoded = [formats.encode(layout, stream.detach().contiguous().numpy()) for stream in streams]
        for token, row in enumerate(table.row_N.tolist()):
            if table.flags_B[row]:
                continue
            finite = all(part.finite_R[token].all() for part in encoded)
            if not self._may_write(table, token):
                table.flags_B[row] |= FLAG_KERNEL_WRITE
                continue
            if not finite:
                table.flags_B[row] |= FLAG_NONFINITE
                continue
            slot, offset = int(table.slot_N[token]), int(table.offset_N[token])
            for index, part in enumerate(encoded):
                formats.code_view(layout, table.storage_SU8, layer, index)[slot, :, offset] = part.codes_RD[token]
                if layout.has_scales:
                    formats.scale_view(layout, table.storage_SU8, layer, index)[slot, :, offset] = part.scales_R[token]

    def attend(self, layer: int, query_NHD: Tensor, table: ReadTable, scale: float) -> Tensor:
        """See AttentionBackend."""
        require_layer(table.layout, layer)
        require_query(table.layout, query_NHD)
        out_NHV = torch.zeros(*query_NHD.shape[:2], value_width(table.layout))
        for row in range(table.context_len_B.shape[0]):
            start, stop = int(table.query_start_B1[row]), int(table.query_start_B1[row + 1])
            if start == stop or table.flags_B[row]:
                continue
            pages = self._pages_of(row, table)
            if pages is None:
                table.flags_B[row] |= FLAG_KERNEL_READ
                continue
            key_KCD, value_KCV = self._load(layer, pages, int(table.context_len_B[row]), table)
            query_nHD = query_NHD[start:stop].detach().double().numpy()
            out_nHV = _attend_row(query_nHD, key_KCD, value_KCV, table.position_N[start:stop], scale)
            out_NHV[start:stop] = torch.from_numpy(out_nHV).float()
        return out_NHV

    def _may_write(self, table: WriteTable, token: int) -> bool:
        slot, offset = int(table.slot_N[token]), int(table.offset_N[token])
        if not 0 <= slot < table.live_S2.shape[0] or not 0 <= offset < table.layout.page_tokens:
            return False
        return not table.check_tags or bool((table.live_S2[slot] == table.expected_N2[token]).all())

    def _pages_of(self, row: int, table: ReadTable) -> list[int] | None:
        """Page ids of a row; None as soon as one of them is not the row's own."""
        count = table.layout.pages_for(int(table.context_len_B[row]))
        if count > table.page_ids_BP.shape[1]:
            return None
        pages = [int(page) for page in table.page_ids_BP[row, :count]]
        for i, page in enumerate(pages):
            if not 0 <= page < table.live_S2.shape[0]:
                return None
            if table.check_tags and (table.live_S2[page] != table.expected_BP2[row, i]).any():
                return None
        return pages

    def _load(self, layer: int, pages: list[int], context: int, table: ReadTable) -> tuple[F64, F64]:
        """Keys [K, C, D] and values [K, C, V] of one row, decoded."""
        layout = table.layout
        streams: list[F64] = []
        for index, spec in enumerate(layout.streams):
            codes_pKTD = formats.code_view(layout, table.storage_SU8, layer, index)[pages]
            scales_pKT = np.empty(0, np.float32)
            if layout.has_scales:
                scales_pKT = formats.scale_view(layout, table.storage_SU8, layer, index)[pages]
            rows_pKTD = formats.decode(layout, codes_pKTD, scales_pKT)
            rows_KCD = rows_pKTD.transpose(1, 0, 2, 3).reshape(spec.heads, -1, spec.width)
            streams.append(rows_KCD[:, :context].astype(np.float64))
        if layout.kind is AttentionKind.MLA:
            latent, rope = streams
            return np.concatenate([latent, rope], axis=-1), latent
        return streams[0], streams[1]


@np.errstate(invalid="ignore", over="ignore")  # a query that is not finite may do what it does, to itself
def _attend_row(query_nHD: F64, key_KCD: F64, value_KCV: F64, position_n: I64, scale: float) -> F64:
    """Softmax attention of one row; token i sees keys 0..position_n[i]. A token that sees no key gets zeros.

    A query that is not finite yields NaN.
    """
    kv_heads, context, width = key_KCD.shape
    query_nKGD = query_nHD.reshape(query_nHD.shape[0], kv_heads, -1, width)
    score_nKGC = np.einsum("nkgd,kcd->nkgc", query_nKGD, key_KCD) * scale
    visible_nC = np.arange(context)[None, :] <= position_n[:, None]
    score_nKGC = np.where(visible_nC[:, None, None, :], score_nKGC, -np.inf)
    top_nKG1 = score_nKGC.max(axis=-1, keepdims=True, initial=-np.inf)
    weight_nKGC = np.exp(score_nKGC - np.where(np.isfinite(top_nKG1), top_nKG1, 0))
    total_nKG1 = weight_nKGC.sum(axis=-1, keepdims=True)
    weight_nKGC /= np.where(total_nKG1 == 0, 1, total_nKG1)
    out_nKGV = np.einsum("nkgc,kcv->nkgv", weight_nKGC, value_KCV)
    return np.ascontiguousarray(out_nKGV.reshape(query_nHD.shape[0], -1, value_KCV.shape[-1]))
