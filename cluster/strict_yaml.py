"""YAML that people write, read strictly: one meaning, one way to write it, bounded. Pure.

Refused, each with its line and field: tags, anchors, a key twice, a key that is no text, a second document, and every
plain text that YAML 1.1 and 1.2 read differently, such as `010`, `1_000`, `12:30`, `2024-02-30`, `1e3` and `yes`.
In quotes all of these are text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

import yaml
from yaml.reader import Reader

from kvstore.errors import InvalidInput

MAX_CHARS = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_KEY_CHARS = 256
SHOWN_CHARS = 60
# Whole numbers are those of 64 bits.
MAX_INT = (1 << 63) - 1

# Ten times as fast where PyYAML was built with libyaml.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = MappingProxyType({
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
})  # fmt: skip
PLAIN_INT = re.compile(r"-?(0|[1-9][0-9]*)", re.ASCII)
PLAIN_FLOAT = re.compile(r"(-?(0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?", re.ASCII)
_PLAINLY = "write a plain decimal number, or text in quotes"
# What readers of YAML take for different things. Not plain numbers: those were taken out before.
_DISPUTED = tuple(
    (re.compile(pattern, re.ASCII | re.IGNORECASE), wrong)
    for pattern, wrong in (
        (r"[-+]?0[0-9_]+", f"begins with 0, which may mean base 8: {_PLAINLY}"),
        (r"[-+]?(0x[0-9a-f_]+|0o[0-7_]+|0b[01_]+)", f"is a number to another base: {_PLAINLY}"),
        (r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?", f"may be a number to the base 60: {_PLAINLY}"),
        (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t \t].*)?", "may be a date: put text in quotes"),
        (r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?", f"is not written plainly: {_PLAINLY}"),
        (r"[-+]?\.inf|\.nan", "is no finite number"),
        (r"yes|no|on|off", "may be true or false: write true or false, or text in quotes"),
        (r"<<|=", "is a word of YAML 1.1: put text in quotes"),
    )
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MERGE = "<<"

# None, bool, int, float, str, and lists and dicts (whose keys are str) of them.
Tree = Any


@dataclass(frozen=True)
class YamlReader:
    """Reads texts of one kind. What is wrong with one is an InvalidInput with `reason`; its field is `prefix` and the
    field of the text, or `field` where none is to blame or `prefix` is None."""

    reason: str
    field: str
    prefix: str | None = ""
    max_chars: int = MAX_CHARS
    max_nodes: int = MAX_NODES
    # Anchors, aliases and `<<`, as charts' values use them; whatever an alias stands for counts again.
    aliases: bool = False

    def tree(self, text: str, name: str = "") -> Tree:
        """The one document of a text; None for an empty one. `name` is what messages call the text."""
        if len(text) > self.max_chars:
            raise self.error(f"has {len(text)} characters, at most {self.max_chars} are read", name)
        if odd := Reader.NON_PRINTABLE.search(text):
            line = text.count("\n", 0, odd.start()) + 1
            raise self.error(f"holds the character U+{ord(odd[0]):04X}, which must be escaped", name, line)
        build = _Build(self, name)
        try:
            for event in yaml.parse(text, Loader=_LOADER):
                build.take(event)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            # No snippet of the text, as the error's own words have: it may hold a secret.
            wrong = f"is no YAML: {error.problem or error.context}"[:200]
            raise self.error(wrong, name, mark.line + 1 if mark else 0) from error
        except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
            # Such as a version or a character code that is no number of this machine.
            raise self.error(f"is no YAML: {type(error).__name__}", name, build.line) from error
        return build.root

    def line(self, text: str, path: str) -> int:
        """The line of the field `slo.ttft_ms`, or the like, of a text that was read; 0 where it is not there."""
        node, line = yaml.compose(text, Loader=_LOADER), 0
        for name in path.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            found = next(((key, value) for key, value in pairs if key.value == name), None)
            if found is None:
                return 0
            line, node = found[0].start_mark.line + 1, found[1]
        return line

    def error(self, wrong: str, name: str = "", line: int = 0, path: str = "") -> InvalidInput:
        """`path`: the field of the text."""
        where = f"{name} line {line}".strip() if line else name
        inside = path[:SHOWN_CHARS] + "..." if len(path) > SHOWN_CHARS else path
        said = f"{where}: {inside or 'the text'} {wrong}" if where else f"{inside or 'the text'} {wrong}"
        field = f"{self.prefix}{inside}" if inside and self.prefix is not None else self.field
        return InvalidInput(self.reason, said, field=field)


def plain(text: str) -> bool | int | float | str | None:
    """What a text without quotes means. Raises ValueError with what is wrong."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if PLAIN_INT.fullmatch(text):
        # The length first: a number of many digits takes long to make.
        if len(text) > len(str(-MAX_INT)) or abs(int(text)) > MAX_INT:
            raise ValueError("is a whole number of more than 64 bits")
        return int(text)
    if PLAIN_FLOAT.fullmatch(text):
        number = float(text)
        if abs(number) == float("inf"):
            raise ValueError("is no finite number")
        return number
    for pattern, wrong in _DISPUTED:
        if pattern.fullmatch(text):
            raise ValueError(wrong)
    return text


def shown(value: object, chars: int = SHOWN_CHARS) -> str:
    """A value as messages show it: scalars cut to `chars`, anything else by the name of its type."""
    if value is None or isinstance(value, bool):
        return str(value).lower() if value is not None else "null"
    if isinstance(value, int):
        return str(value) if abs(value) <= MAX_INT else "(a number of more than 64 bits)"
    if isinstance(value, str):
        return repr(value[:chars])
    if isinstance(value, float):
        return repr(value)
    kind = "section" if isinstance(value, Mapping) else type(value).__name__
    return f"(a {kind})"


