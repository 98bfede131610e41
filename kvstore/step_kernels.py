"""Compiled packing and checks of a step's arrays: row seals and live tags. See step.py for the shapes.

Shape suffixes: B rows, N packed new tokens, P pages of the longest row, R rows that want logits, Q pages of all rows,
S slots of the pool.
"""
# numba infers the argument types at the first call and ignores annotations:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import numba as nb
import numpy as np

HEAD = 5  # numbers of a row's head: request number, first position, tokens, pages, whether it wants logits

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
def _seal(request_no, pages_fold, first_position, token_ids):
    h = _mix(_mix(_START, np.uint64(request_no)), pages_fold)
    h = _mix(_mix(h, np.uint64(first_position)), np.uint64(token_ids.shape[0]))
    for i in range(token_ids.shape[0]):
        h = _mix(h, np.uint64(token_ids[i]))
    return np.int64(h >> np.uint64(1))


@nb.njit(cache=True, nogil=True)
def seal_plan(head_B5, token_ids_N, refs_Q3, own, unique, seals):
    """Writes what the rows say of themselves: `own` int64 [3 B + 2 R] = request numbers, seals (0 without `seals`),
    whether the number is another row's too (looked for unless `unique`), and for each row that wants logits its index
    and the packed index of its last token."""
    rows = head_B5.shape[0]
    token, page, wanting = 0, 0, 0
    wanted = (own.shape[0] - 3 * rows) // 2
    for b in range(rows):
        number, pages = head_B5[b, 0], head_B5[b, 3]
        tokens_n = token_ids_N[token : token + head_B5[b, 2]]
        token += head_B5[b, 2]
        own[b], own[rows + b], own[2 * rows + b] = number, 0, 0
        if seals:
            fold = _mix(_START, np.uint64(pages))
            for i in range(page, page + pages):
                for part in range(3):
                    fold = _mix(fold, np.uint64(refs_Q3[i, part]))
            own[rows + b] = _seal(number, fold, head_B5[b, 1], tokens_n)
        page += pages
        if not unique:
            for other in range(rows):
                own[2 * rows + b] |= other != b and head_B5[other, 0] == number
        if head_B5[b, 4]:
            own[3 * rows + wanting] = b
            own[3 * rows + wanted + wanting] = token - 1
            wanting += 1


def words_of(rows: int, tokens: int, widest: int, wanted: int) -> int:
    """Length of `words`."""
    return 2 * rows + 2 * tokens + 2 * rows * widest + 2 * tokens + 2 * wanted


def halves_of(rows: int, tokens: int, widest: int) -> int:
    """Length of `halves`."""
    return rows + 1 + rows * widest + 3 * rows + 3 * tokens


@nb.njit(cache=True, nogil=True)
def cut(words, halves, rows, tokens, widest, wanted):
    """A step's arrays as views of its two buffers, in the order of StepArrays' fields."""
    w0, w1, w2 = 2 * rows, 2 * rows + 2 * tokens, 2 * rows + 2 * tokens + 2 * rows * widest
    w3 = w2 + 2 * tokens
    h0 = rows + 1
    h1 = h0 + rows * widest
    h2 = h1 + 2 * rows
    h3 = h2 + 3 * tokens
    return (
        words[0:rows],  # request_no_B
        words[rows:w0],  # seal_B
        words[w0 : w0 + tokens],  # token_ids_N
        words[w0 + tokens : w1],  # position_N
        words[w1:w2].reshape(rows, widest, 2),  # expected_BP2
        words[w2:w3].reshape(tokens, 2),  # write_expected_N2
        words[w3 : w3 + wanted],  # logits_at_R
        words[w3 + wanted : w3 + 2 * wanted],  # logits_row_R
        halves[0:h0],  # query_start_B1
        halves[h0:h1].reshape(rows, widest),  # page_ids_BP
        halves[h1 : h1 + rows],  # context_len_B
        halves[h1 + rows : h2],  # page_count_B
        halves[h2 : h2 + tokens],  # slot_N
        halves[h2 + tokens : h2 + 2 * tokens],  # offset_N
        halves[h2 + 2 * tokens : h3],  # row_N
        halves[h3 : h3 + rows],  # flags_B
    )


