"""The HTTP door as an OpenAPI document. Pure.

Which fields a body has, and of which type, is not told twice: the code that reads bodies runs once over a body that
writes down what it is asked for. What a field means, and the shape of what is no plain value, is said here; a field
that is read and not described is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from cluster.gateway.admission import MAX_CHOICES, MAX_LOGPROBS, MAX_STOPS, MAX_TEMPERATURE, MAX_TOOLS, ROLES
from cluster.openai.fields import INT32_MAX, INT32_MIN, Fields
from cluster.openai.requests import PRIORITIES, TRANSFER, UNSUPPORTED, Kind, read_ask
from model.sampling import MAX_SCHEMA_BYTES

Schema = dict[str, object]

_TEXT: Schema = {"type": "string"}
_TEXTS: Schema = {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}
_OBJECT: Schema = {"type": "object"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TOOL_CHOICE: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
_REF = "#/components/schemas/"

# What is said of a field beyond its type: a sentence, and what else its schema has.
_SAID: Mapping[str, tuple[str, Schema]] = MappingProxyType(
    {
        "model": ("The served model's name.", {}),
        "messages": ("Through the model's chat template.", {"items": {"$ref": _REF + "Message"}, "minItems": 1}),
        "prompt": ("One prompt, text or token ids, also as the only entry of a list.",
                   {"anyOf": [_TEXT, _IDS, {"type": "array", "items": {"anyOf": [_TEXT, _IDS]}, "maxItems": 1}]}),
        "temperature": ("0 is greedy.", {"minimum": 0, "maximum": MAX_TEMPERATURE, "default": 1}),
        "top_p": ("", {"exclusiveMinimum": 0, "maximum": 1}),
        "min_p": ("", {"minimum": 0, "exclusiveMaximum": 1}),
        "top_k": ("0 and -1 are off.", {"minimum": -1}),
        "repetition_penalty": ("1 is off.", {"exclusiveMinimum": 0, "maximum": 100}),
        "seed": ("The same seed and request give the same answer.", {}),
        "n": ("Answers.", {"minimum": 1, "maximum": MAX_CHOICES}),
        "best_of": ("Only as large as n.", {"minimum": 1, "maximum": MAX_CHOICES}),
        "max_tokens": ("Longest answer.", {"minimum": 1}),
        "max_completion_tokens": ("The newer name of max_tokens.", {"minimum": 1}),
        "min_tokens": ("No end before so many tokens.", {"minimum": 0}),
        "stop": ("Texts that end an answer.", {"anyOf": [_TEXT, _TEXTS, {"type": "null"}]}),
        "stop_token_ids": ("Tokens that end an answer.", {"items": _IDS["items"], "maxItems": MAX_STOPS}),
        "ignore_eos": ("Goes on after an end-of-sequence token.", {}),
        "logprobs": ("Log-probabilities: a switch in chats, a count in completions.", {}),
        "top_logprobs": ("Alternatives for each token.", {"minimum": 0, "maximum": MAX_LOGPROBS}),
        "response_format": ("What the answer must be.", {"$ref": _REF + "ResponseFormat"}),
        "stream": ("Server-sent events, then [DONE].", {}),
        "stream_options": ("With stream alone.", {"properties": {"include_usage": {"type": "boolean"}}}),
        "tools": ("Shown to the model where its chat template shows tools.", {"items": _OBJECT, "maxItems": MAX_TOOLS}),
        "tool_choice": ("required, or the name of a function: the answer is a call.",
                        {"anyOf": [{"enum": ["auto", "none", "required", None]}, {"$ref": _REF + "ToolChoice"}]}),
        "parallel_tool_calls": ("Either way a call that is demanded is one.", {}),
        "priority": ("Who goes first where all workers are full.", {"enum": [*PRIORITIES, None]}),
    }
)  # fmt: skip


class _Asked(Fields):
    """A body that notes which of its fields are read, and how."""

    def __init__(self, tree: Mapping[str, object]) -> None:
        super().__init__(tree)
        self.seen: dict[str, Schema] = {}

    def raw(self, name: str) -> object:
        self.seen.setdefault(name, {})
        return super().raw(name)

    def text(self, name: str) -> str | None:
        self.seen[name] = _nullable("string")
        return super().text(name)

    def flag(self, name: str) -> bool | None:
        self.seen[name] = _nullable("boolean")
        return super().flag(name)

    def whole(self, name: str, low: int = INT32_MIN, high: int = INT32_MAX) -> int | None:
        self.seen[name] = _nullable("integer")
        return super().whole(name, low, high)

    def number(self, name: str) -> float | None:
        self.seen[name] = _nullable("number")
        return super().number(name)

    def items(self, name: str) -> list[object] | None:
        self.seen[name] = _nullable("array")
        return super().items(name)

    def group(self, name: str) -> Fields | None:
        self.seen[name] = _nullable("object")
        return super().group(name)


def _nullable(kind: str) -> Schema:
    """`null` is as good as absent."""
    return {"type": [kind, "null"]}


def fields_of(kind: Kind) -> dict[str, Schema]:
    """The fields of a body that are served, with their types. Raises LookupError for one that is not described."""
    required = {"messages": [{"role": "user", "content": ""}]} if kind is Kind.CHAT else {"prompt": ""}
    body = _Asked({"model": "m", **required})
    read_ask(kind, body, "")
    refused = {*UNSUPPORTED, *TRANSFER}
    read = {name: schema for name, schema in body.seen.items() if name not in refused}
    out = {}
    for name, schema in read.items():
        sentence, more = _SAID[name]
        described = more if "$ref" in more or "anyOf" in more else {**schema, **more}
        out[name] = {**described, "description": sentence} if sentence else described
    return dict(sorted(out.items()))


def _components() -> dict[str, Schema]:
    return {
        "Message": {
            "type": "object",
            "required": ["role"],
            "properties": {
                "role": {"enum": [*ROLES, "developer"]},
                "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}]},
                "name": _nullable("string"),
                "tool_call_id": _nullable("string"),
                "tool_calls": {**_nullable("array"), "items": _OBJECT},
            },
        },
        "ToolChoice": _TOOL_CHOICE,
        "ResponseFormat": {
            "type": ["object", "null"],
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "description": f"The schema has at most {MAX_SCHEMA_BYTES} bytes.",
                    "properties": {"name": _TEXT, "schema": _OBJECT, "strict": _nullable("boolean")},
                },
            },
        },
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type", "param", "code"],
                    "properties": {
                        "message": _TEXT,
                        "type": _TEXT,
                        "param": {**_nullable("string"), "description": "The field that is wrong."},
                        "code": {**_TEXT, "description": "A stable reason."},
                    },
                }
            },
        },
        "Usage": {
            "type": "object",
            "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
            "properties": {
                **{name: {"type": "integer"} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
                "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
            },
        },
        "Answer": _answer("chat.completion", {"message": _OBJECT}),
        "Completion": _answer("text_completion", {"text": _TEXT}),
        "Model": {
            "type": "object",
            "required": ["id", "object", "created", "owned_by"],
            "properties": {
                "id": _TEXT,
                "object": {"const": "model"},
                "created": {"type": "integer"},
                "owned_by": _TEXT,
            },
        },
    }


def _answer(kind: str, content: Schema) -> Schema:
    choice = {
        "index": {"type": "integer"},
        "finish_reason": {"enum": ["stop", "length"]},
        "logprobs": _nullable("object"),
        **content,
    }
    properties: Schema = dict.fromkeys(("id", "model", "system_fingerprint"), _TEXT)
    properties |= {
        "object": {"const": kind},
        "created": {"type": "integer"},
        "choices": {"type": "array", "items": {"type": "object", "required": list(choice), "properties": choice}},
        "usage": {"$ref": _REF + "Usage"},
    }
    return {"type": "object", "required": list(properties), "properties": properties}


def _json(schema: Schema, says: str) -> Schema:
    return {"description": says, "content": {"application/json": {"schema": schema}}}


_REFUSED = _json({"$ref": _REF + "Error"}, "Refused or failed; docs/openai.md says which status when.")


def _generate(kind: Kind, answer: str, says: str) -> Schema:
    required = ["model", "messages" if kind is Kind.CHAT else "prompt"]
    body = {"type": "object", "required": required, "properties": fields_of(kind)}
    whole = _json({"$ref": _REF + answer}, "The answers; with stream, events that end with [DONE].")
    content = whole["content"]
    assert isinstance(content, dict)
    content["text/event-stream"] = {"schema": _TEXT}
    return {
        "post": {
            "summary": says,
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {"200": whole, "default": _REFUSED},
        }
    }


def _get(says: str, schema: Schema, *, open_to_all: bool = False, parameter: str = "") -> Schema:
    operation: Schema = {"summary": says, "responses": {"200": _json(schema, "As asked."), "default": _REFUSED}}
    if open_to_all:
        operation["security"] = []
    if parameter:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": _TEXT}]
    return {"get": operation}


@cache
def document() -> Schema:
    """OpenAPI 3.1. The same for every cluster, and always: it names no model. Not to be changed."""
    models: Schema = {"type": "object", "properties": {"data": {"type": "array", "items": {"$ref": _REF + "Model"}}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Genlock",
            "version": "1",
            "description": "The part of OpenAI's API that is served. Fields that nobody knows are ignored; refused by "
            "name are fields that say where pages are, and: " + ", ".join(sorted(UNSUPPORTED)) + ".",
        },
        "security": [{"token": []}, {}],
        "paths": {
            "/v1/models": _get("The served model, by its own name and by the configured one.", models),
            "/v1/models/{name}": _get("One of these.", {"$ref": _REF + "Model"}, parameter="name"),
            "/v1/chat/completions": _generate(Kind.CHAT, "Answer", "Answers to messages."),
            "/v1/completions": _generate(Kind.COMPLETION, "Completion", "Answers to one prompt."),
            "/healthz": _get("The process serves HTTP.", _OBJECT, open_to_all=True),
            "/readyz": _get("Whether a request can be served now.", _OBJECT, open_to_all=True),
            "/health": _get("As /readyz.", _OBJECT, open_to_all=True),
            "/openapi.json": _get("This document.", _OBJECT, open_to_all=True),
        },
        "components": {
            "schemas": _components(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
