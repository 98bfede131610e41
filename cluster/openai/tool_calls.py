"""Calls of tools that a request demands: what the answer must be, and the call out of the answer's text. Pure.

An answer that must be a call is kept to a JSON Schema, {"name": ..., "arguments": {...}}, by the same means as any
other answer that must keep to one. So its text has this form as far as it goes, and is cut without a parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.openai.fields import Fields, as_fields, bad, checked_text

MAX_NAME_CHARS = 64
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
# Values of these are data, in which nothing is a reference.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})


@dataclass(frozen=True)
class Choice:
    """`schema`: what the answer must keep to, empty where any text will do; `where`: the field that it is made of."""

    schema: str = ""
    where: str = ""


def read_choice(body: Fields) -> Choice:
    """`tool_choice` beside `tools`. Raises InvalidInput naming the field."""
    body.flag("parallel_tool_calls")
    choice = body.raw("tool_choice")
    if choice in (None, "auto", "none"):
        return Choice()
    wanted = "" if choice == "required" else _named(choice)
    tools = [_Tool.read(item, f"tools[{index}]") for index, item in enumerate(body.items("tools") or [])]
    if not tools:
        raise bad("bad_tool_choice", "tool_choice", "demands a call, and there are no tools")
    names = [tool.name for tool in tools]
    twice = next((tool for tool in tools if names.count(tool.name) > 1), None)
    if twice is not None:
        raise bad("bad_tool", f"{twice.path}.function.name", "is the name of two tools")
    if wanted:
        tools = [tool for tool in tools if tool.name == wanted]
        if not tools:
            raise bad("bad_tool_choice", "tool_choice.function.name", "is the name of no tool")
    _refuse_beside(body)
    try:
        text = json.dumps(_schema(tools), ensure_ascii=False)
    except RecursionError:
        raise bad("bad_tool", "tools", "have too many levels") from None
    where = f"{tools[0].path}.function.parameters" if len(tools) == 1 else "tools"
    return Choice(checked_text(text, where), where)


def shown_as_text(tools: Sequence[str]) -> str:
    """For models whose chat template shows no tools: words that do."""
    return (
        'Call one of these tools. Answer with JSON alone: {"name": the tool\'s name, "arguments": {its arguments}}\n'
        + "\n".join(tools)
    )


@dataclass(frozen=True)
class _Tool:
    name: str
    parameters: Mapping[str, object]
    path: str

    @classmethod
    def read(cls, item: object, path: str) -> _Tool:
        tool = as_fields(item, path)
        if tool.text("type") != "function":
            raise bad("unsupported_field", tool.name_of("type"), "is not supported; only function is")
        function = tool.group("function")
        if function is None:
            raise bad("bad_tool", tool.name_of("function"), "is missing")
        name = function.text("name")
        if not name or len(name) > MAX_NAME_CHARS:
            raise bad("bad_tool", function.name_of("name"), f"must have 1 to {MAX_NAME_CHARS} characters")
        given = function.group("parameters")
        # Without any, it takes none.
        tree = dict(given.tree) if given is not None else {"properties": {}, "additionalProperties": False}
        if tree.setdefault("type", "object") != "object":
            raise bad("bad_tool", function.name_of("parameters.type"), "must be object: arguments have names")
        return cls(name, tree, path)


def _named(choice: object) -> str:
    """{"type": "function", "function": {"name": ...}}."""
    if not isinstance(choice, dict):
        raise bad("unsupported_field", "tool_choice", "must be auto, none, required, or name a function")
    fields = as_fields(choice, "tool_choice")
    if fields.text("type") != "function":
        raise bad("unsupported_field", "tool_choice.type", "is not supported; only function is")
    function = fields.group("function")
    name = function.text("name") if function is not None else None
    if not name:
        raise bad("bad_tool_choice", "tool_choice.function.name", "is missing")
    return name


def _refuse_beside(body: Fields) -> None:
    """What would make something else of the answer than a whole call."""
    formed = body.group("response_format")
    if formed is not None and formed.text("type") != "text":
        raise bad("bad_tool_choice", "response_format", "is not possible beside a tool_choice that demands a call")
    for name in ("stop", "stop_token_ids"):
        if body.raw(name) not in (None, [], ""):
            raise bad("bad_tool_choice", name, "would cut the call that tool_choice demands")
    if body.raw("logprobs"):
        raise bad("bad_tool_choice", "logprobs", "are of an answer's content, and a call that is demanded has none")


def _schema(tools: Sequence[_Tool]) -> dict[str, object]:
    if len(tools) == 1:
        return _call(tools[0], "#")
    return {"anyOf": [_call(tool, f"#/anyOf/{index}") for index, tool in enumerate(tools)]}


def _call(tool: _Tool, at: str) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "arguments": _moved(tool.parameters, f"{at}/properties/arguments"),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(node: object, to: str) -> object:
    """A schema that now stands at `to`: its references to itself lead there."""
    if isinstance(node, list):
        return [_moved(one, to) for one in node]
    if not isinstance(node, Mapping):
        return node
    out: dict[str, object] = {}
    for key, value in node.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out[key] = to + value[1:]
        else:
            out[key] = value if key in _DATA else _moved(value, to)
    return out


@dataclass(frozen=True)
class Piece:
    """What new text says of a call. `name` comes once, before all arguments."""

    name: str = ""
    arguments: str = ""


class CallText:
    """The text of one answer that is a call, as it comes."""

    def __init__(self) -> None:
        self._head = ""
        self._named = False
        self._depth = 0
        self._in_text = False
        self._escaped = False
        self._whole = False

    def push(self, text: str) -> Piece:
        """Nothing of the arguments is held back; spaces around them are left out, however the text is cut."""
        if self._named:
            return Piece("", self._arguments(text))
        self._head += text
        match = _HEAD.match(self._head)
        if match is None:
            return Piece()
        self._named = True
        rest, self._head = self._head[match.end() :], ""
        return Piece(json.loads(match.group(1)), self._arguments(rest))

    def _arguments(self, text: str) -> str:
        if self._whole:
            return ""
        if not self._depth:
            text = text.lstrip()
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped = char == "\\"
                self._in_text = char != '"'
            elif char == '"':
                self._in_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    self._whole = True
                    return text[: at + 1]
        return text
