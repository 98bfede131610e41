"""Compiled CPU kernels over pages. Serial, without the GIL; cpu.py splits the work among threads.

The kernels are generic in the stored type: `int8` codes with scales, or fp32 codes without (`scaled` is False).
Every kernel that touches a page compares both words of its live tag first (see kvstore.tables) and touches nothing of
a page that differs. Softmax is online, page by page (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018), in base 2.

Legend: N packed tokens, B rows, P pages of a row, S slots, K kv heads, G query heads of one kv head, H = K * G,
D key width, V value width, T page tokens, C positions of a row, W words of a slot.
"""

# mypy: allow-untyped-defs
# Kernel arguments have no annotations: numba infers their types and ignores Python's.
from __future__ import annotations

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from kvstore.formats import INT8_MAX, SCALE_MAX, TINY_ABSMAX
from kvstore.tables import FLAG_KERNEL_READ, FLAG_KERNEL_WRITE, FLAG_NONFINITE

# Rows with at most this many new tokens are attended page by page, token by token, straight from the codes; longer
# ones are decoded once and handed to a dense kernel.
SHORT_TOKENS = 8

# NaN must stay NaN, so "nnan" and "ninf" are left out.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_NEVER = np.float32(-np.inf)
_LOWEST_EXPONENT = np.float32(-126.0)
# Chebyshev interpolation of 2^x on [-1/2, 1/2], degree 6: relative error 1.1e-7.
_C = tuple(np.float32(c) for c in (1.0, 0.69314720, 0.24022650, 0.05550327, 0.009618057, 0.0013400428, 0.00015461445))
_INFINITY_BITS = np.int32(0x7F800000)
_ABS_BITS = np.int32(0x7FFFFFFF)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)


