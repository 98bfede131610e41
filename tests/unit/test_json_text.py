"""JSON that is none, wherever others' JSON is read: nested without end, numbers without end, bytes that are no text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.drive import _event
from cluster.autoscale.traces import parse
from cluster.cli.keys import _records
from cluster.control.api import Change
from cluster.control.keys import check_same
from cluster.gateway.credentials import caller_from
from kvstore.errors import InvalidInput, Unavailable
from kvstore.json_text import parse_json
from kvstore.layout import layout_from_canonical
from kvstore.transfer import mooncake, nixl_address, shm
from model.hf_folder import read_json

DEEP = '{"a":' * 100_000
BAD = {"deep": DEEP, "deep list": "[" * 100_000, "long number": "9" * 5000, "nothing": "", "half": '{"a"'}
EACH = pytest.mark.parametrize("text", BAD.values(), ids=BAD)


@EACH
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


def test_bytes_that_are_no_text_are_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(b'"\xff\xfe"')


@EACH
def test_a_kept_key_is_skipped(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        caller_from(text)
    assert _records({"digest": text}) == [("digest", {})]


@EACH
def test_a_kept_idempotency_key_is_taken_for_the_same(text: str) -> None:
    check_same(text.encode(), Change("me", "why"))


@EACH
@pytest.mark.parametrize(
    "read",
    [layout_from_canonical, shm.parse_address, mooncake.parse_address, nixl_address.parse_address],
    ids=["layout", "shm", "mooncake", "nixl"],
)
def test_a_peers_text_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(InvalidInput):
        read(text)


@EACH
def test_a_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInput) as refused:
        read_json(tmp_path / "config.json")
    assert refused.value.reason == "bad_model_folder"
    with pytest.raises(InvalidInput) as refused:
        parse('{"at_s": 0, "prompt_tokens": ' + text, "a trace")
    assert refused.value.reason == "bad_trace"


@EACH
def test_a_servers_event_is_no_answer(text: str) -> None:
    with pytest.raises(Unavailable):
        _event(text.encode())
