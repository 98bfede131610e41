"""One step's rows, and the arrays that kernels see. All arrays derive from one immutable StepPlan.

A tag proves that a page is the one its row names, not that the row belongs to the tokens beside it. So each plan row
has a *seal*: a 63-bit mix of its request number, tokens, positions and page refs, computed from the row alone before
anything is packed. The guard recomputes it from the packed arrays on entry and exit; a permuted array shows.

All arrays of a step are views of two buffers, so that a check is one call with four arrays: unpacking the arguments of
a compiled function costs more than the check.

Shape suffixes: B rows, N packed new tokens, P pages of the longest row, R rows that want logits, Q pages of all rows.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvstore.ids import PageRef
from kvstore.step_kernels import HEAD, check_step, halves_of, pack_step, seal_plan, words_of
from kvstore.tables import I32, I64

_NO_LIVE_S2: I64 = np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class PageRun:
    """The pages of one sequence in order. Immutable; a longer sequence gets a new run."""

    refs: tuple[PageRef, ...]

    @cached_property
    def refs_P3(self) -> I64:
        """int64 [P, 3]: page id, incarnation, generation."""
        return np.array([(r.page_id, *r.tag) for r in self.refs], dtype=np.int64).reshape(-1, 3)

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


@dataclass(frozen=True)
class StepArrays:
    """The packed arrays of one plan: views of `words` and `halves` (step_kernels.cut). Their elements are mutable only
    so that tests can permute them; nothing writes here but kernels, which set flags."""

    request_no_B: I64
    seal_B: I64
    token_ids_N: I64
    position_N: I64
    expected_BP2: I64
    write_expected_N2: I64
    logits_at_R: I64
    logits_row_R: I64
    query_start_B1: I32
    page_ids_BP: I32
    context_len_B: I32
    page_count_B: I32
    slot_N: I32
    offset_N: I32
    row_N: I32
    flags_B: I32
    words: I64
    halves: I32
    own: I64  # what the plan's rows say of themselves, computed before the packing; read-only
    page_tokens: int
    pages: int  # of all rows

    @classmethod
    def build(cls, plan: StepPlan, page_tokens: int, *, seals: bool = True) -> StepArrays:
        """Packs the plan. O(rows * pages). Without `seals` rows cannot be checked."""
        rows = plan.rows
        numbers: list[int] = []
        for row in rows:
            numbers += (
                row.request_no, row.first_position, len(row.token_ids), len(row.pages.refs), row.wants_logits
            )  # fmt: skip
        B, P, R = len(rows), max(numbers[3::HEAD], default=1) or 1, sum(numbers[4::HEAD])
        unique = len(set(numbers[0::HEAD])) == B
        for row in rows:
            numbers += row.token_ids
        # An array of Python's takes a list of numbers several times faster than numpy does.
        plain = np.frombuffer(array.array("q", numbers), dtype=np.int64) if numbers else np.zeros(0, np.int64)
        head_B5, token_ids_N = plain[: B * HEAD].reshape(B, HEAD), plain[B * HEAD :]
        refs_Q3 = np.concatenate([row.pages.refs_P3 for row in rows]) if rows else np.zeros((0, 3), np.int64)
        N = len(token_ids_N)
        own = np.empty(3 * B + 2 * R, np.int64)
        seal_plan(head_B5, token_ids_N, refs_Q3, own, unique, seals)
        own.flags.writeable = False
        words = np.empty(words_of(B, N, P, R), np.int64)
        halves = np.empty(halves_of(B, N, P), np.int32)
        views = pack_step(head_B5, token_ids_N, refs_Q3, own, words, halves, P, R, page_tokens)
        return cls(*(*views, words, halves, own, page_tokens, len(refs_Q3)))

    def check(self, live_S2: I64, rows_flag: int, live_flag: int) -> int:
        """Flags rows whose arrays do not agree with the plan, and rows that name a page whose live tag is not the
        expected one. A flag of 0 leaves that check out. Returns the pages compared.

        Arrays may agree among themselves and still be another order of rows than the one that is published: each
        row's number, seal and place of its logits are compared with the plan's own.
        """
        compared: int = check_step(
            self.own, self.words, self.halves, live_S2, len(self.request_no_B), len(self.token_ids_N),
            self.page_ids_BP.shape[1], len(self.logits_at_R), self.page_tokens, rows_flag, live_flag,
        )  # fmt: skip
        return compared

    def check_rows(self, flag: int) -> None:
        """`check` of the rows alone."""
        self.check(_NO_LIVE_S2, flag, 0)
