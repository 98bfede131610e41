"""Compiled checks over a step's packed arrays: row seals and live tags. See step.py for the shapes.

Shape suffixes: B rows, N packed new tokens, P pages of the longest row, S slots of the pool.
"""
# numba infers the argument types at the first call and ignores annotations:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import numba as nb
import numpy as np

_MIX = np.uint64(0x9E3779B97F4A7C15)
_MIX2 = np.uint64(0xC2B2AE3D27D4EB4F)
_START = np.uint64(0xD6E8FEB86659FD93)  # not 0, which the mixer leaves in place for a value of 0


@nb.njit(cache=True, nogil=True)
def _mix(h, value):
    """One round of a splitmix64-like mixer: a bijection of h for each value."""
    h = (h ^ value) * _MIX
    h ^= h >> np.uint64(29)
    h *= _MIX2
    return h ^ (h >> np.uint64(32))


@nb.njit(cache=True, nogil=True)
def fold_pages(page_ids, tags_P2, count):
    h = _mix(_START, np.uint64(count))
    for i in range(count):
        h = _mix(h, np.uint64(page_ids[i]))
        h = _mix(h, np.uint64(tags_P2[i, 0]))
        h = _mix(h, np.uint64(tags_P2[i, 1]))
    return h


@nb.njit(cache=True, nogil=True)
def seal_row(request_no, pages_fold, first_position, token_ids):
    h = _mix(_mix(_START, np.uint64(request_no)), pages_fold)
    h = _mix(_mix(h, np.uint64(first_position)), np.uint64(token_ids.shape[0]))
    for i in range(token_ids.shape[0]):
        h = _mix(h, np.uint64(token_ids[i]))
    return np.int64(h >> np.uint64(1))


@nb.njit(cache=True, nogil=True)
def seal_rows(request_no_B, fold_B, first_B, token_start_B1, token_ids_N):
    """Seals of all rows of a plan, int64 [B]: one call, since calling costs more than sealing."""
    seal_B = np.empty(request_no_B.shape[0], np.int64)
    for b in range(request_no_B.shape[0]):
        tokens = token_ids_N[token_start_B1[b] : token_start_B1[b + 1]]
        seal_B[b] = seal_row(request_no_B[b], fold_B[b], first_B[b], tokens)
    return seal_B


@nb.njit(cache=True, nogil=True)
def check_rows(
    plan_request_no_B,
    plan_seal_B,
    plan_repeated_B,
    plan_wanting_R,
    plan_last_R,
    logits_row_R,
    logits_at_R,
    request_no_B,
    seal_B,
    token_ids_N,
    position_N,
    query_start_B1,
    page_ids_BP,
    expected_BP2,
    context_len_B,
    page_count_B,
    slot_N,
    offset_N,
    write_expected_N2,
    row_N,
    page_tokens,
    flags_B,
    flag,
):
    """ORs `flag` into rows whose packed arrays are not what the plan row said. Shapes were checked before.

    Arrays may agree among themselves and still be another order of rows than the one that is published: each row's
    number, seal and place of its logits are compared with the plan's own.
    """
    for r in range(plan_wanting_R.shape[0]):
        if logits_row_R[r] != plan_wanting_R[r] or logits_at_R[r] != plan_last_R[r]:
            flags_B[plan_wanting_R[r]] |= flag
    for b in range(request_no_B.shape[0]):
        start, end = query_start_B1[b], query_start_B1[b + 1]
        pages = page_count_B[b]
        bad = start < 0 or end <= start or end > token_ids_N.shape[0] or pages < 0 or pages > page_ids_BP.shape[1]
        if not bad:
            bad = position_N[start] < 0
            for i in range(pages, page_ids_BP.shape[1]):
                bad |= page_ids_BP[b, i] != -1 or expected_BP2[b, i, 0] != 0 or expected_BP2[b, i, 1] != 0
        if not bad:
            fold = fold_pages(page_ids_BP[b], expected_BP2[b], pages)
            bad = seal_row(request_no_B[b], fold, position_N[start], token_ids_N[start:end]) != seal_B[b]
            bad |= context_len_B[b] != position_N[end - 1] + 1
            for n in range(start, end):
                index = position_N[n] // page_tokens
                bad |= position_N[n] != position_N[start] + (n - start) or index >= pages or row_N[n] != b
                if not bad:
                    bad |= slot_N[n] != page_ids_BP[b, index] or offset_N[n] != position_N[n] % page_tokens
                    bad |= write_expected_N2[n, 0] != expected_BP2[b, index, 0]
                    bad |= write_expected_N2[n, 1] != expected_BP2[b, index, 1]
        bad |= seal_B[b] != plan_seal_B[b] or request_no_B[b] != plan_request_no_B[b] or plan_repeated_B[b]
        if bad:
            flags_B[b] |= flag


@nb.njit(cache=True, nogil=True)
def check_live(live_S2, page_ids_BP, expected_BP2, page_count_B, flags_B, flag):
    """ORs `flag` into rows that name a page whose live tag is not the expected one. Returns the pages compared."""
    compared = 0
    for b in range(page_ids_BP.shape[0]):
        for i in range(min(page_count_B[b], page_ids_BP.shape[1])):
            page_id = page_ids_BP[b, i]
            compared += 1
            same = 0 <= page_id < live_S2.shape[0]
            if same:
                same = live_S2[page_id, 0] == expected_BP2[b, i, 0] and live_S2[page_id, 1] == expected_BP2[b, i, 1]
            if not same:
                flags_B[b] |= flag
    return compared
