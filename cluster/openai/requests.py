"""Bodies of OpenAI's API to the request message that gRPC has. Pure.

Types are checked here; ranges, sizes and everything else by the gateway's admission, the same for both doors. A field
that would change the answer and is not supported is refused by name; one that would not is ignored. Nothing in a body
names a worker, a page or a tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from cluster.gateway.admission import MAX_MESSAGES
from cluster.openai.fields import Fields, as_fields, bad, checked_text
from cluster.openai.tool_calls import Choice, read_choice, shown_as_text
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput
from kvstore.json_text import parse_json

# OpenAI's default. The gRPC API's is greedy.
DEFAULT_TEMPERATURE = 1.0
INT32_END = 1 << 31

# Fields that would change the answer, each with the values that would not.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "audio": (),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "web_search_options": (),
        "suffix": ("",),
        "echo": (False,),
        "use_beam_search": (False,),
        "logits_processors": ([],),
        "prompt_embeds": (),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        # There are no drafts, neither at prefill nor at decode.
        "speculative_config": (),
        "num_speculative_tokens": (0,),
        "draft_model": (),
        # Prefixes are shared within a tenant; a finer border would be a promise that nobody keeps.
        "cache_salt": (),
    }
)
# Names by which other servers let a body say where KV comes from. None of them has a meaning here.
TRANSFER = frozenset(
    {
        "kv_transfer_params", "disaggregated_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "remote_host", "remote_port", "remote_engine_id", "remote_block_ids", "prefill_endpoint", "prefill_worker",
        "decode_endpoint", "decode_worker", "peer", "peers", "page_ids", "pages", "page_refs", "descriptors",
        "ticket_id", "lease",
    }
)  # fmt: skip
_ANY_OBJECT = '{"type": "object"}'
PRIORITIES: Mapping[str, pb.Priority.ValueType] = MappingProxyType(
    {"low": pb.PRIORITY_LOW, "normal": pb.PRIORITY_NORMAL, "high": pb.PRIORITY_HIGH}
)
# OpenAI's newer name of the same role.
_ROLES = MappingProxyType({"developer": "system"})


class Kind(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"


@dataclass(frozen=True)
class Ask:
    """A body that was understood. `names`: how the body calls fields of the request message."""

    kind: Kind
    request: pb.GenerateRequest
    include_usage: bool
    names: Mapping[str, str]
    # The answer must be a call of a tool.
    calls: bool = False

    @property
    def stream(self) -> bool:
        return self.request.stream


def read_ask(kind: Kind, body: Fields, label: str, shows_tools: bool = True) -> Ask:
    """Raises InvalidInput naming the field as the body has it. `label`: the caller's own name for the request;
    `shows_tools`: whether the model's chat template does."""
    _refuse_unsupported(body)
    model = body.text("model")
    if not model:
        raise bad("no_model", "model", "is missing")
    stream = body.flag("stream") or False
    options = body.group("stream_options")
    if options is not None and not stream:
        raise bad("bad_stream_options", "stream_options", "is allowed only when stream is true")
    names = {"request_id": "x-client-request-id"}
    request = pb.GenerateRequest(request_id=label, model=model, stream=stream, priority=_priority(body))
    request.sampling_params.CopyFrom(_sampling(kind, body, names))
    choice = read_choice(body) if kind is Kind.CHAT else Choice()
    if choice.schema:
        request.sampling_params.json_schema = choice.schema
        names["sampling_params.json_schema"] = choice.where
    if kind is Kind.CHAT:
        request.chat.CopyFrom(_chat(body))
        if choice.schema and not shows_tools:
            _put_tools(request.chat)
    else:
        _put_prompt(request, body, names)
    include_usage = (options.flag("include_usage") or False) if options is not None else False
    return Ask(kind, request, include_usage, MappingProxyType(names), bool(choice.schema))


def _refuse_unsupported(body: Fields) -> None:
    for name, harmless in UNSUPPORTED.items():
        value = body.raw(name)
        if value is not None and value not in harmless:
            raise bad("unsupported_field", name, "is not supported")
    for name in sorted(TRANSFER):
        if body.raw(name) is not None:
            raise bad("transfer_field", name, "is not taken from requests: the server alone decides where pages are")


def _priority(body: Fields) -> pb.Priority.ValueType:
    """Beyond OpenAI's API; a header does as well."""
    name = body.text("priority")
    if name is None:
        return pb.PRIORITY_UNSPECIFIED
    if name not in PRIORITIES:
        raise bad("bad_priority", "priority", f"must be one of {', '.join(PRIORITIES)}")
    return PRIORITIES[name]


