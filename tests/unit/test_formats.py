"""KV formats: bounds, edges, and that pages hold what the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from kvstore import formats
from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES, AttentionKind, HeadOrder, KvFormat, PageLayout

MAX = np.finfo(np.float32).max


def layout(kv_format: KvFormat = KvFormat.INT8, element: str = "fp32", **changes: object) -> PageLayout:
    given: dict[str, object] = {"kind": AttentionKind.GQA, "layers": 2, "kv_heads": 3, "key_width": 4, "value_width": 6}
    return PageLayout("m", page_tokens=4, kv_format=kv_format, element=element, **(given | changes))


def round_trip(rows: np.ndarray, of: PageLayout) -> np.ndarray:
    encoded = formats.encode(of, rows)
    assert encoded.finite_R.all()
    return formats.decode(of, encoded.codes_RD, encoded.scales_R)


finite_rows = arrays(
    np.float32,
    array_shapes(min_dims=1, max_dims=3, max_side=9),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@settings(max_examples=200, deadline=None)
@given(finite_rows)
def test_int8_keeps_its_stated_bound(rows: np.ndarray) -> None:
    encoded = formats.encode(layout(), rows)
    back = formats.decode(layout(), encoded.codes_RD, encoded.scales_R)
    scale = encoded.scales_R[..., None].astype(np.float64)
    error = np.abs(back.astype(np.float64) - rows.astype(np.float64))
    assert np.isfinite(back).all()
    assert (error <= scale * (0.5 + 1e-4) + float(formats.TINY_ABSMAX)).all()
    assert (np.abs(encoded.codes_RD.astype(np.int32)) <= 127).all()


@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0],
        [1e-45, -1e-45, 0.0],
        [1e-38, -1e-38, 2e-39],
        [float(formats.TINY_ABSMAX), 0.0, 1e-37],
        [MAX, -MAX, 1.0],
        [-MAX, 0.0, 0.0],
        [3.4e38, 1e30, -1e38],
        [1e6, 1e-3, -1e-3],  # one outlier: the others fall to zero, within half a step
        [0.5, 1.5, 127.0],  # exact ties round half to even
    ],
)
def test_int8_at_the_edges(row: list[float]) -> None:
    rows = np.array([row], np.float32)
    encoded = formats.encode(layout(), rows)
    back = formats.decode(layout(), encoded.codes_RD, encoded.scales_R)
    scale = float(encoded.scales_R[0])
    assert np.isfinite(back).all()
    assert (np.abs(back.astype(float) - rows.astype(float)) <= scale * (0.5 + 1e-4) + float(formats.TINY_ABSMAX)).all()
    if max(map(abs, row)) >= formats.TINY_ABSMAX:
        assert np.abs(encoded.codes_RD).max() == 127


def test_int8_ties_and_zero_rows() -> None:
    encoded = formats.encode(layout(), np.array([[0.5, 1.5, -2.5, 127.0], [0, 0, -0.0, 0]], np.float32))
    assert encoded.codes_RD.tolist() == [[0, 2, -2, 127], [0, 0, 0, 0]]
    assert encoded.scales_R.tolist() == [1.0, 0.0]


def test_the_largest_scale_is_the_largest_that_stays_finite() -> None:
    with np.errstate(over="ignore"):
        above = np.nextafter(formats.SCALE_MAX, np.float32(np.inf))
        assert np.isfinite(formats.SCALE_MAX * np.float32(127))
        assert np.isinf(above * np.float32(127))


@settings(max_examples=100, deadline=None)
@given(finite_rows)
def test_none_keeps_every_bit_of_fp32(rows: np.ndarray) -> None:
    back = round_trip(rows, layout(KvFormat.NONE))
    assert (back.view(np.uint32) == rows.view(np.uint32)).all()


@pytest.mark.parametrize(("element", "epsilon"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_short_elements_round_to_nearest_even(element: str, epsilon: float) -> None:
    rows = np.random.default_rng(3).standard_normal((50, 16)).astype(np.float32) * 8
    back = round_trip(rows, layout(KvFormat.NONE, element))
    assert (np.abs(back - rows) <= np.abs(rows) * epsilon + 1e-7).all()
    one = 1.0 + np.array([[epsilon, 3 * epsilon]], np.float32)  # halfway between neighbours
    assert round_trip(one, layout(KvFormat.NONE, element)).tolist() == [[1.0, 1.0 + 4 * epsilon]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", [layout(), *(layout(KvFormat.NONE, e) for e in ("fp32", "fp16", "bf16"))])
def test_rows_that_are_not_finite_are_reported(of: PageLayout, bad: float) -> None:
    rows = np.ones((2, 3, 5), np.float32)
    rows[1, 2, 4] = bad
    assert formats.encode(of, rows).finite_R.tolist() == [[True] * 3, [True, True, False]]


def test_what_overflows_the_element_is_reported() -> None:
    rows = np.array([[65504.0, 0], [65520.0, 0]], np.float32)
    assert formats.encode(layout(KvFormat.NONE, "fp16"), rows).finite_R.tolist() == [True, False]
    rows = np.array([[3.38e38, 0], [MAX, 0]], np.float32)
    assert formats.encode(layout(KvFormat.NONE, "bf16"), rows).finite_R.tolist() == [True, False]


@pytest.mark.parametrize("of", [layout(), layout(KvFormat.NONE), layout(KvFormat.NONE, "fp16")])
def test_views_tile_the_page_without_gap_or_overlap(of: PageLayout) -> None:
    storage = np.zeros((2, of.slot_bytes), np.uint8)
    for layer in range(of.layers):
        for stream in range(2):
            views = [formats.code_view(of, storage, layer, stream)]
            if of.has_scales:
                views.append(formats.scale_view(of, storage, layer, stream))
            for view in views:
                assert np.shares_memory(view, storage)
                ones = np.frombuffer(b"\x01" * view.itemsize, view.dtype)[0]
                assert (view[1].view(f"u{view.itemsize}") == 0).all()
                view[1] = ones
    end = HEADER_BYTES + of.layers * of.layer_bytes
    assert (storage[1, HEADER_BYTES:end] == 1).all()
    assert not storage[0].any()
    assert not storage[1, :HEADER_BYTES].any()
    assert not storage[1, end:].any()


@pytest.mark.parametrize(
    ("of", "field"),
    [
        (layout(KvFormat.FP8), "layout.kv_format"),
        (layout(KvFormat.INT4), "layout.kv_format"),
        (layout(order=HeadOrder.TOKEN_MAJOR), "layout.order"),
        (layout(scale_type="fp16_per_head"), "layout.scale_type"),
    ],
)
def test_layouts_without_a_codec_are_refused_by_field(of: PageLayout, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        formats.require_working(of)
    assert caught.value.field == field
