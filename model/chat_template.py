"""Renders a model's chat template (Jinja, as Hugging Face defines it) in a sandbox.

A template comes with a model, and messages come from users: neither is trusted. The template runs in Jinja's immutable
sandbox with bounded output; what users wrote is marked, so that the tokenizer can tell a control marker of the template
from the same characters inside a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvstore.errors import InvalidInput

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 2048
MAX_CONTENT_CHARS = 4 << 20
MAX_TEMPLATE_CHARS = 256 << 10
MAX_OVERHEAD_CHARS = 64 << 10  # what a template may add, over twice the messages
_MAX_REPEAT = 1 << 16
_CALLS = "tool_calls"
_TOOL_GROWTH = 4  # indented JSON is longer
_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0xFFFFD


@dataclass(frozen=True)
class RenderedChat:
    """`marked`: the text in which `mark`, a character that no message contains, stands before every control marker that
    a user wrote. (Before only: a template that cuts a message at a marker then leaves nothing behind it.)"""

    marked: str
    mark: str

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "")


@dataclass(frozen=True)
class ChatTemplate:
    """`control_markers`: the texts of the tokenizer's control tokens."""

    source: str
    control_markers: tuple[str, ...] = ()
    bos_token: str = ""
    eos_token: str = ""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> RenderedChat:
        """A message's values are texts, but for `tool_calls`, a list of JSON objects. `tools`: JSON objects that are
        shown to the model. Raises InvalidInput: `bad_messages`, `bad_role` (field `messages[i].role`),
        `tools_unsupported` (field `tools` or `messages[i].tool_calls`) or `bad_chat_template`."""
        check_messages(messages)
        self._check_tools(messages, tools)
        calls = [message[_CALLS] for message in messages if _CALLS in message]
        shown = json.dumps([tools, calls], ensure_ascii=False) if tools or calls else ""
        texts = [value for message in messages for value in message.values() if isinstance(value, str)]
        mark = _unused_character("".join([shown, *texts]))
        marked = [self._mark(message, mark) for message in messages]
        size = sum(len(value) for message in marked for value in message.values() if isinstance(value, str))
        size += _TOOL_GROWTH * len(shown)
        limit = 2 * size + MAX_OVERHEAD_CHARS
        parts: list[str] = []
        try:
            for part in self._template.generate(
                messages=marked,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                tools=[self._mark_json(tool, mark) for tool in tools] or None,
                documents=None,
            ):
                parts.append(part)
                limit -= len(part)
                if limit < 0:
                    raise _refused("its output is too long")
        except InvalidInput:
            raise
        except Exception as error:  # a template may fail in any way that Python can
            raise _refused(f"{type(error).__name__}: {error}") from error
        return RenderedChat("".join(parts), mark)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template looks at `tools` at all. Raises InvalidInput (`bad_chat_template`)."""
        self._template  # noqa: B018 # one that cannot be compiled is refused
        return "tools" in meta.find_undeclared_variables(_environment().parse(self.source))

    @cached_property
    def takes_tool_calls(self) -> bool:
        """Whether the template looks at `tool_calls` of a message. Raises InvalidInput (`bad_chat_template`)."""
        self._template  # noqa: B018 # one that cannot be compiled is refused
        tree = _environment().parse(self.source)
        return any(one.attr == _CALLS for one in tree.find_all(nodes.Getattr)) or any(
            one.value == _CALLS for one in tree.find_all(nodes.Const)
        )

    def _check_tools(self, messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> None:
        """What a template does not show must not vanish."""
        if tools and not self.takes_tools:
            raise InvalidInput("tools_unsupported", "this model's chat template shows no tools", field="tools")
        for index, message in enumerate(messages):
            if message.get(_CALLS) and not self.takes_tool_calls:
                where = f"messages[{index}].{_CALLS}"
                what = "this model's chat template shows no calls of tools; send what was said as content"
                raise InvalidInput("tools_unsupported", f"{where}: {what}", field=where)

    @cached_property
    def _template(self) -> Template:
        if not self.source:
            raise InvalidInput("bad_chat_template", "this model has no chat template", field="messages")
        if len(self.source) > MAX_TEMPLATE_CHARS:
            raise _refused("it is too long")
        try:
            return _environment().from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise _refused(str(error)) from error

    @cached_property
    def _markers(self) -> re.Pattern[str] | None:
        return any_of(self.control_markers)

    def _mark(self, message: Mapping[str, object], mark: str) -> dict[str, object]:
        """Puts the mark before every control marker in what the user wrote."""
        if self._markers is None:
            return dict(message)
        return {key: value if key == "role" else self._mark_json(value, mark) for key, value in message.items()}

    def _mark_json(self, value: object, mark: str) -> object:
        """The same for any JSON value: the names and texts of a tool are a user's words too."""
        if isinstance(value, str):
            return value if self._markers is None else self._markers.sub(rf"{mark}\g<0>", value)
        if isinstance(value, Mapping):
            return {str(self._mark_json(key, mark)): self._mark_json(item, mark) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._mark_json(item, mark) for item in value]
        return value


def check_messages(messages: Sequence[Mapping[str, object]]) -> None:
    """Raises InvalidInput naming the first field that is not a message's."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidInput("bad_messages", f"a chat has 1 to {MAX_MESSAGES} messages", field="messages")
    total = 0
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.get("role") not in ROLES:
            raise InvalidInput(
                "bad_role",
                f"{where}.role is {message.get('role')!r}, not one of {', '.join(ROLES)}",
                field=f"{where}.role",
            )
        if "content" not in message:
            raise InvalidInput("bad_messages", f"{where} has no content", field=f"{where}.content")
        for key, value in message.items():
            if key == _CALLS and isinstance(value, list):
                total += len(json.dumps(value, ensure_ascii=False))
                continue
            if not isinstance(value, str):
                raise InvalidInput("bad_messages", f"{where}.{key} is not text", field=f"{where}.{key}")
            total += len(value)
        if total > MAX_CONTENT_CHARS:
            raise InvalidInput(
                "bad_messages", f"messages are longer than {MAX_CONTENT_CHARS} characters", field=f"{where}.content"
            )


def any_of(markers: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of the texts, the longest first; None when there are none."""
    if not markers:
        return None
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))


def _unused_character(text: str) -> str:
    """The first private-use character that the text does not contain."""
    taken = set(text)
    free = next((chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE) if chr(code) not in taken), None)
    if free is None:
        raise InvalidInput("bad_messages", "messages use every private character", field="messages")
    return free


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds `*` and `**`, with which one expression could fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: object, operator: str, left: object, right: object) -> object:
        sizes = [len(value) if isinstance(value, str | list | tuple) else value for value in (left, right)]
        if any(isinstance(size, int) and abs(size) > _MAX_REPEAT for size in sizes):
            raise SecurityError(f"operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)  # type: ignore[arg-type]  # the context passes through


def _environment() -> _Sandbox:
    """The settings and helpers that Hugging Face templates rely on."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _refused(detail: str) -> InvalidInput:
    return InvalidInput("bad_chat_template", f"the chat template cannot render this: {detail}", field="messages")