def _sampling(kind: Kind, body: Fields, names: dict[str, str]) -> pb.SamplingParams:
    temperature = body.number("temperature")
    best_of, n = body.whole("best_of"), body.whole("n")
    if best_of not in (None, 1, n):
        raise bad("unsupported_field", "best_of", "is not supported, other than equal to n")
    top_k = body.whole("top_k")
    seed = body.whole("seed", -(1 << 63), (1 << 64) - 1)
    params = pb.SamplingParams(
        temperature=DEFAULT_TEMPERATURE if temperature is None else temperature,
        top_p=body.number("top_p"),
        # -1 is how other servers spell off.
        top_k=0 if top_k == -1 else top_k,
        min_p=body.number("min_p"),
        repetition_penalty=body.number("repetition_penalty"),
        seed=None if seed is None else seed & ((1 << 64) - 1),
        max_tokens=_max_tokens(body, names),
        min_tokens=body.whole("min_tokens"),
        stop=_stops(body),
        stop_token_ids=_token_ids(body.items("stop_token_ids") or [], "stop_token_ids"),
        ignore_eos=body.flag("ignore_eos") or False,
        n=n,
        json_schema=_json_schema(body, names),
    )
    logprobs = _chat_logprobs(body, names) if kind is Kind.CHAT else body.whole("logprobs")
    if logprobs is not None:
        params.logprobs = logprobs
    return params


def _json_schema(body: Fields, names: dict[str, str]) -> str:
    """The schema that `response_format` names, as text; empty where any text will do."""
    wanted = body.group("response_format")
    kind = wanted.text("type") if wanted is not None else "text"
    if wanted is None or kind == "text":
        return ""
    names["sampling_params.json_schema"] = "response_format"
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        raise bad("unsupported_field", "response_format.type", "must be text, json_object or json_schema")
    outer = wanted.group("json_schema")
    if outer is None:
        raise bad("bad_json_schema", wanted.name_of("json_schema"), "is missing")
    # An answer is always kept to its schema, whatever `strict` says.
    outer.text("name"), outer.flag("strict")
    schema = outer.group("schema")
    if schema is None:
        raise bad("bad_json_schema", outer.name_of("schema"), "is missing")
    names["sampling_params.json_schema"] = outer.name_of("schema")
    try:
        text = json.dumps(schema.tree, ensure_ascii=False)
    except RecursionError:
        raise bad("bad_json_schema", outer.name_of("schema"), "has too many levels") from None
    return checked_text(text, outer.name_of("schema"))


