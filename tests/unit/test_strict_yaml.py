"""YAML that people write: a value that every reader of YAML agrees on, or one typed error with line and field."""

from __future__ import annotations

import math
import re
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import strict_yaml
from cluster.strict_yaml import MAX_DEPTH, MAX_INT, MAX_KEY_CHARS, YamlReader, plain, shown
from kvstore.errors import InvalidInput
from tests.support.odd_yaml import TEXTS, WORDS

READER = YamlReader("bad_file", "file")
SHARING = YamlReader("bad_file", "file", aliases=True, max_nodes=1000)
# The parser that libyaml brings, and the one that is always there.
PARSERS = sorted({strict_yaml._LOADER, yaml.SafeLoader}, key=lambda loader: loader.__name__)
EACH_PARSER = pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.__name__)

NUMBER_LIKE = st.text("0123456789+-._:eExXoObBaAfFTZ ", min_size=1, max_size=12) | st.sampled_from(WORDS)
# Some writers put no quotes around `08` and `1e3`, which others take for numbers.
QUOTED = st.text(max_size=12).filter(
    lambda text: not any(pattern.fullmatch(text) for pattern, _ in strict_yaml._DISPUTED)
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-MAX_INT, MAX_INT) | FLOATS | QUOTED
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(QUOTED, inner, max_size=4))


def refused(text: str, reader: YamlReader = READER) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        reader.tree(text, "given.yaml")
    return caught.value


def is_plain(tree: Any) -> bool:
    if isinstance(tree, list):
        return all(map(is_plain, tree))
    if isinstance(tree, dict):
        return all(type(key) is str for key in tree) and all(map(is_plain, tree.values()))
    return tree is None or type(tree) in (bool, int, str) or (type(tree) is float and math.isfinite(tree))


@EACH_PARSER
@pytest.mark.parametrize("reader", [READER, SHARING], ids=["strict", "sharing"])
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_any_text_is_a_plain_value_or_one_typed_error(parser: Any, reader: YamlReader, text: str) -> None:
    with mock.patch.object(strict_yaml, "_LOADER", parser):
        try:
            tree, error = reader.tree(text, "given.yaml"), None
        except InvalidInput as refusal:
            tree, error = None, refusal
    if error is None:
        assert is_plain(tree)
        assert tree == yaml.load(text, parser), "what is read means the same to a reader that is not strict"
    else:
        assert (error.reason, bool(error.field)) == ("bad_file", True)
        assert re.match(r"given\.yaml( line [0-9]+)?: ", error.message)
        assert 0 < len(error.message.encode()) < 500


@EACH_PARSER
@settings(max_examples=50, deadline=None)
@given(tree=TREES, flow=st.booleans())
def test_what_a_program_wrote_is_read_back(parser: Any, tree: Any, flow: bool) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    text = re.sub(r"(&|\*)id\d+", "", text)
    with mock.patch.object(strict_yaml, "_LOADER", parser):
        assert READER.tree(text) == yaml.safe_load(text)


def core_schema(text: str) -> object:
    """The rules of YAML 1.2 for plain text, in the order of its table (10.3.2)."""
    if re.fullmatch(r"null|Null|NULL|~|", text):
        return None
    if re.fullmatch(r"true|True|TRUE|false|False|FALSE", text):
        return text.lower() == "true"
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)
    if re.fullmatch(r"0o[0-7]+|0x[0-9a-fA-F]+", text):
        return int(text, 0)
    if re.fullmatch(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", text):
        return float(text)
    if re.fullmatch(r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN", text):
        return float(text.replace(".", ""))
    return text


@settings(max_examples=500, deadline=None)
@given(text=NUMBER_LIKE)
def test_plain_text_means_what_both_versions_of_yaml_say(text: str) -> None:
    try:
        value = plain(text)
    except ValueError:
        return
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))
    older = loader.construct_object(yaml.ScalarNode(tag, text))
    for other in (older, core_schema(text)):
        assert (type(value), value) == (type(other), other)


