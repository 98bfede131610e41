"""How KV elements become bytes of a page and come back: the numpy definition that every kernel must agree with.

Format `none` stores the element type itself: fp32 as it is, fp16 and bf16 rounded half to even.

Format `int8` is symmetric, one fp32 scale for each (head, token) row of a stream, all steps in fp32:

    scale = min(absmax / 127, largest s with 127 · s finite)     code = round_half_even(x · (127 / absmax))

A row whose absmax is below TINY_ABSMAX (its scale would be subnormal) is stored as zeros with scale 0. Hence

    |x - code · scale| <= scale · (0.5 + 1e-4) + TINY_ABSMAX

A row that holds NaN or infinity, or that the element type rounds to infinity, has no encoding: `encode` says so and
the caller must store nothing and give the row up (FLAG_NONFINITE), since a silently stored NaN would poison every
later read of the page.

Legend: S slots, K kv heads, T page tokens, D width of a stream, R rows of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES, WORKING_FORMATS, HeadOrder, KvFormat, PageLayout
from kvstore.tables import U8

F32 = npt.NDArray[np.float32]
Codes = npt.NDArray[Any]

INT8_MAX = np.float32(127)
TINY_ABSMAX = np.float32(127 * 2.0**-126)
SCALE_MAX = np.float32(float.fromhex("0x1.020406p+121"))  # largest fp32 whose product with 127 is finite

_CODE_TYPES: dict[str, type[np.generic]] = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


@dataclass(frozen=True)
class Encoded:
    """`codes_RD` in the stored type, `scales_R` fp32 (empty for `none`), `finite_R` bool: which rows may be stored."""

    codes_RD: Codes
    scales_R: F32
    finite_R: npt.NDArray[np.bool_]


def require_working(layout: PageLayout) -> None:
    """Raises InvalidInput naming the first layout field that no kernel can serve."""
    if layout.kv_format not in WORKING_FORMATS:
        raise InvalidInput("bad_layout", f"no codec for {layout.kv_format.value} pages", field="layout.kv_format")
    if layout.order is not HeadOrder.HEAD_MAJOR:
        raise InvalidInput("bad_layout", "kernels read head-major pages only", field="layout.order")
    if layout.scale_type != "fp32_per_head_token":
        raise InvalidInput("bad_layout", f"unknown scale type {layout.scale_type!r}", field="layout.scale_type")


def code_type(layout: PageLayout) -> type[np.generic]:
    """The numpy type of one stored code; bf16 has none and is kept as its bits, uint16."""
    return np.int8 if layout.kv_format is KvFormat.INT8 else _CODE_TYPES[layout.element]


def encode(layout: PageLayout, rows_RD: F32) -> Encoded:
    """Encodes fp32 rows [..., D]; the last axis is one row."""
    finite_R = _finite_rows(rows_RD)
    no_scales = np.empty(0, np.float32)
    if layout.kv_format is KvFormat.INT8:
        codes_RD, scales_R = _encode_int8(np.where(finite_R[..., None], rows_RD, np.float32(0)))
        return Encoded(codes_RD, scales_R, finite_R)
    if layout.element == "fp32":
        return Encoded(rows_RD, no_scales, finite_R)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is reported in finite_R
        codes_RD = _encode_bf16(rows_RD) if layout.element == "bf16" else rows_RD.astype(np.float16)
        finite_R = _finite_rows(decode(layout, codes_RD, no_scales))
    return Encoded(codes_RD, no_scales, finite_R)


def decode(layout: PageLayout, codes_RD: Codes, scales_R: F32) -> F32:
    """fp32 rows [..., D] from stored codes and scales [...] (ignored by `none`)."""
    if layout.kv_format is KvFormat.INT8:
        return codes_RD.astype(np.float32) * scales_R[..., None]
    if layout.element == "bf16":
        return (codes_RD.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return codes_RD.astype(np.float32)


def code_view(layout: PageLayout, storage_SU8: U8, layer: int, stream: int) -> Codes:
    """The codes [S, K, T, D] of one stream of one layer, as a view into the pool."""
    spec = layout.streams[stream]
    start = HEADER_BYTES + layer * layout.layer_bytes + spec.codes_offset
    part_SU8 = storage_SU8[:, start : start + spec.codes_bytes]
    return part_SU8.view(code_type(layout)).reshape(-1, spec.heads, layout.page_tokens, spec.width)


def scale_view(layout: PageLayout, storage_SU8: U8, layer: int, stream: int) -> F32:
    """The scales fp32 [S, K, T] of one stream of one layer, as a view into the pool. Only where `has_scales`."""
    spec = layout.streams[stream]
    start = HEADER_BYTES + layer * layout.layer_bytes + spec.scales_offset
    part_SU8 = storage_SU8[:, start : start + spec.scale_bytes]
    return part_SU8.view(np.float32).reshape(-1, spec.heads, layout.page_tokens)


def _finite_rows(rows_RD: F32) -> npt.NDArray[np.bool_]:
    return np.asarray(np.isfinite(rows_RD).all(axis=-1))


def _encode_int8(rows_RD: F32) -> tuple[Codes, F32]:
    absmax_R = np.abs(rows_RD).max(axis=-1)
    kept_R = absmax_R >= TINY_ABSMAX
    safe_R = np.where(kept_R, absmax_R, np.float32(1))
    scales_R = np.where(kept_R, np.minimum(safe_R / INT8_MAX, SCALE_MAX), np.float32(0))
    factor_R = np.where(kept_R, INT8_MAX / safe_R, np.float32(0))
    codes_RD = np.rint(rows_RD * factor_R[..., None]).astype(np.int8)
    return codes_RD, scales_R


def _encode_bf16(rows_RD: F32) -> npt.NDArray[np.uint16]:
    bits_RD = np.ascontiguousarray(rows_RD).view(np.uint32)
    odd_RD = (bits_RD >> np.uint32(16)) & np.uint32(1)
    return ((bits_RD + np.uint32(0x7FFF) + odd_RD) >> np.uint32(16)).astype(np.uint16)