def _max_tokens(body: Fields, names: dict[str, str]) -> int | None:
    old, new = body.whole("max_tokens"), body.whole("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise bad("bad_max_tokens", "max_completion_tokens", "differs from max_tokens: give one of them")
    if new is not None:
        names["sampling_params.max_tokens"] = "max_completion_tokens"
        return new
    return old


def _chat_logprobs(body: Fields, names: dict[str, str]) -> int | None:
    """Chat has a switch and a count of the best."""
    names["sampling_params.logprobs"] = "top_logprobs"
    wanted, top = body.flag("logprobs"), body.whole("top_logprobs")
    if not wanted:
        if top:
            raise bad("bad_top_logprobs", "top_logprobs", "needs logprobs = true")
        return None
    return top or 0


def _stops(body: Fields) -> list[str]:
    value = body.raw("stop")
    if value is None:
        return []
    if isinstance(value, list):
        return [checked_text(item, f"stop[{index}]") for index, item in enumerate(value)]
    return [checked_text(value, "stop")]


def _token_ids(values: list[object], path: str) -> list[int]:
    """Ids that fit a message; whether the model has them is the admission's question."""
    ids = [value for value in values if type(value) is int and 0 <= value < INT32_END]
    if len(ids) != len(values):
        wrong = next(i for i, v in enumerate(values) if type(v) is not int or not 0 <= v < INT32_END)
        raise bad("bad_token_id", f"{path}[{wrong}]", "must be a token id")
    return ids


def _put_prompt(request: pb.GenerateRequest, body: Fields, names: dict[str, str]) -> None:
    """Text, ids, or a list with one of them."""
    names |= {"text": "prompt", "tokens": "prompt", "tokens.token_ids": "prompt"}
    value: object = body.raw("prompt")
    if value is None:
        raise bad("no_prompt", "prompt", "is missing")
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise bad("unsupported_field", "prompt", f"holds {len(value)} prompts; send one in each request")
        value = value[0]
    if isinstance(value, list):
        request.tokens.token_ids.extend(_token_ids(value, "prompt"))
        request.tokens.SetInParent()
    else:
        request.text = checked_text(value, "prompt")


def _chat(body: Fields) -> pb.ChatPrompt:
    items = body.items("messages")
    if items is None:
        raise bad("no_messages", "messages", "is missing")
    if len(items) > MAX_MESSAGES:
        raise bad("too_many_messages", "messages", f"must hold at most {MAX_MESSAGES} messages")
    messages = [_message(as_fields(item, f"messages[{index}]")) for index, item in enumerate(items)]
    return pb.ChatPrompt(messages=messages, tools=_tools(body))


def _message(message: Fields) -> pb.ChatMessage:
    for name in ("function_call", "audio"):
        if message.raw(name) not in (None, []):
            raise bad("unsupported_field", message.name_of(name), "is not supported: send what was said as content")
    role = message.text("role")
    if not role:
        raise bad("bad_role", message.name_of("role"), "is missing")
    return pb.ChatMessage(
        role=_ROLES.get(role, role),
        content=_content(message),
        name=message.text("name") or "",
        tool_call_id=message.text("tool_call_id") or "",
        tool_calls=_tool_calls(message),
    )


def _tool_calls(message: Fields) -> list[str]:
    """Calls that an assistant made, as JSON texts for the chat template; there, arguments are an object."""
    calls = []
    for index, item in enumerate(message.items("tool_calls") or []):
        call = as_fields(item, f"{message.name_of('tool_calls')}[{index}]")
        if call.text("type") not in (None, "function"):
            raise bad("unsupported_field", call.name_of("type"), "is not supported; only function is")
        function = call.group("function")
        if function is None:
            raise bad("bad_tool", call.name_of("function"), "is missing")
        name = function.text("name")
        if not name:
            raise bad("bad_tool", function.name_of("name"), "is missing")
        shown = {"name": name, "arguments": _arguments(function)}
        text = json.dumps({"id": call.text("id") or "", "type": "function", "function": shown}, ensure_ascii=False)
        calls.append(checked_text(text, function.name_of("arguments")))
    return calls


def _arguments(function: Fields) -> object:
    text = function.text("arguments") or "{}"
    try:
        tree = parse_json(text)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise bad("bad_tool", function.name_of("arguments"), "must be a JSON object, as text")
    return tree


def _content(message: Fields) -> str:
    """Text, or parts of text, each on lines of its own."""
    value, path = message.raw("content"), message.name_of("content")
    if value is None:
        if message.raw("role") == "assistant":
            return ""
        raise bad("no_content", path, "is missing")
    if not isinstance(value, list):
        return checked_text(value, path)
    texts = []
    for index, item in enumerate(value):
        part = as_fields(item, f"{path}[{index}]")
        if part.text("type") != "text":
            raise bad("unsupported_field", part.name_of("type"), "is not supported; only text is")
        text = part.text("text")
        if text is None:
            raise bad("no_content", part.name_of("text"), "is missing")
        texts.append(text)
    return "\n".join(texts)


def _tools(body: Fields) -> list[str]:
    """Tools as JSON texts, for the chat template. Where no call is demanded, a model's call of one comes back as
    text."""
    tools = body.items("tools") or []
    if body.raw("tool_choice") == "none":
        return []
    texts = []
    for index, tool in enumerate(tools):
        as_fields(tool, f"tools[{index}]")
        texts.append(checked_text(json.dumps(tool, ensure_ascii=False), f"tools[{index}]"))
    return texts


def _put_tools(chat: pb.ChatPrompt) -> None:
    """Before the first words of system or user. No message is added, so that each keeps its number in refusals."""
    words = shown_as_text(chat.tools)
    del chat.tools[:]
    first = next((message for message in chat.messages if message.role in ("system", "user")), None)
    if first is None:
        raise bad("tools_unsupported", "tools", "cannot be shown: no message is the system's or a user's")
    first.content = f"{words}\n\n{first.content}"


def api_field(field: str, names: Mapping[str, str]) -> str:
    """A field of the request message as the body calls it: `sampling_params.stop[1]` is `stop[1]`."""
    for inner, outer in names.items():
        if field == inner or field.startswith(f"{inner}["):
            return outer + field[len(inner) :]
    for prefix in ("sampling_params.", "chat."):
        if field.startswith(prefix):
            return field[len(prefix) :]
    return "messages" if field == "chat" else field


def in_api_words(error: InvalidInput, names: Mapping[str, str]) -> InvalidInput:
    """The same refusal, naming the field as the body does, in its message too."""
    field = api_field(error.field, names)
    message = error.message
    if field != error.field:
        message = field + message[len(error.field) :] if message.startswith(error.field) else message
    return InvalidInput(error.reason, message, field=field)
