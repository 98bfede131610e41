"""Detokenizing and stop strings: nothing leaks, nothing is lost, however tokens arrive."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.gateway.text import ChoiceText, first_match
from tests.support.fake_workers import EOS, ByteStream


@dataclass(frozen=True)
class Token:
    token_id: int


def run(data: bytes, stops: tuple[str, ...], cuts: list[int], hidden: frozenset[int] = frozenset()):
    """Feeds `data` cut at `cuts`; returns text, ids, the matched stop and the count."""
    choice: ChoiceText[Token] = ChoiceText(ByteStream(), stops, hidden)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    text, ids, matched = "", [], ""
    for start, end in itertools.pairwise(edges):
        piece = choice.push(Token(byte) for byte in data[start:end])
        assert not (matched and not piece.empty)
        text += piece.text
        ids += [token.token_id for token in piece.tokens]
        matched = matched or piece.matched_stop
    piece = choice.finish()
    matched = matched or piece.matched_stop
    return text + piece.text, bytes(ids + [token.token_id for token in piece.tokens]), matched, choice.counted_tokens


def reference(data: bytes, stops: tuple[str, ...]) -> tuple[str, str]:
    """By definition: the shortest beginning of the text that ends with a stop string decides."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, ""


SMALL = st.text(alphabet="ab☃", max_size=12)
STOPS = st.lists(st.text(alphabet="ab☃", min_size=1, max_size=4), max_size=3, unique=True).map(tuple)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(SMALL, STOPS, st.lists(st.integers(0, 60), max_size=6))
@example("abab", ("bab", "b"), [])
def test_any_cut_gives_what_the_definition_says(text: str, stops: tuple[str, ...], cuts: list[int]):
    data = text.encode()
    out, ids, matched, count = run(data, stops, cuts)
    assert (out, matched) == reference(data, stops)
    assert data.startswith(ids)
    if not matched:
        assert (ids, count) == (data, len(data))
    else:
        assert ids.decode("utf-8", "ignore") == out
        assert data[:count].decode("utf-8", "ignore") == out + matched


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.binary(max_size=12), st.lists(st.integers(0, 20), max_size=4))
def test_broken_bytes_are_replaced_once_whatever_the_cut(data: bytes, cuts: list[int]):
    out, ids, matched, count = run(data, (), cuts)
    assert (out, ids, matched, count) == (data.decode("utf-8", "replace"), data, "", len(data))


def test_a_prefix_of_a_stop_string_waits_with_its_tokens():
    choice: ChoiceText[Token] = ChoiceText(ByteStream(), ("END",))
    piece = choice.push([Token(ord(char)) for char in "xEN"])
    assert (piece.text, [token.token_id for token in piece.tokens]) == ("x", [ord("x")])
    piece = choice.push([Token(ord("z"))])
    assert (piece.text, bytes(token.token_id for token in piece.tokens)) == ("ENz", b"ENz")


def test_the_token_over_the_border_of_a_stop_string_is_kept():
    class Words(ByteStream):
        def push(self, token_id: int) -> str:
            return ("xSTO", "Py", "no")[token_id]

    choice: ChoiceText[Token] = ChoiceText(Words(), ("STOP",))
    assert choice.push([Token(0)]).text == "x"
    piece = choice.push([Token(1), Token(2)])
    assert (piece.text, piece.tokens, piece.matched_stop) == ("", (Token(0),), "STOP")
    assert choice.counted_tokens == 2


def test_an_incomplete_character_at_the_end_can_complete_a_stop():
    out, _ids, matched, _count = run(b"ab\xe2", ("b\ufffd",), [])
    assert (out, matched) == ("a", "b\ufffd")


def test_hidden_tokens_are_counted_and_shown_without_text():
    out, ids, matched, count = run(b"ab!", (), [1], frozenset({ord("!")}))
    assert (out, ids, matched, count) == ("ab", b"ab!", "", 3)


def test_an_end_of_sequence_has_no_text():
    choice: ChoiceText[Token] = ChoiceText(ByteStream(), ())
    piece = choice.push([Token(EOS)])
    assert (piece.text, piece.tokens) == ("", (Token(EOS),))


def test_first_match_prefers_the_end_then_the_longer():
    assert first_match("abcd", ("bcd", "c")) == (2, "c")
    assert first_match("xab", ("b", "ab")) == (1, "ab")
    assert first_match("xyz", ("b",)) == (-1, "")


@settings(deadline=None, derandomize=True)
@given(SMALL, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_a_hidden_token_is_counted_and_shown_without_its_text(text: str, cuts: list[int], stops: bool):
    data, hidden = text.encode(), frozenset(b"b")
    out, ids, matched, count = run(data, ("never",) if stops else (), cuts, hidden)
    assert (out, ids, matched, count) == (text.replace("b", ""), data, "", len(data))
