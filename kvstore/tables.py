"""The tables that the guard yields: the only way by which kernels reach pages.

Shape suffixes: B rows (sequences) of the step, N new tokens of all rows (packed), P pages of the longest row,
S slots of the pool. All arrays are C-contiguous numpy; `torch.from_numpy` shares them without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.layout import PageLayout

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

# Bits of `flags_B`: why the guard or a kernel gave up on a row. 0 is a healthy row.
FLAG_ENTRY = 1
FLAG_KERNEL_READ = 2
FLAG_KERNEL_WRITE = 4
FLAG_EXIT = 8
FLAG_ROWS = 16
FLAG_NONFINITE = 32


@dataclass(frozen=True)
class ReadTable:
    """Pages that the rows of one step may read.

    A kernel must, for each page of a row, compare `live_S2[page_id]` with `expected_BP2[row, i]` as it loads the
    page; where they differ it ORs FLAG_KERNEL_READ into `flags_B[row]` and reads no byte of the page. A row whose
    flag is already set is skipped: its output is zeros. `check_tags=False` exists only for negative controls.
    """

    layout: PageLayout
    storage_SU8: U8  # uint8 [S, slot_bytes]
    live_S2: I64  # int64 [S, 2] live (incarnation, generation)
    page_ids_BP: I32  # int32 [B, P], -1 padding
    expected_BP2: I64  # int64 [B, P, 2]
    context_len_B: I32  # int32 [B]: positions that exist after this step's writes
    query_start_B1: I32  # int32 [B + 1]: row b owns packed tokens query_start[b]:query_start[b + 1]
    position_N: I64  # int64 [N] absolute position of each packed token (causal bound: keys 0..position)
    flags_B: I32  # int32 [B], written by kernels
    check_tags: bool = True


@dataclass(frozen=True)
class WriteTable:
    """Rows of pages that the packed tokens of one step are written to.

    A kernel must compare `live_S2[slot_N]` with `expected_N2` before it stores a token's KV; where they differ it
    ORs FLAG_KERNEL_WRITE into `flags_B[row_N]` and stores nothing; a key or value that is not finite
    gets FLAG_NONFINITE and is not stored either. Tokens of flagged rows are skipped.
    """

    layout: PageLayout
    storage_SU8: U8
    live_S2: I64
    slot_N: I32  # int32 [N] page id
    offset_N: I32  # int32 [N] row inside the page, 0..page_tokens-1
    expected_N2: I64  # int64 [N, 2]
    row_N: I32  # int32 [N] row of the step that the token belongs to
    flags_B: I32
    check_tags: bool = True