@pytest.mark.parametrize(
    ("text", "line", "field", "says"),
    [
        ("decode: 2\ndecode: 3", 2, "decode", "there twice, first in line 1"),
        ("a:\n  b: {c: 1,\n   c: 1}", 3, "a.b.c", "there twice"),
        ("decode: 010", 1, "decode", "base 8"),
        ("decode: -08", 1, "decode", "base 8"),
        ("decode: 0x10", 1, "decode", "another base"),
        ("decode: 0o10", 1, "decode", "another base"),
        ("decode: 0b1", 1, "decode", "another base"),
        ("decode: 1_0", 1, "decode", "not written plainly"),
        ("decode: +1", 1, "decode", "not written plainly"),
        ("decode: 1e3", 1, "decode", "not written plainly"),
        ("decode: 1:30", 1, "decode", "base 60"),
        ("decode: 2024-02-30", 1, "decode", "date"),
        ("decode: 2024-02-03T01:02:03Z", 1, "decode", "date"),
        ("decode: yes", 1, "decode", "true or false"),
        ("decode: Off", 1, "decode", "true or false"),
        ("on: 1", 1, "file", "has a key that may be true or false"),
        ("decode: .inf", 1, "decode", "finite"),
        ("decode: 1.0e+999", 1, "decode", "finite"),
        ("decode: 9223372036854775808", 1, "decode", "64 bits"),
        ("decode: " + "9" * 5000, 1, "decode", "64 bits"),
        ("decode: [1, {low: &a 1}]", 1, "decode[1].low", "anchor"),
        ("decode: &a [1]", 1, "decode", "anchor"),
        ("a: 1\nb: *a", 2, "b", "aliases are not read"),
        ("a: {<<: {b: 1}}", 1, "a", "word of YAML 1.1"),
        ("a: !!int '3'", 1, "a", "tag"),
        ("a: !x [3]", 1, "a", "tag"),
        ("a: ! 3", 1, "a", "tag"),
        ("a:\n- b\n- !!binary eA==", 3, "a[1]", "tag"),
        ("? [1, 2]\n: 3", 1, "file", "key that is no text"),
        ("a: {1: 2}", 1, "a", "key that is no text"),
        ("a: {~: 2}", 1, "a", "key that is no text"),
        ("k" * 257 + ": 1", 1, "file", "key of more than 256"),
        ("a: 1\n---\nb: 2", 2, "file", "second document"),
        ("a: [b", 2, "file", "is no YAML"),
        ("a: 1\nb: c: d", 2, "file", "is no YAML"),
        ("a: 1\nb: \x00", 2, "file", "U+0000"),
        ("a: \ud800", 1, "file", "U+D800"),
        ("a: " + "[" * 32 + "]" * 32, 1, "a" + "[0]" * 31, "deeper than 32"),
    ],
)  # fmt: skip
def test_each_surprise_is_refused_with_its_line_and_field(text: str, line: int, field: str, says: str) -> None:
    error = refused(text)
    assert error.message.startswith(f"given.yaml line {line}: "), error.message
    assert says in error.message
    shorter = field if len(field) <= 60 else field[:60] + "..."
    assert error.field == shorter


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("# only this", None), ("a:", {"a": None}), ("a: '010'", {"a": "010"}), ('a: "yes"', {"a": "yes"}),
        ("a: |\n  010\n", {"a": "010\n"}), ("a: -3", {"a": -3}), ("a: 1.0e-05", {"a": 1e-05}), ("a: .5", {"a": 0.5}),
        ("a: 10.0.0.1", {"a": "10.0.0.1"}), ("a: 127.0.0.1:8080", {"a": "127.0.0.1:8080"}), ("a: y", {"a": "y"}),
        ("a: TRUE", {"a": True}), ("'1': a", {"1": "a"}), ("--- {a: 1}\n...\n", {"a": 1}), ("7", 7),
    ],
)  # fmt: skip
def test_plain_yaml_is_read(text: str, value: object) -> None:
    assert READER.tree(text) == value