@dataclass
class _Frame:
    """A list or a section that is not at its end."""

    value: list[Tree] | dict[str, Tree]
    anchor: str | None
    # Of the whole text before it.
    nodes: int
    # Levels of lists and sections below it.
    height: int = 0
    key: str | None = None
    # Key -> line.
    lines: dict[str, int] = field(default_factory=dict)
    merge: list[dict[str, Tree]] = field(default_factory=list)


class _Build:
    """Makes the tree from the parser's events without recursion, so that no text is too deep for it."""

    def __init__(self, reader: YamlReader, name: str) -> None:
        self.root: Tree = None
        self.line = 0
        self._reader = reader
        self._name = name
        self._documents = 0
        self._nodes = 0
        self._frames: list[_Frame] = []
        # Anchor -> value, nodes, height.
        self._anchors: dict[str, tuple[Tree, int, int]] = {}

    def take(self, event: yaml.Event) -> None:
        if event.start_mark is not None:
            self.line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._refuse("begins a second document; one is read")
        elif isinstance(event, yaml.AliasEvent):
            self._alias(str(event.anchor))
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._properties(event)
            if self._waits_for_key():
                self._refuse("has a key that is no text")
            self._count(1, 1)
            value: list[Tree] | dict[str, Tree] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
            self._frames.append(_Frame(value, event.anchor, self._nodes - 1))
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            frame = self._frames.pop()
            for merged in frame.merge:
                frame.value = {**merged, **frame.value}  # type: ignore[dict-item]  # a section: a list merges nothing
            self._put(frame.value, frame.anchor, self._nodes - frame.nodes, frame.height + 1)

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        self._properties(event)
        value: Tree = event.value
        if event.implicit[0] and not (value == _MERGE and self._reader.aliases and self._waits_for_key()):
            try:
                value = plain(event.value)
            except ValueError as error:
                self._refuse(f"has a key that {error}" if self._waits_for_key() else str(error))
        elif _SURROGATE.search(event.value):
            # Only the parser that is written in Python lets such an escape pass.
            self._refuse("holds half of a character")
        if not self._waits_for_key():
            self._count(1, 0)
            self._put(value, event.anchor, 1, 0)
        elif isinstance(value, str):
            self._key(value, merges=value == _MERGE and event.implicit[0])
        else:
            self._refuse("has a key that is no text: put it in quotes")

    def _properties(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
        if event.tag is not None:
            self._refuse("has a tag, and tags are not read: write it without `!`")
        if event.anchor is not None and not self._reader.aliases:
            self._refuse("has an anchor, and anchors are not read: write it without `&`")

    def _alias(self, anchor: str) -> None:
        if not self._reader.aliases:
            self._refuse("is an alias, and aliases are not read: write the value itself")
        if anchor not in self._anchors:
            self._refuse("is an alias of nothing that ended before it")
        if self._waits_for_key():
            self._refuse("has a key that is an alias")
        value, nodes, height = self._anchors[anchor]
        self._count(nodes, height)
        self._put(value, None, nodes, height)

    def _key(self, key: str, *, merges: bool) -> None:
        frame = self._frames[-1]
        if len(key) > MAX_KEY_CHARS:
            self._refuse(f"has a key of more than {MAX_KEY_CHARS} characters")
        frame.key = key
        if key in frame.lines:
            self._refuse(f"is there twice, first in line {frame.lines[key]}")
        if not merges and key == _MERGE and self._reader.aliases:
            self._refuse("is the key `<<` in quotes")
        frame.lines[key] = self.line
        self._count(1, 0)

    def _put(self, value: Tree, anchor: str | None, nodes: int, height: int) -> None:
        """A whole value into what it is part of."""
        if anchor is not None:
            self._anchors[anchor] = (value, nodes, height)
        if not self._frames:
            self.root = value
            return
        frame = self._frames[-1]
        frame.height = max(frame.height, height)
        if isinstance(frame.value, list):
            frame.value.append(value)
            return
        if frame.key == _MERGE and self._reader.aliases:
            frame.merge = value if isinstance(value, list) else [value]
            if not all(isinstance(one, dict) for one in frame.merge):
                self._refuse("merges what is no section")
        elif frame.key is not None:
            frame.value[frame.key] = value
        frame.key = None

    def _count(self, nodes: int, height: int) -> None:
        """What is about to be put."""
        self._nodes += nodes
        if self._nodes > self._reader.max_nodes:
            self._refuse(f"is one value more than the {self._reader.max_nodes} that are read")
        if len(self._frames) + height > MAX_DEPTH:
            self._refuse(f"is nested deeper than {MAX_DEPTH} levels")

    def _waits_for_key(self) -> bool:
        return bool(self._frames) and isinstance(self._frames[-1].value, dict) and self._frames[-1].key is None

    def _refuse(self, wrong: str) -> NoReturn:
        raise self._reader.error(wrong, self._name, self.line, self._path())

    def _path(self) -> str:
        """Such as `tenants.acme.tokens_sha256[2]`."""
        path = ""
        for frame in self._frames:
            if isinstance(frame.value, list):
                path += f"[{len(frame.value)}]"
            elif frame.key is not None:
                key = frame.key if frame.key.isprintable() else ascii(frame.key)
                path += f".{key}" if path else key
        return path