@intrinsic
def _float_from_bits(_context, _bits):
    """Reinterprets int32 as fp32."""

    def generate(context, builder, _signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@numba.njit(fastmath=_FAST, inline="always")
def _exp2(x):
    """2^x for x <= 0 as plain arithmetic, so that a loop over it vectorises; 2^-126 below that, NaN for NaN."""
    safe = x if x > _LOWEST_EXPONENT else _LOWEST_EXPONENT  # NaN becomes -126 here, where it picks the exponent,
    kept = _LOWEST_EXPONENT if x < _LOWEST_EXPONENT else x  # and stays NaN here, where it reaches the result
    whole = np.rint(safe)
    f = kept - whole
    p = _C[6]
    p = p * f + _C[5]
    p = p * f + _C[4]
    p = p * f + _C[3]
    p = p * f + _C[2]
    p = p * f + _C[1]
    p = p * f + _C[0]
    return p * _float_from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@numba.njit(cache=True, nogil=True)
def _row_of(query_start_B1, token):
    """The row that owns a packed token, or -1."""
    rows = query_start_B1.shape[0] - 1
    if token >= query_start_B1[rows] or token < query_start_B1[0]:
        return -1
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        if query_start_B1[middle] <= token:
            low = middle
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def _readable(page, row, i, live_S2, expected_BP2, check_tags):
    """Whether page i of the row exists and still carries the tag that the row expects."""
    if page < 0 or page >= live_S2.shape[0]:
        return False
    if check_tags:
        return live_S2[page, 0] == expected_BP2[row, i, 0] and live_S2[page, 1] == expected_BP2[row, i, 1]
    return True


@numba.njit(fastmath=_FAST, nogil=True)
def _score_page(query_GD, codes, scales, scaled, rows, score_GT):
    """Scores of one page's first `rows` keys, scales applied."""
    width = query_GD.shape[1]
    for g in range(query_GD.shape[0]):
        query_D = query_GD[g]
        score_T = score_GT[g]
        for t in range(rows):
            code_D = codes[t * width : (t + 1) * width]
            total = _ZERO
            for d in range(width):
                total += query_D[d] * np.float32(code_D[d])
            score_T[t] = total * scales[t] if scaled else total


@numba.njit(fastmath={"nnan", "nsz"}, nogil=True)  # a maximum vectorises only if NaN is ignored; the sum brings it back
def _maximum(score_T, rows, start):
    top = start
    for t in range(rows):
        top = max(top, score_T[t])
    return top


@numba.njit(fastmath=_FAST, nogil=True)
def _softmax_page(score_GT, rows, top_G, total_G, acc_GV):
    """Turns scores into weights relative to the running maximum, and rescales what has been summed so far."""
    for g in range(score_GT.shape[0]):
        score_T = score_GT[g]
        top = _maximum(score_T, rows, top_G[g])
        rescale = _exp2(top_G[g] - top)
        total = _ZERO
        for t in range(rows):
            weight = _exp2(score_T[t] - top)
            total += weight
            score_T[t] = weight
        top_G[g] = top
        total_G[g] = total_G[g] * rescale + total
        acc_V = acc_GV[g]
        for d in range(acc_V.shape[0]):
            acc_V[d] *= rescale


@numba.njit(fastmath=_FAST, nogil=True)
def _weigh_page(score_GT, codes, scales, scaled, rows, acc_GV):
    """Adds the weighted values of one page: four rows at a time, then the rest (never a row that is not valid)."""
    width = acc_GV.shape[1]
    fours = rows - rows % 4
    for g in range(score_GT.shape[0]):
        weight_T = score_GT[g]
        if scaled:
            for t in range(rows):
                weight_T[t] *= scales[t]
        acc_V = acc_GV[g]
        for t in range(0, fours, 4):
            a_V = codes[t * width : (t + 1) * width]
            b_V = codes[(t + 1) * width : (t + 2) * width]
            c_V = codes[(t + 2) * width : (t + 3) * width]
            d_V = codes[(t + 3) * width : (t + 4) * width]
            a, b, c, d = weight_T[t], weight_T[t + 1], weight_T[t + 2], weight_T[t + 3]
            for i in range(width):
                acc_V[i] += (
                    a * np.float32(a_V[i]) + b * np.float32(b_V[i]) + c * np.float32(c_V[i]) + d * np.float32(d_V[i])
                )
        for t in range(fours, rows):
            a_V = codes[t * width : (t + 1) * width]
            a = weight_T[t]
            for i in range(width):
                acc_V[i] += a * np.float32(a_V[i])


@numba.njit(fastmath=_FAST, nogil=True)
def _attend_token(
    token, row, head, query_NHD, codes_SW, scales_SW, live_S2, page_ids_BP, expected_BP2, context, bound,
    geometry, factor, flags_B, check_tags, out_NHV,
):  # fmt: skip
    """One packed token and one kv head: online softmax over the row's pages."""
    key_start, key_scales, value_start, value_scales, page_tokens, width, value_width, group, scaled = geometry
    pages = (context + page_tokens - 1) // page_tokens
    if pages > page_ids_BP.shape[1]:
        flags_B[row] |= FLAG_KERNEL_READ
        return
    acc_GV = np.zeros((group, value_width), np.float32)
    score_GT = np.empty((group, page_tokens), np.float32)
    top_G = np.full(group, _NEVER, np.float32)
    total_G = np.zeros(group, np.float32)
    query_GD = np.empty((group, width), np.float32)
    for g in range(group):
        for d in range(width):
            query_GD[g, d] = query_NHD[token, head * group + g, d] * factor
    first = head * page_tokens
    for i in range(pages):
        page = page_ids_BP[row, i]
        if not _readable(page, row, i, live_S2, expected_BP2, check_tags):
            flags_B[row] |= FLAG_KERNEL_READ
            return
        rows = min(page_tokens, bound - i * page_tokens)
        if rows <= 0:
            continue
        key_at, value_at = key_start + first * width, value_start + first * value_width
        keys = codes_SW[page, key_at : key_at + page_tokens * width]
        values = codes_SW[page, value_at : value_at + page_tokens * value_width]
        key_scale_T = scales_SW[page, key_scales + first : key_scales + first + page_tokens]
        value_scale_T = scales_SW[page, value_scales + first : value_scales + first + page_tokens]
        _score_page(query_GD, keys, key_scale_T, scaled != 0, rows, score_GT)
        _softmax_page(score_GT, rows, top_G, total_G, acc_GV)
        _weigh_page(score_GT, values, value_scale_T, scaled != 0, rows, acc_GV)
    for g in range(group):
        if total_G[g] != _ZERO:
            share = _ONE / total_G[g]
            for d in range(value_width):
                out_NHV[token, head * group + g, d] = acc_GV[g, d] * share


@numba.njit(cache=True, nogil=True)
def attend_short(
    start, stop, query_NHD, codes_SW, scales_SW, live_S2, page_ids_BP, expected_BP2, context_len_B, query_start_B1,
    position_N, kv_heads, geometry, factor, flags_B, check_tags, out_NHV,
):  # fmt: skip
    """Items [start, stop) of (packed token, kv head), for rows of at most SHORT_TOKENS new tokens.

    `factor` is the softmax scale times log2(e). `geometry` is cpu.py's. Results of rows that end up flagged are
    unspecified; the caller clears them.
    """
    for item in range(start, stop):
        token = item // kv_heads
        row = _row_of(query_start_B1, token)
        if row < 0 or flags_B[row] or query_start_B1[row + 1] - query_start_B1[row] > SHORT_TOKENS:
            continue
        context = np.int64(context_len_B[row])
        bound = min(context, position_N[token] + 1)
        _attend_token(
            token, row, item % kv_heads, query_NHD, codes_SW, scales_SW, live_S2, page_ids_BP, expected_BP2, context,
            bound, geometry, factor, flags_B, check_tags, out_NHV,
        )  # fmt: skip


@numba.njit(cache=True, nogil=True)
def gather_row(
    start, stop, row, codes_SW, scales_SW, live_S2, page_ids_BP, expected_BP2, context, kv_heads, geometry, flags_B,
    check_tags, key_KCD, value_KCV,
):  # fmt: skip
    """Decodes pages [start, stop) of one row into fp32 [K, C, D] and [K, C, V]; stops at a page that is not its own."""
    key_start, key_scales, value_start, value_scales, page_tokens, width, value_width, _, scaled = geometry
    for i in range(start, stop):
        if flags_B[row]:
            return
        page = page_ids_BP[row, i]
        if not _readable(page, row, i, live_S2, expected_BP2, check_tags):
            flags_B[row] |= FLAG_KERNEL_READ
            return
        rows = min(page_tokens, context - i * page_tokens)
        for head in range(kv_heads):
            for t in range(rows):
                at = head * page_tokens + t
                key_scale, value_scale = _ONE, _ONE
                if scaled != 0:
                    key_scale = scales_SW[page, key_scales + at]
                    value_scale = scales_SW[page, value_scales + at]
                key_D = codes_SW[page, key_start + at * width : key_start + (at + 1) * width]
                value_V = codes_SW[page, value_start + at * value_width : value_start + (at + 1) * value_width]
                out_D = key_KCD[head, i * page_tokens + t]
                out_V = value_KCV[head, i * page_tokens + t]
                for d in range(width):
                    out_D[d] = np.float32(key_D[d]) * key_scale
                for d in range(value_width):
                    out_V[d] = np.float32(value_V[d]) * value_scale


@numba.njit(cache=True, nogil=True)
def _largest_bits(bits_KD):
    """The largest absolute value's bits; for floats of one sign their order is the order of the values."""
    top = np.int32(0)
    for k in range(bits_KD.shape[0]):
        for d in range(bits_KD.shape[1]):
            top = max(top, bits_KD[k, d] & _ABS_BITS)
    return top


@numba.njit(cache=True, nogil=True)
def _store_int8(row_D, bits_D, codes_D, scales_T, t):
    """Quantizes one row as kvstore.formats words it."""
    top = np.int32(0)
    for d in range(bits_D.shape[0]):
        top = max(top, bits_D[d] & _ABS_BITS)
    absmax = _float_from_bits(top)
    scale, factor = _ZERO, _ZERO
    if absmax >= TINY_ABSMAX:
        scale = min(absmax / INT8_MAX, SCALE_MAX)
        factor = INT8_MAX / absmax
    scales_T[t] = scale
    for d in range(row_D.shape[0]):
        codes_D[d] = np.int8(np.rint(row_D[d] * factor))


@numba.njit(cache=True, nogil=True)
def write_tokens(
    start, stop, key_NKD, key_bits_NKD, value_NKV, value_bits_NKV, codes_SW, scales_SW, live_S2, slot_N, offset_N,
    expected_N2, row_N, geometry, flags_B, check_tags,
):  # fmt: skip
    """Stores packed tokens [start, stop): tag and finiteness first, then both streams of all heads."""
    key_start, key_scales, value_start, value_scales, page_tokens, width, value_width, _, scaled = geometry
    for n in range(start, stop):
        row = row_N[n]
        if flags_B[row]:
            continue
        slot, offset = slot_N[n], offset_N[n]
        good = 0 <= slot < live_S2.shape[0] and 0 <= offset < page_tokens
        if good and check_tags:
            good = live_S2[slot, 0] == expected_N2[n, 0] and live_S2[slot, 1] == expected_N2[n, 1]
        if not good:
            flags_B[row] |= FLAG_KERNEL_WRITE
            continue
        if max(_largest_bits(key_bits_NKD[n]), _largest_bits(value_bits_NKV[n])) >= _INFINITY_BITS:
            flags_B[row] |= FLAG_NONFINITE
            continue
        for head in range(key_NKD.shape[1]):
            at = head * page_tokens + offset
            key_D = codes_SW[slot, key_start + at * width : key_start + (at + 1) * width]
            value_V = codes_SW[slot, value_start + at * value_width : value_start + (at + 1) * value_width]
            if scaled != 0:
                _store_int8(key_NKD[n, head], key_bits_NKD[n, head], key_D, scales_SW[slot], key_scales + at)
                _store_int8(value_NKV[n, head], value_bits_NKV[n, head], value_V, scales_SW[slot], value_scales + at)
            else:
                for d in range(width):
                    key_D[d] = key_NKD[n, head, d]
                for d in range(value_width):
                    value_V[d] = value_NKV[n, head, d]