@nb.njit(cache=True, nogil=True)
def pack_step(head_B5, token_ids_N, refs_Q3, own, words, halves, widest, wanted, page_tokens):
    """Fills both buffers from the plan's rows and returns their views. A token whose page the row does not have gets
    slot -1: nothing is written for it, and its row is flagged."""
    rows, tokens = head_B5.shape[0], token_ids_N.shape[0]
    views = cut(words, halves, rows, tokens, widest, wanted)
    (
        request_no_B, seal_B, packed_N, position_N, expected_BP2, write_expected_N2, logits_at_R, logits_row_R,
        query_start_B1, page_ids_BP, context_len_B, page_count_B, slot_N, offset_N, row_N, flags_B,
    ) = views  # fmt: skip
    packed_N[:] = token_ids_N
    query_start_B1[0] = 0
    n, q = 0, 0
    for b in range(rows):
        first, count, pages = head_B5[b, 1], head_B5[b, 2], head_B5[b, 3]
        request_no_B[b], seal_B[b] = own[b], own[rows + b]
        query_start_B1[b + 1] = n + count
        context_len_B[b], page_count_B[b], flags_B[b] = first + count, pages, 0
        for i in range(widest):
            inside = i < pages
            page_ids_BP[b, i] = refs_Q3[q + i, 0] if inside else -1
            expected_BP2[b, i, 0] = refs_Q3[q + i, 1] if inside else 0
            expected_BP2[b, i, 1] = refs_Q3[q + i, 2] if inside else 0
        for position in range(first, first + count):
            index = position // page_tokens
            inside = 0 <= index < pages
            position_N[n], offset_N[n], row_N[n] = position, position % page_tokens, b
            slot_N[n] = refs_Q3[q + index, 0] if inside else -1
            write_expected_N2[n, 0] = refs_Q3[q + index, 1] if inside else 0
            write_expected_N2[n, 1] = refs_Q3[q + index, 2] if inside else 0
            n += 1
        q += pages
    for r in range(wanted):
        logits_row_R[r], logits_at_R[r] = own[3 * rows + r], own[3 * rows + wanted + r]
    return views


@nb.njit(cache=True, nogil=True)
def _row_differs(b, views, page_tokens):
    """Whether a row's arrays are not what its seal says, or do not agree among themselves."""
    (
        request_no_B, seal_B, token_ids_N, position_N, expected_BP2, write_expected_N2, _at, _row, query_start_B1,
        page_ids_BP, context_len_B, page_count_B, slot_N, offset_N, row_N, _flags,
    ) = views  # fmt: skip
    start, end = query_start_B1[b], query_start_B1[b + 1]
    pages = page_count_B[b]
    if start < 0 or end <= start or end > token_ids_N.shape[0] or pages < 0 or pages > page_ids_BP.shape[1]:
        return True
    if position_N[start] < 0:
        return True
    for i in range(pages, page_ids_BP.shape[1]):
        if page_ids_BP[b, i] != -1 or expected_BP2[b, i, 0] != 0 or expected_BP2[b, i, 1] != 0:
            return True
    fold = _mix(_START, np.uint64(pages))
    for i in range(pages):
        fold = _mix(fold, np.uint64(page_ids_BP[b, i]))
        fold = _mix(fold, np.uint64(expected_BP2[b, i, 0]))
        fold = _mix(fold, np.uint64(expected_BP2[b, i, 1]))
    if _seal(request_no_B[b], fold, position_N[start], token_ids_N[start:end]) != seal_B[b]:
        return True
    if context_len_B[b] != position_N[end - 1] + 1:
        return True
    for n in range(start, end):
        index = position_N[n] // page_tokens
        if position_N[n] != position_N[start] + (n - start) or index >= pages or row_N[n] != b:
            return True
        if slot_N[n] != page_ids_BP[b, index] or offset_N[n] != position_N[n] % page_tokens:
            return True
        if write_expected_N2[n, 0] != expected_BP2[b, index, 0] or write_expected_N2[n, 1] != expected_BP2[b, index, 1]:
            return True
    return False


@nb.njit(cache=True, nogil=True)
def _check_live(views, live_S2, flag):
    """ORs `flag` into rows that name a page whose live tag is not the expected one. Returns the pages compared."""
    expected_BP2, page_ids_BP, page_count_B, flags_B = views[4], views[9], views[11], views[15]
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


@nb.njit(cache=True, nogil=True)
def check_step(own, words, halves, live_S2, rows, tokens, widest, wanted, page_tokens, rows_flag, live_flag):
    """See StepArrays.check."""
    views = cut(words, halves, rows, tokens, widest, wanted)
    if rows_flag:
        request_no_B, seal_B, logits_at_R, logits_row_R, flags_B = views[0], views[1], views[6], views[7], views[15]
        for r in range(wanted):
            b = own[3 * rows + r]
            if logits_row_R[r] != b or logits_at_R[r] != own[3 * rows + wanted + r]:
                flags_B[b] |= rows_flag
        for b in range(rows):
            differs = request_no_B[b] != own[b] or seal_B[b] != own[rows + b] or own[2 * rows + b] != 0
            if differs or _row_differs(b, views, page_tokens):
                flags_B[b] |= rows_flag
    return _check_live(views, live_S2, live_flag) if live_flag else 0
