"""One step's rows, and the arrays that kernels see. All arrays derive from one immutable StepPlan.

A tag proves that a page is the one its row names, not that the row belongs to the tokens beside it. So each plan row
has a *seal*: a 63-bit mix of its request number, tokens, positions and page refs, computed from the row alone before
anything is packed. The guard recomputes it from the packed arrays on entry and exit; a permuted array shows.

Shape suffixes: B rows, N packed new tokens, P pages of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvstore.ids import PageRef
from kvstore.step_kernels import check_rows, fold_pages, seal_row
from kvstore.tables import I32, I64


@dataclass(frozen=True)
class PageRun:
    """The pages of one sequence in order. Immutable; a longer sequence gets a new run."""

    refs: tuple[PageRef, ...]

    @cached_property
    def ids_P(self) -> I32:
        return np.array([r.page_id for r in self.refs], dtype=np.int32)

    @cached_property
    def tags_P2(self) -> I64:
        return np.array([r.tag for r in self.refs], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def fold(self) -> np.uint64:
        return np.uint64(fold_pages(self.ids_P, self.tags_P2, len(self.refs)))

    def extended(self, refs: Sequence[PageRef]) -> PageRun:
        return PageRun(self.refs + tuple(refs))


@dataclass(frozen=True)
class PlanRow:
    """One sequence in one step: `token_ids` at `first_position`.. are written to `pages` and attend to all before."""

    request_no: int
    token_ids: tuple[int, ...]
    first_position: int
    pages: PageRun
    wants_logits: bool = True

    @cached_property
    def seal(self) -> int:
        return int(
            seal_row(self.request_no, self.pages.fold, self.first_position, np.array(self.token_ids, dtype=np.int64))
        )

    @property
    def context_len(self) -> int:
        return self.first_position + len(self.token_ids)


@dataclass(frozen=True)
class StepPlan:
    """What one step computes. Rows have distinct request numbers."""

    step_no: int
    rows: tuple[PlanRow, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass
class StepArrays:
    """The packed arrays of one plan. Mutable only so that tests can permute them; nothing else writes here."""

    request_no_B: I64
    seal_B: I64
    token_ids_N: I64
    position_N: I64
    query_start_B1: I32
    page_ids_BP: I32
    expected_BP2: I64
    context_len_B: I32
    page_count_B: I32
    slot_N: I32
    offset_N: I32
    write_expected_N2: I64
    row_N: I32
    flags_B: I32
    logits_at_R: I64
    logits_row_R: I64
    page_tokens: int = field(default=0)

    @classmethod
    def build(cls, plan: StepPlan, page_tokens: int) -> StepArrays:
        """Packs the plan. O(rows * pages)."""
        rows = plan.rows
        counts = np.array([len(r.token_ids) for r in rows], dtype=np.int32)
        page_count_B = np.array([len(r.pages.refs) for r in rows], dtype=np.int32)
        query_start_B1 = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_B1[1:])
        widest = int(page_count_B.max(initial=1))
        page_ids_BP = np.full((len(rows), widest), -1, dtype=np.int32)
        expected_BP2 = np.zeros((len(rows), widest, 2), dtype=np.int64)
        for b, row in enumerate(rows):
            page_ids_BP[b, : page_count_B[b]] = row.pages.ids_P
            expected_BP2[b, : page_count_B[b]] = row.pages.tags_P2
        first_B = np.array([r.first_position for r in rows], dtype=np.int64)
        row_N = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        position_N = first_B[row_N] + (np.arange(len(row_N)) - query_start_B1[row_N])
        index_N = position_N // page_tokens
        wanting = [b for b, r in enumerate(rows) if r.wants_logits]
        return cls(
            request_no_B=np.array([r.request_no for r in rows], dtype=np.int64),
            seal_B=np.array([r.seal for r in rows], dtype=np.int64),
            token_ids_N=np.fromiter((t for r in rows for t in r.token_ids), dtype=np.int64, count=len(row_N)),
            position_N=position_N,
            query_start_B1=query_start_B1,
            page_ids_BP=page_ids_BP,
            expected_BP2=expected_BP2,
            context_len_B=(first_B + counts).astype(np.int32),
            page_count_B=page_count_B,
            slot_N=page_ids_BP[row_N, index_N],
            offset_N=(position_N % page_tokens).astype(np.int32),
            write_expected_N2=expected_BP2[row_N, index_N],
            row_N=row_N,
            flags_B=np.zeros(len(rows), dtype=np.int32),
            logits_at_R=np.array([query_start_B1[b + 1] - 1 for b in wanting], dtype=np.int64),
            logits_row_R=np.array(wanting, dtype=np.int64),
            page_tokens=page_tokens,
        )

    def check_rows(self, flag: int) -> None:
        """Flags rows whose arrays do not agree with the plan (see `check_rows` above)."""
        check_rows(
            self.request_no_B, self.seal_B, self.token_ids_N, self.position_N, self.query_start_B1,
            self.page_ids_BP, self.expected_BP2, self.context_len_B, self.page_count_B, self.slot_N,
            self.offset_N, self.write_expected_N2, self.page_tokens, self.flags_B, flag,
        )  # fmt: skip
