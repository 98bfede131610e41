"""Records as JSON: what was written comes back, and nothing that can stand in a store ends a reader."""

from __future__ import annotations

import json
from dataclasses import fields
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.registry import codec
from cluster.registry.records import Desired, Event, WorkerRecord
from cluster.roles import Role
from kvstore.errors import InvalidInput

RECORD = WorkerRecord("decode-0", Role.DECODE, "h:1", (1 << 63) - 1, "ff", detail="ü", told_ms=5, started_ms=4)
DESIRED = Desired(
    7, 1, 2, frozenset({"a", "b"}), "min: 1", True, 3, "10.0.0.1:7", MappingProxyType({"a": 1}), 2, 99,
    MappingProxyType({"node-a": "id-a"}),
)  # fmt: skip
EVENT = Event(1, "scale", "fleet", "alice", "2 → 3", "load", 7, 12)
TEXT = codec.encode_worker(RECORD)


def changed(**parts: object) -> str:
    return json.dumps({**json.loads(TEXT), **parts})


def refused(text: str | bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        codec.decode_worker(text)
    return caught.value


def test_records_come_back_whole() -> None:
    assert codec.decode_worker(TEXT) == RECORD
    assert codec.decode_desired(codec.encode_desired(DESIRED), 7) == DESIRED
    assert codec.decode_event(codec.encode_event(EVENT), 12) == EVENT


def test_every_field_is_written_and_read() -> None:
    """A new field that no reader knows would be lost in silence."""
    for kind, readers, kept_beside in (
        (WorkerRecord, codec._WORKER, set()),
        (Desired, codec._DESIRED, {"revision"}),
        (Event, codec._EVENT, {"sequence"}),
    ):
        assert {spec.name for spec in fields(kind)} - kept_beside == set(readers)


def test_an_incarnation_is_text() -> None:
    """63 bits are more than a number of JSON holds in Lua."""
    assert json.loads(TEXT)["incarnation"] == str((1 << 63) - 1)


def test_unknown_fields_are_passed_over_and_missing_ones_have_defaults() -> None:
    assert codec.decode_worker(changed(colour="blue")) == RECORD
    short = json.dumps(
        {"v": 1, "worker_id": "w", "role": "prefill", "endpoint": "h:1", "incarnation": "9", "layout_fingerprint": ""}
    )
    assert codec.decode_worker(short) == WorkerRecord("w", Role.PREFILL, "h:1", 9, "")
    assert codec.decode_desired('{"v":1}', 4) == Desired(4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", 7), ("worker_id", ""), ("worker_id", "x" * 300), ("endpoint", ""), ("role", "chief"),
        ("incarnation", 9), ("incarnation", "0"), ("incarnation", "-4"), ("incarnation", str(1 << 63)),
        ("incarnation", "1" * 5000), ("running", -1), ("running", True), ("running", 1.5), ("draining", 1),
        ("pid", 1 << 64), ("told_ms", "now"), ("detail", None), ("v", 0), ("v", True), ("v", None),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    error = refused(changed(**{field: value}))
    assert error.reason in ("bad_record", "bad_worker_record")
    assert error.field == field


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "null", "7", b"\xff\xfe", "[" * 100_000, "{}", '{"v":1}', "x" * 2_000_000]
)
def test_what_is_no_record_is_refused(text: str | bytes) -> None:
    assert refused(text).reason == "bad_record"


def test_a_later_version_is_told_apart() -> None:
    assert refused(changed(v=2)).reason == "record_newer"


def test_long_texts_are_cut() -> None:
    record = codec.decode_worker(codec.encode_worker(WorkerRecord("w", Role.DECODE, "h:1", 9, "", detail="x" * 10_000)))
    assert len(record.detail) == 4096
    event = codec.decode_event(codec.encode_event(Event(1, "k", "s", "a", "m" * 10_000)), 1)
    assert len(event.message) == 4096


@given(st.binary(max_size=200))
def test_no_bytes_end_a_reader(data: bytes) -> None:
    for decode in (
        codec.decode_worker,
        codec.decode_gateway,
        lambda text: codec.decode_desired(text, 1),
        lambda text: codec.decode_event(text, 1),
    ):
        try:
            decode(data)
        except InvalidInput:
            continue


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.sampled_from(["v", *sorted({*codec._WORKER, *codec._GATEWAY, *codec._DESIRED, *codec._EVENT})]), VALUES
    )
)
def test_no_values_end_a_reader(tree: dict[str, object]) -> None:
    text = json.dumps({"v": 1, **tree})
    for decode in (
        codec.decode_worker,
        codec.decode_gateway,
        lambda text: codec.decode_desired(text, 1),
        lambda text: codec.decode_event(text, 1),
    ):
        try:
            decode(text)
        except InvalidInput:
            continue
