"""Steps for attention tests: a poisoned pool, ragged rows, and everything that a backend needs to serve them.

Legend as in kvstore.tables. The pool starts as poison (NaN scales and elements, codes 127), so any byte that a kernel
reads outside of what the rows own shows in its output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvstore import formats
from kvstore.layout import AttentionKind, KvFormat, PageLayout
from kvstore.tables import ReadTable, WriteTable

SCALE = 0.37


def gqa(
    kv_heads: int = 2,
    key_width: int = 8,
    value_width: int = 8,
    page_tokens: int = 4,
    kv_format: KvFormat = KvFormat.INT8,
    element: str = "fp32",
) -> PageLayout:
    return PageLayout("test", AttentionKind.GQA, 2, kv_heads, key_width, value_width, page_tokens, kv_format, element)


def mla(latent: int = 12, rope: int = 4, page_tokens: int = 8, kv_format: KvFormat = KvFormat.INT8) -> PageLayout:
    return PageLayout("test", AttentionKind.MLA, 2, 1, latent, rope, page_tokens, kv_format)


def poison(layout: PageLayout, storage_SU8: np.ndarray) -> None:
    storage_SU8[:] = 127
    for layer in range(layout.layers):
        for stream in range(2):
            if layout.has_scales:
                formats.scale_view(layout, storage_SU8, layer, stream)[:] = np.nan
            else:
                codes = formats.code_view(layout, storage_SU8, layer, stream)
                codes[:] = 0x7FC0 if layout.element == "bf16" else np.nan


@dataclass
class Case:
    """`history` writes every position of every row; `read` attends the last `new` tokens of each row."""

    layout: PageLayout
    read: ReadTable
    history: WriteTable
    streams: list[torch.Tensor]
    query_NHD: torch.Tensor
    new: list[int]
    contexts: list[int]
    beyond_U8: np.ndarray

    @property
    def flags(self) -> list[int]:
        return self.read.flags_B.tolist()

    def tokens_of(self, row: int) -> slice:
        return slice(int(self.read.query_start_B1[row]), int(self.read.query_start_B1[row + 1]))

    def positions_of(self, row: int) -> slice:
        """The row's part of the packed history."""
        start = sum(self.contexts[:row])
        return slice(start, start + self.contexts[row])

    def without_checks(self) -> Case:
        return replace(self, read=replace(self.read, check_tags=False), history=replace(self.history, check_tags=False))

    def spare_slots(self) -> list[int]:
        used = set(self.read.page_ids_BP.ravel().tolist())
        return [slot for slot in range(self.read.storage_SU8.shape[0]) if slot not in used]


def make_case(
    layout: PageLayout, new: list[int], contexts: list[int], group: int = 2, seed: int = 0, spare: int = 3
) -> Case:
    rng = np.random.default_rng(seed)
    rows = len(new)
    need = [layout.pages_for(context) for context in contexts]
    slots = sum(need) + spare
    # The pool begins 8 bytes into its memory (no alignment but a word's) and ends one slot before it does: what a
    # kernel stores at slot S lands in `beyond_U8`, where a test can see it.
    memory = np.empty((slots + 1) * layout.slot_bytes + 8, np.uint8)[8:].reshape(slots + 1, layout.slot_bytes)
    poison(layout, memory)
    storage_SU8 = memory[:slots]
    live_S2 = rng.integers(1, 1 << 62, (slots + 1, 2))[:slots]
    page_ids_BP = np.full((rows, max([1, *need])), -1, np.int32)
    free = iter(rng.permutation(slots).tolist())
    for row, count in enumerate(need):
        page_ids_BP[row, :count] = [next(free) for _ in range(count)]
    expected_BP2 = live_S2[page_ids_BP].copy()
    flags_B = np.zeros(rows, np.int32)
    row_N = np.repeat(np.arange(rows), contexts).astype(np.int32)
    at_N = np.concatenate([np.arange(context) for context in contexts]).astype(np.int64)
    slot_N = page_ids_BP[row_N, at_N // layout.page_tokens]
    history = WriteTable(
        layout,
        storage_SU8,
        live_S2,
        slot_N,
        (at_N % layout.page_tokens).astype(np.int32),
        live_S2[slot_N].copy(),
        row_N,
        flags_B,
    )
    read = ReadTable(
        layout,
        storage_SU8,
        live_S2,
        page_ids_BP,
        expected_BP2,
        np.array(contexts, np.int32),
        np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        np.concatenate([np.arange(c - n, c) for n, c in zip(new, contexts, strict=True)]).astype(np.int64),
        flags_B,
    )
    width = layout.key_width + layout.value_width if layout.kind is AttentionKind.MLA else layout.key_width

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    streams = [normal(len(at_N), spec.heads, spec.width) for spec in layout.streams]
    return Case(
        layout, read, history, streams, normal(sum(new), layout.kv_heads * group, width), new, contexts, memory[slots]
    )


def dense_attention(case: Case) -> torch.Tensor:
    """Attention over the unquantized streams by a dense softmax in float64, written without pages or tables."""
    out = []
    for row, (new, context) in enumerate(zip(case.new, case.contexts, strict=True)):
        first, second = (stream[case.positions_of(row)].double() for stream in case.streams)
        if case.layout.kind is AttentionKind.MLA:
            key, value = torch.cat([first, second], dim=-1), first
        else:
            key, value = first, second
        query = case.query_NHD[case.tokens_of(row)].double()
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        score = torch.einsum("nhd,chd->hnc", query, key) * SCALE
        hidden = torch.arange(context)[None, :] > torch.arange(context - new, context)[:, None]
        weight = score.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out.append(torch.einsum("hnc,chv->nhv", weight, value))
    return torch.cat(out).float()