def test_a_text_ends_at_its_limits() -> None:
    small = YamlReader("bad_file", "file", max_chars=10, max_nodes=3)
    assert small.tree("[1, 2]") == [1, 2]
    assert "3 that are read" in refused("[1, 2, 3]", small).message
    assert "has 11 characters, at most 10" in refused("a" * 11, small).message
    assert "3 that are read" in refused("{a: 1,b: }", small).message, "keys count"
    assert READER.tree("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert "deeper" in refused("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)).message
    assert READER.tree("k" * MAX_KEY_CHARS + ": 1")


def test_where_anchors_are_read_what_they_stand_for_counts() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [*a, {z: 1, x: 5}], q: 1}\nd: *a\n"
    assert SHARING.tree(text) == yaml.safe_load(text)
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    for level in range(1, 9):
        bomb += f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n"
    assert "1000 that are read" in refused(bomb, SHARING).message
    chain = "a0: &a0 [x]\n" + "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, MAX_DEPTH))
    assert "deeper" in refused(chain, SHARING).message
    for text, says in (
        ("a: &a {b: *a}", "alias of nothing"),
        ("a: *none", "alias of nothing"),
        ("a: &a x\n*a : 1", "key that is an alias"),
        ("a: {<<: 3}", "merges what is no section"),
        ("a: {'<<': {b: 1}}", "in quotes"),
        ("a: <<", "word of YAML 1.1"),
        ("a: {<<: {b: 1}, <<: {c: 1}}", "there twice"),
    ):
        assert says in refused(text, SHARING).message, text


@EACH_PARSER
def test_a_message_holds_no_piece_of_the_text_but_names_of_fields(parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_yaml, "_LOADER", parser)
    for text in (
        "secret: 0123456",
        "secret: 'hunter2",
        "secret: hunter2: x",
        "secret: [hunter2",
        "secret: hunter2\n  x: 1",
        "secret: !hunter2 x\n",
        "secret: *hunter2",
        "secret: hunter2\x00",
    ):
        assert not re.search("hunter2|0123456", refused(text).message), text
    assert "\x1b" not in refused('{"\\e[31m": 010}').message


@EACH_PARSER
def test_half_a_character_is_no_text(parser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_yaml, "_LOADER", parser)
    for text in ('a: "\\ud800"', '"\\udfff": 1', '["\\ud800"]'):
        assert re.search("half of a character|is no YAML", refused(text).message)


def test_fields_of_errors_are_those_of_the_reader() -> None:
    assert refused("a: 010", YamlReader("r", "policy", "autoscale.")).field == "autoscale.a"
    assert refused("a: 010", YamlReader("r", "api.tenants_file", None)).field == "api.tenants_file"
    assert refused("[", YamlReader("r", "policy", "autoscale.")).field == "policy"


@pytest.mark.parametrize(
    ("path", "line"),
    [("prefil", 2), ("autoscale", 4), ("autoscale.slo.ttf", 6), ("autoscale.up", 7), ("autoscale.up.step", 7),
     ("text", 0), ("autoscale.slo.no", 0), ("prefil.deeper", 0), ("", 0)],
)  # fmt: skip
def test_a_field_is_found_in_its_line(path: str, line: int) -> None:
    text = "# a fleet\nprefil: 3\n\nautoscale:\n  slo:\n    ttf: 4\n  up: {step: 1}\n"
    assert YamlReader("r", "text").line(text, path) == line
    assert YamlReader("r", "text").line("", path) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (3, "3"), (0.5, "0.5"), ("a" * 90, repr("a" * 60)), ([1] * 10**6, "(a list)"),
        ({"a": 1}, "(a section)"), (10**5000, "(a number of more than 64 bits)"),
    ],
    ids=range(8),
)  # fmt: skip
def test_messages_show_scalars_and_name_the_rest(value: object, text: str) -> None:
    assert shown(value) == text
