"""Triton kernels over pages. Import only through gpu.py, which reports a missing Triton as a typed error.

Both words of each page's live tag are compared inside the kernel, as the page is loaded; all loads of a page that
differs are skipped. Flags rise by atomic OR, so many programs may report one row.

Legend: N packed tokens, B rows, P pages of the longest row, S slots, W stored codes of a slot, K kv heads, H query
heads, G query heads of one kv head, D key width, V value width, T page tokens, R (token, group) lanes of one program.
An upper-case name with _PAD is the next power of two, at least 16 where a dot product needs it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton reads the annotations as its own; the other arguments have none.
from __future__ import annotations

import triton
import triton.language as tl

from kvstore.formats import INT8_MAX, SCALE_MAX, TINY_ABSMAX
from kvstore.tables import FLAG_KERNEL_READ, FLAG_KERNEL_WRITE, FLAG_NONFINITE

_READ = tl.constexpr(FLAG_KERNEL_READ)
_WRITE = tl.constexpr(FLAG_KERNEL_WRITE)
_NONFINITE = tl.constexpr(FLAG_NONFINITE)
_INT8_MAX = tl.constexpr(float(INT8_MAX))
_SCALE_MAX = tl.constexpr(float(SCALE_MAX))
_TINY_ABSMAX = tl.constexpr(float(TINY_ABSMAX))
_ABS_BITS = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
# Adding and taking away 1.5 * 2^23 rounds an fp32 of small magnitude half to even, given that nothing fuses it.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _tag_matches(live_S2, page, expected_2, CHECK: tl.constexpr):
    """Whether the live tag is the expected one, both words."""
    same = True
    if CHECK:
        incarnation = tl.load(live_S2 + page * 2) == tl.load(expected_2)
        generation = tl.load(live_S2 + page * 2 + 1) == tl.load(expected_2 + 1)
        same = incarnation & generation
    return same


@triton.jit
def _largest_bits(x_KD):
    bits_KD = x_KD.to(tl.int32, bitcast=True) & _ABS_BITS
    return tl.max(tl.max(bits_KD, 1), 0)


@triton.jit
def _rounded(x_KD, stored: tl.constexpr):
    """fp32 values that the stored type holds exactly, so that its conversion cannot round in a way of its own."""
    if stored == tl.bfloat16:
        bits_KD = x_KD.to(tl.int32, bitcast=True)
        bits_KD = (bits_KD + 0x7FFF + ((bits_KD >> 16) & 1)) & -65536  # half to even at the low 16 bits
        x_KD = bits_KD.to(tl.float32, bitcast=True)
    elif stored == tl.float16:
        x_KD = x_KD.to(tl.float16).to(tl.float32)
    return x_KD


@triton.jit
def _store_stream(
    x_KD, codes_SW, scales_SW, slot, slot_bytes, start, scale_start, offset, K: tl.constexpr, T: tl.constexpr,
    D: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr, SCALED: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, K_PAD)
    d = tl.arange(0, D_PAD)
    row_K = k * T + offset
    at_KD = slot * (slot_bytes // CODE_BYTES) + start + row_K[:, None] * D + d[None, :]
    inside_KD = (k[:, None] < K) & (d[None, :] < D)
    if SCALED:
        absmax_K = tl.max(tl.abs(x_KD), 1)
        kept_K = absmax_K >= _TINY_ABSMAX
        safe_K = tl.where(kept_K, absmax_K, 1.0)
        scale_K = tl.where(kept_K, tl.minimum(tl.div_rn(safe_K, _INT8_MAX), _SCALE_MAX), 0.0)
        factor_K = tl.where(kept_K, tl.div_rn(tl.full([K_PAD], _INT8_MAX, tl.float32), safe_K), 0.0)
        rounded_KD = (x_KD * factor_K[:, None] + _ROUND) - _ROUND
        tl.store(codes_SW + at_KD, rounded_KD.to(tl.int32).to(tl.int8), mask=inside_KD)
        tl.store(scales_SW + slot * (slot_bytes // 4) + scale_start + row_K, scale_K, mask=k < K)
    else:
        tl.store(codes_SW + at_KD, x_KD.to(codes_SW.dtype.element_ty), mask=inside_KD)


@triton.jit
def write_tokens(
    key_NKD, value_NKV, codes_SW, scales_SW, live_S2, slot_N, offset_N, expected_N2, row_N, flags_B, slots, slot_bytes,
    key_start, key_scales, value_start, value_scales, K: tl.constexpr, T: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, K_PAD: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, SCALED: tl.constexpr,
    CODE_BYTES: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """One program stores one packed token: both streams of all heads, or nothing."""
    n = tl.program_id(0)
    row = tl.load(row_N + n)
    healthy = tl.load(flags_B + row) == 0
    slot = tl.load(slot_N + n).to(tl.int64)
    offset = tl.load(offset_N + n)
    if healthy:
        inside = (slot >= 0) & (slot < slots) & (offset >= 0) & (offset < T)
        good = inside
        if inside:
            good = good & _tag_matches(live_S2, slot, expected_N2 + n * 2, CHECK)
        k = tl.arange(0, K_PAD)
        d = tl.arange(0, D_PAD)
        v = tl.arange(0, V_PAD)
        key_KD = tl.load(
            key_NKD + (n * K + k[:, None]) * D + d[None, :], mask=(k[:, None] < K) & (d[None, :] < D), other=0.0
        )
        value_KV = tl.load(
            value_NKV + (n * K + k[:, None]) * V + v[None, :], mask=(k[:, None] < K) & (v[None, :] < V), other=0.0
        )
        top = tl.maximum(_largest_bits(key_KD), _largest_bits(value_KV))
        key_KD = _rounded(key_KD, codes_SW.dtype.element_ty)
        value_KV = _rounded(value_KV, codes_SW.dtype.element_ty)
        top = tl.maximum(top, tl.maximum(_largest_bits(key_KD), _largest_bits(value_KV)))
        finite = top < _INFINITY_BITS
        if good & finite:
            _store_stream(
                key_KD, codes_SW, scales_SW, slot, slot_bytes, key_start, key_scales, offset, K, T, D, K_PAD, D_PAD,
                SCALED, CODE_BYTES,
            )  # fmt: skip
            _store_stream(
                value_KV, codes_SW, scales_SW, slot, slot_bytes, value_start, value_scales, offset, K, T, V, K_PAD,
                V_PAD, SCALED, CODE_BYTES,
            )  # fmt: skip
        else:
            tl.atomic_or(flags_B + row, tl.where(good, _NONFINITE, _WRITE))


@triton.jit
def _load_rows(
    codes_SW, scales_SW, page, slot_bytes, start, scale_start, head, rows, T: tl.constexpr, D: tl.constexpr,
    T_PAD: tl.constexpr, D_PAD: tl.constexpr, SCALED: tl.constexpr, CODE_BYTES: tl.constexpr,
):  # fmt: skip
    """The first `rows` rows of one head of one page, decoded, fp32 [T_PAD, D_PAD]; zeros elsewhere."""
    t = tl.arange(0, T_PAD)
    d = tl.arange(0, D_PAD)
    row_T = head * T + t
    at_TD = page * (slot_bytes // CODE_BYTES) + start + row_T[:, None] * D + d[None, :]
    x_TD = tl.load(codes_SW + at_TD, mask=(t[:, None] < rows) & (d[None, :] < D), other=0).to(tl.float32)
    if SCALED:
        scale_T = tl.load(scales_SW + page * (slot_bytes // 4) + scale_start + row_T, mask=t < rows, other=0.0)
        x_TD = x_TD * scale_T[:, None]
    return x_TD


@triton.jit
def attend(
    query_NHD, codes_SW, scales_SW, live_S2, page_ids_BP, expected_BP2, context_len_B, position_N, block_row,
    block_start, block_tokens, flags_B, out_NHV, slots, slot_bytes, table_pages, key_start, key_scales, value_start,
    value_scales, factor, H: tl.constexpr, G: tl.constexpr, T: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    R: tl.constexpr, T_PAD: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, SCALED: tl.constexpr,
    CODE_BYTES: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """One program: one block of one row's tokens, one kv head; online softmax over the row's pages in base 2.

    `factor` is the softmax scale times log2(e). Outputs of rows that end up flagged are cleared by `clear_flagged`.
    """
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(block_row + block)
    context = tl.load(context_len_B + row)
    pages = tl.cdiv(context, T)
    lane = tl.arange(0, R)
    active_R = lane // G < tl.load(block_tokens + block)
    token_R = (tl.load(block_start + block) + lane // G).to(tl.int64)
    head_R = head * G + lane % G
    d = tl.arange(0, D_PAD)
    v = tl.arange(0, V_PAD)
    query_RD = tl.load(
        query_NHD + (token_R * H + head_R)[:, None] * D + d[None, :],
        mask=active_R[:, None] & (d[None, :] < D),
        other=0.0,
    )
    query_RD = query_RD * factor
    bound_R = tl.minimum(tl.load(position_N + token_R, mask=active_R, other=-1) + 1, context)
    top_R = tl.full([R], float("-inf"), tl.float32)
    total_R = tl.zeros([R], tl.float32)
    acc_RV = tl.zeros([R, V_PAD], tl.float32)
    healthy = tl.load(flags_B + row) == 0
    good = healthy & (pages <= table_pages)
    pages = tl.minimum(pages, table_pages)
    for i in range(pages):
        page = tl.load(page_ids_BP + row * table_pages + i).to(tl.int64)
        good = good & (page >= 0) & (page < slots)
        if good:
            good = good & _tag_matches(live_S2, page, expected_BP2 + (row * table_pages + i) * 2, CHECK)
        if good:
            rows = tl.minimum(context - i * T, T)
            key_TD = _load_rows(
                codes_SW, scales_SW, page, slot_bytes, key_start, key_scales, head, rows, T, D, T_PAD, D_PAD, SCALED,
                CODE_BYTES,
            )  # fmt: skip
            score_RT = tl.dot(query_RD, tl.trans(key_TD), input_precision="ieee")
            t = tl.arange(0, T_PAD)
            seen_RT = (t[None, :] < rows) & ((i * T + t)[None, :] < bound_R[:, None])
            score_RT = tl.where(seen_RT, score_RT, float("-inf"))
            new_top_R = tl.maximum(top_R, tl.max(score_RT, 1))
            base_R = tl.where(new_top_R == float("-inf"), 0.0, new_top_R)
            rescale_R = tl.exp2(top_R - base_R)
            weight_RT = tl.exp2(score_RT - base_R[:, None])
            value_TV = _load_rows(
                codes_SW, scales_SW, page, slot_bytes, value_start, value_scales, head, rows, T, V, T_PAD, V_PAD,
                SCALED, CODE_BYTES,
            )  # fmt: skip
            total_R = total_R * rescale_R + tl.sum(weight_RT, 1)
            acc_RV = acc_RV * rescale_R[:, None] + tl.dot(weight_RT, value_TV, input_precision="ieee")
            top_R = new_top_R
    if healthy & (good == 0):
        tl.atomic_or(flags_B + row, _READ)
    share_R = tl.where(total_R == 0.0, 0.0, 1.0 / tl.where(total_R == 0.0, 1.0, total_R))
    tl.store(
        out_NHV + (token_R * H + head_R)[:, None] * V + v[None, :],
        acc_RV * share_R[:, None],
        mask=active_R[:, None] & (v[None, :] < V),
    )


@triton.jit
def clear_flagged(block_row, block_start, block_tokens, flags_B, out_NW, W: tl.constexpr, W_PAD: tl.constexpr):
    """Zeros the outputs of one block's tokens where its row is flagged; W is all heads' values of a token."""
    block = tl.program_id(0)
    if tl.load(flags_B + tl.load(block_row + block)) != 0:
        start = tl.load(block_start + block).to(tl.int64)
        w = tl.arange(0, W_PAD)
        for i in range(tl.load(block_tokens + block)):
            tl.store(out_NW + (start + i) * W + w, tl.zeros([W_PAD], tl.float32), mask=w < W)
