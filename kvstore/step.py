"""One step's rows, and the arrays that kernels see. All arrays derive from one immutable StepPlan.

A tag proves that a page is the one its row names, not that the row belongs to the tokens beside it. So each plan row
has a *seal*: a 63-bit mix of its request number, tokens, positions and page refs, computed from the row alone before
anything is packed. The guard recomputes it from the packed arrays on entry and exit; a permuted array shows.

Shape suffixes: B rows, N packed new tokens, P pages of the longest row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.ids import PageRef
from kvstore.step_kernels import check_rows, fold_pages, seal_rows
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

    @cached_property
    def request_no_B(self) -> I64:
        return np.array([row.request_no for row in self.rows], dtype=np.int64)

    @cached_property
    def seal_B(self) -> I64:
        """The rows' seals, from the rows themselves, before anything is packed for the kernels."""
        rows = self.rows
        start_B1 = np.array([0, *itertools.accumulate(len(row.token_ids) for row in rows)], dtype=np.int64)
        seal_B: I64 = seal_rows(
            self.request_no_B,
            np.array([row.pages.fold for row in rows], dtype=np.uint64),
            np.array([row.first_position for row in rows], dtype=np.int64),
            start_B1,
            np.array([token for row in rows for token in row.token_ids], dtype=np.int64),
        )
        return seal_B

    @cached_property
    def wanting_R(self) -> I64:
        """Rows that want logits, in order: one output each."""
        return np.flatnonzero(np.array([row.wants_logits for row in self.rows], dtype=bool)).astype(np.int64)

    @cached_property
    def last_R(self) -> I64:
        """Packed index of the last token of each row that wants logits."""
        ends_B = np.cumsum([len(row.token_ids) for row in self.rows], dtype=np.int64)
        last_R: I64 = ends_B[self.wanting_R] - 1
        return last_R

    @cached_property
    def repeated_B(self) -> npt.NDArray[np.bool_]:
        """Rows whose request number is not theirs alone."""
        numbers = [row.request_no for row in self.rows]
        if len(set(numbers)) == len(numbers):
            return np.zeros(len(numbers), dtype=np.bool_)
        return np.array([numbers.count(number) > 1 for number in numbers], dtype=np.bool_)


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
    plan: StepPlan = field(default_factory=lambda: StepPlan(0, ()))

    @classmethod
    def build(cls, plan: StepPlan, page_tokens: int, *, seals: bool = True) -> StepArrays:
        """Packs the plan. O(rows * pages). Without `seals` rows cannot be checked."""
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
        has_page_N = (index_N >= 0) & (index_N < page_count_B[row_N])  # else the row is flagged and nothing is written
        index_N = np.where(has_page_N, index_N, 0)
        return cls(
            request_no_B=plan.request_no_B.copy(),
            seal_B=plan.seal_B.copy() if seals else np.zeros(len(rows), dtype=np.int64),
            token_ids_N=np.fromiter((t for r in rows for t in r.token_ids), dtype=np.int64, count=len(row_N)),
            position_N=position_N,
            query_start_B1=query_start_B1,
            page_ids_BP=page_ids_BP,
            expected_BP2=expected_BP2,
            context_len_B=(first_B + counts).astype(np.int32),
            page_count_B=page_count_B,
            slot_N=np.where(has_page_N, page_ids_BP[row_N, index_N], -1).astype(np.int32),
            offset_N=(position_N % page_tokens).astype(np.int32),
            write_expected_N2=np.where(has_page_N[:, None], expected_BP2[row_N, index_N], 0),
            row_N=row_N,
            flags_B=np.zeros(len(rows), dtype=np.int32),
            logits_at_R=plan.last_R.copy(),
            logits_row_R=plan.wanting_R.copy(),
            page_tokens=page_tokens,
            plan=plan,
        )

    def check_rows(self, flag: int) -> None:
        """Flags rows whose arrays do not agree with the plan; all rows if an array has lost its shape."""
        if not self._shaped():
            self.flags_B |= flag
            return
        plan = self.plan
        check_rows(
            plan.request_no_B, plan.seal_B, plan.repeated_B, plan.wanting_R, plan.last_R, self.logits_row_R,
            self.logits_at_R, self.request_no_B, self.seal_B, self.token_ids_N, self.position_N, self.query_start_B1,
            self.page_ids_BP, self.expected_BP2, self.context_len_B, self.page_count_B, self.slot_N,
            self.offset_N, self.write_expected_N2, self.row_N, self.page_tokens, self.flags_B, flag,
        )  # fmt: skip

    def _shaped(self) -> bool:
        B, N, R = (len(self.plan.rows),), (self.plan.tokens,), (len(self.plan.wanting_R),)
        wide = self.page_ids_BP.shape[1:]
        return (
            self.request_no_B.shape == self.seal_B.shape == self.context_len_B.shape == self.page_count_B.shape == B
            and self.token_ids_N.shape == self.position_N.shape == self.slot_N.shape == N
            and self.offset_N.shape == self.row_N.shape == N
            and self.logits_at_R.shape == self.logits_row_R.shape == R
            and self.query_start_B1.shape == (B[0] + 1,)
            and len(wide) == 1
            and self.page_ids_BP.shape == B + wide
            and self.expected_BP2.shape == (*B, *wide, 2)
            and self.write_expected_N2.shape == (*N, 2)
        )
