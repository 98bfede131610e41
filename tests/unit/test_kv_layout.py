"""Page layouts and headers: what a page's bytes mean, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidInput, LayoutMismatch
from kvstore.header import KEY_BYTES, PageHeader, unpack_header
from kvstore.ids import Tag
from kvstore.layout import (
    HEADER_BYTES,
    MAX_DIMENSION,
    AttentionKind,
    HeadOrder,
    KvFormat,
    PageLayout,
    layout_from_canonical,
    require_same_layout,
)

GQA = PageLayout("m", AttentionKind.GQA, layers=2, kv_heads=3, key_width=8, value_width=16, page_tokens=4)
MLA = PageLayout("m", AttentionKind.MLA, layers=2, kv_heads=1, key_width=512, value_width=64, page_tokens=8)

# Another possible value of every field.
CHANGED: dict[str, object] = {
    "model": "n",
    "kind": AttentionKind.MLA,
    "layers": 3,
    "kv_heads": 2,
    "key_width": 9,
    "value_width": 17,
    "page_tokens": 8,
    "kv_format": KvFormat.NONE,
    "element": "bf16",
    "scale_type": "fp16_per_page",
    "order": HeadOrder.TOKEN_MAJOR,
    "tp_rank": 1,
    "tp_size": 4,
    "version": 2,
}
BASE = replace(GQA, kv_heads=1, tp_size=2)  # from which every change above is possible alone


def test_every_field_is_in_this_table() -> None:
    assert {f.name for f in fields(PageLayout)} == set(CHANGED)


def test_every_field_is_in_the_fingerprint() -> None:
    prints = {BASE.fingerprint} | {replace(BASE, **{k: v}).fingerprint for k, v in CHANGED.items()}  # type: ignore[arg-type]
    assert len(prints) == len(CHANGED) + 1
    assert all(0 <= p < 1 << 63 for p in prints)
    assert replace(BASE, model="n").fingerprint == replace(BASE, model="n").fingerprint


@pytest.mark.parametrize("name", list(CHANGED))
def test_a_difference_is_named(name: str) -> None:
    other = replace(BASE, **{name: CHANGED[name]})  # type: ignore[arg-type]
    for ours, theirs in ((BASE, other), (other, BASE)):
        with pytest.raises(LayoutMismatch) as caught:
            require_same_layout(ours, theirs)
        assert caught.value.field == f"layout.{name}"
    require_same_layout(other, layout_from_canonical(other.canonical()))


@pytest.mark.parametrize("layout", [GQA, MLA, replace(GQA, kv_format=KvFormat.NONE, element="fp16")])
def test_streams_lie_side_by_side_and_aligned(layout: PageLayout) -> None:
    at = 0
    for stream in layout.streams:
        assert stream.codes_offset == at
        assert stream.codes_bytes == stream.heads * layout.page_tokens * stream.width * layout.element_bytes
        assert stream.scales_offset == at + stream.codes_bytes
        assert stream.scales_offset % 4 == 0
        assert stream.scale_bytes == (stream.heads * layout.page_tokens * 4 if layout.has_scales else 0)
        at = stream.scales_offset + stream.scale_bytes
    assert layout.layer_bytes == at
    raw = HEADER_BYTES + layout.layers * at
    assert layout.slot_bytes % 64 == 0
    assert raw <= layout.slot_bytes < raw + 64


def test_mla_pages_hold_latent_and_rope() -> None:
    assert [(s.name, s.heads, s.width) for s in MLA.streams] == [("latent", 1, 512), ("rope", 1, 64)]
    assert [s.name for s in GQA.streams] == ["key", "value"]
    assert MLA.layer_bytes == 8 * (512 + 64) + 2 * 8 * 4
    half = replace(MLA, kv_format=KvFormat.NONE, element="bf16")
    assert half.layer_bytes == 2 * 8 * (512 + 64)
    with pytest.raises(InvalidInput) as caught:
        replace(MLA, kv_heads=2)
    assert caught.value.field == "layout.kv_heads"


def test_pages_for() -> None:
    assert [GQA.pages_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


JUNK: dict[str, list[object]] = {
    **{name: ["", "x" * 513, 5, None, [], {}] for name in ("model", "element", "scale_type")},
    **{name: ["", "none at all", "GQA", 0, None, [], {}, True] for name in ("kind", "kv_format", "order")},
    **{
        name: [0, -1, 1.0, 2.5, "3", True, None, [], {}, MAX_DIMENSION + 1, 10**40, float("nan"), float("inf")]
        for name in ("layers", "kv_heads", "key_width", "value_width", "page_tokens", "tp_size", "version")
    },
    "tp_rank": [-1, 1, 1.0, "0", None, 10**40],
}
JUNK["page_tokens"] += [1, 2, 6, 1028]
JUNK["element"] += ["fp64", "FP32"]


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, vs in JUNK.items() for v in vs], ids=repr)
def test_junk_is_refused_by_name(name: str, value: object) -> None:
    text = json.dumps(asdict(replace(GQA, tp_size=1)) | {name: value})
    with pytest.raises(InvalidInput) as caught:
        layout_from_canonical(text)
    assert caught.value.field == f"layout.{name}" or (name, caught.value.field) == ("tp_size", "layout.tp_rank")


def test_junk_names_every_field() -> None:
    assert set(JUNK) == {f.name for f in fields(PageLayout)}


@pytest.mark.parametrize("name", [f.name for f in fields(PageLayout)])
def test_a_missing_field_is_named(name: str) -> None:
    raw = asdict(GQA)
    del raw[name]
    with pytest.raises(InvalidInput) as caught:
        layout_from_canonical(json.dumps(raw))
    assert caught.value.field == f"layout.{name}"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvalidInput) as caught:
        layout_from_canonical(json.dumps(asdict(GQA) | {"colour": 1}))
    assert caught.value.field == "layout.colour"


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", '"layers"', '["model"]', "[" * 100_000, "1" * 5000])
def test_text_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        layout_from_canonical(text)
    assert caught.value.field == "layout"


def test_a_page_larger_than_any_engine_moves_is_refused() -> None:
    with pytest.raises(InvalidInput):
        replace(GQA, layers=MAX_DIMENSION, page_tokens=1024)


# --- headers --------------------------------------------------------------------------------------------------------

I64 = st.integers(-(1 << 63), (1 << 63) - 1)
HEADERS = st.builds(
    PageHeader,
    st.builds(Tag, I64, I64),
    I64,
    I64,
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(HEADERS)
def test_headers_survive_their_bytes(header: PageHeader) -> None:
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    assert unpack_header(raw) == header


def test_every_bit_of_a_header_counts() -> None:
    header = PageHeader(Tag(9, 3), 77, 8, 4, bytes(range(KEY_BYTES)))
    raw = header.pack()
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert unpack_header(bytes(changed)) != header, f"bit {bit}"


@pytest.mark.parametrize("raw", [b"", bytes(HEADER_BYTES), bytes(range(HEADER_BYTES)), bytes(HEADER_BYTES + 1)])
def test_other_bytes_are_no_header(raw: bytes) -> None:
    assert unpack_header(raw) is None
