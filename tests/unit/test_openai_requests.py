"""Bodies of OpenAI's API to request messages: what passes, what is refused, and by which name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.openai import requests
from cluster.openai.fields import Fields, parse_object
from cluster.openai.requests import Kind, api_field, in_api_words, read_ask
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput

USER = [{"role": "user", "content": "hi"}]


def chat(**fields: object):
    return read_ask(Kind.CHAT, Fields({"model": "m", "messages": USER, **fields}), "label")


def completion(**fields: object):
    return read_ask(Kind.COMPLETION, Fields({"model": "m", "prompt": "hi", **fields}), "label")


def refused(make, **fields: object) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        make(**fields)
    return caught.value


def test_the_plainest_chat():
    ask = chat()
    assert (ask.request.request_id, ask.request.model, ask.stream, ask.include_usage) == ("label", "m", False, False)
    assert [(one.role, one.content) for one in ask.request.chat.messages] == [("user", "hi")]
    params = ask.request.sampling_params
    assert params.temperature == 1.0
    unset = ("top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "logprobs", "n", "repetition_penalty")
    assert not [name for name in unset if params.HasField(name)]


def test_every_sampling_field_arrives():
    ask = completion(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, repetition_penalty=1.5, seed=9, max_tokens=5, min_tokens=2,
        stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=2, logprobs=4, stream=True,
        stream_options={"include_usage": True}, best_of=2,
    )  # fmt: skip
    assert ask.request.sampling_params == pb.SamplingParams(
        temperature=0, top_p=0.5, top_k=7, min_p=0.25, repetition_penalty=1.5, seed=9, max_tokens=5, min_tokens=2,
        stop=["a", "b"], stop_token_ids=[3], ignore_eos=True, n=2, logprobs=4,
    )  # fmt: skip
    assert ask.stream
    assert ask.include_usage


def test_null_is_absent():
    names = ("temperature", "stop", "seed", "n", "logprobs", "top_logprobs", "stream", "stream_options", "tools",
             "tool_choice", "response_format", "logit_bias", "max_tokens", "kv_transfer_params")  # fmt: skip
    assert chat(**dict.fromkeys(names)) == chat()


def test_a_schema_too_deep_to_be_written_down_is_refused_by_its_name():
    schema: dict[str, object] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refused(chat, response_format=wanted)
    assert (error.reason, error.field) == ("bad_json_schema", "response_format.json_schema.schema")


def test_harmless_fields_are_ignored():
    extra = {"user": "u", "store": True, "metadata": {"a": "b"}, "frequency_penalty": 0.0, "presence_penalty": 0,
             "logit_bias": {}, "response_format": {"type": "text"}, "parallel_tool_calls": True,
             "whatever": [1]}  # fmt: skip
    assert chat(**extra) == chat()


@pytest.mark.parametrize(
    ("seed", "expected"), [(-1, (1 << 64) - 1), (0, 0), ((1 << 64) - 1, (1 << 64) - 1), (-(1 << 63), 1 << 63)]
)
def test_seeds_of_both_signs(seed: int, expected: int):
    assert chat(seed=seed).request.sampling_params.seed == expected


def test_stop_is_a_text_or_a_list():
    assert list(chat(stop="x").request.sampling_params.stop) == ["x"]
    assert list(chat(stop=["x", "y"]).request.sampling_params.stop) == ["x", "y"]


def test_chat_logprobs_are_a_switch_and_a_count():
    assert not chat(logprobs=False, top_logprobs=0).request.sampling_params.HasField("logprobs")
    assert chat(logprobs=True).request.sampling_params.logprobs == 0
    assert chat(logprobs=True).request.sampling_params.HasField("logprobs")
    assert chat(logprobs=True, top_logprobs=3).request.sampling_params.logprobs == 3
    assert refused(chat, top_logprobs=3).field == "top_logprobs"


def test_both_names_of_max_tokens():
    assert chat(max_completion_tokens=3).request.sampling_params.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=3).request.sampling_params.max_tokens == 3
    assert refused(chat, max_tokens=3, max_completion_tokens=4).field == "max_completion_tokens"


@pytest.mark.parametrize(
    ("prompt", "kind", "value"),
    [("hi", "text", "hi"), (["hi"], "text", "hi"), ([1, 2], "tokens", [1, 2]), ([[1, 2]], "tokens", [1, 2]),
     ([], "tokens", []), ("", "text", "")],
)  # fmt: skip
def test_prompts(prompt: object, kind: str, value: object):
    request = completion(prompt=prompt).request
    assert request.WhichOneof("prompt") == kind
    assert (request.text if kind == "text" else list(request.tokens.token_ids)) == value


def test_messages_of_all_kinds():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "t", "tool_call_id": "c1", "name": "f"},
    ]
    sent = chat(messages=messages).request.chat.messages
    assert [(one.role, one.content, one.name, one.tool_call_id) for one in sent] == [
        ("system", "a\nb", "", ""), ("assistant", "", "", ""), ("tool", "t", "f", "c1"),
    ]  # fmt: skip


def test_tools_travel_as_json_and_none_means_none():
    tool = {"type": "function", "function": {"name": "f", "description": "größer"}}
    assert [json.loads(text) for text in chat(tools=[tool], tool_choice="auto").request.chat.tools] == [tool]
    assert not chat(tools=[tool], tool_choice="none").request.chat.tools


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls[0].function"),
        ({"messages": [*USER, {"role": "assistant", "function_call": {}}]}, "messages[1].function_call"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"n": 1 << 40}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": "\udc00"}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_wrong_types_are_refused_by_name(fields: dict, field: str):
    assert refused(chat, **fields).field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1},
        {"logit_bias": {"3": 5}},
        {"modalities": ["text", "audio"]},
        {"functions": [{}]},
        {"guided_json": {}},
        {"structured_outputs": {"regex": "a"}},
        {"best_of": 3},
        {"cache_salt": "x"},
        {"echo": True},
        {"speculative_config": {"num_speculative_tokens": 4}},
        {"num_speculative_tokens": 4},
        {"draft_model": "smaller"},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict):
    error = refused(chat, **fields)
    assert (error.reason, error.field) == ("unsupported_field", next(iter(fields)))


@pytest.mark.parametrize("name", ["kv_transfer_params", "peer", "page_ids", "prefill_endpoint", "bootstrap_host"])
def test_what_looks_like_a_transfer_is_refused_by_name(name: str):
    for value in ({"remote_host": "10.0.0.1"}, "10.0.0.1:1", [], 0, False):
        error = refused(chat, **{name: value})
        assert (error.reason, error.field) == ("transfer_field", name)


def test_control_without_their_lists_such_fields_would_be_passed_over_in_silence(monkeypatch):
    """Which is what happens to a field that nobody knows: the lists are what refuses."""
    monkeypatch.setattr(requests, "TRANSFER", frozenset())
    monkeypatch.setattr(requests, "UNSUPPORTED", {})
    plain = chat().request
    for name in ("kv_transfer_params", "peer", "prefill_endpoint", "num_speculative_tokens", "draft_model"):
        assert chat(**{name: "10.0.0.1:1"}).request == plain, "even then nothing of it goes on"


@pytest.mark.parametrize("prompt", [None, 3, {"a": 1}, ["a", "b"], [[1], [2]], [1, "a"], [-1], [True], [1 << 31]])
def test_prompts_that_are_none(prompt: object):
    assert refused(completion, prompt=prompt).field.startswith("prompt")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"null", b'{"a": NaN}', b'{"a": Infinity}', b"\xff", b"[" * 60_000,
     b'{"a": ' + b"9" * 9000 + b"}"],
)  # fmt: skip
def test_bodies_that_are_no_objects(body: bytes):
    with pytest.raises(InvalidInput) as caught:
        parse_object(body)
    assert (caught.value.reason, caught.value.field) == ("bad_json", "body")


def test_a_bad_body_is_not_quoted():
    with pytest.raises(InvalidInput) as caught:
        parse_object(b'{"messages": "secret words"')
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("sampling_params.top_p", "top_p"),
        ("sampling_params.stop[3]", "stop[3]"),
        ("sampling_params.logprobs", "top_logprobs"),
        ("sampling_params.max_tokens", "max_completion_tokens"),
        ("chat.messages[2].role", "messages[2].role"),
        ("chat.tools", "tools"),
        ("chat", "messages"),
        ("model", "model"),
        ("request_id", "x-client-request-id"),
    ],
)
def test_fields_are_named_as_the_body_has_them(inner: str, outer: str):
    names = chat(max_completion_tokens=1).names
    assert api_field(inner, names) == outer
    said = in_api_words(InvalidInput("r", f"{inner} must be good", field=inner), names)
    assert (said.field, said.message, said.reason) == (outer, f"{outer} must be good", "r")


@pytest.mark.parametrize(
    ("inner", "outer"),
    [("text", "prompt"), ("tokens", "prompt"), ("tokens.token_ids[4]", "prompt[4]"),
     ("sampling_params.logprobs", "logprobs")],
)  # fmt: skip
def test_fields_of_a_completion(inner: str, outer: str):
    assert api_field(inner, completion().names) == outer


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["model", "messages", "prompt", "n", "stop", "seed", "temperature", "top_p", "top_k", "max_tokens", "logprobs",
     "top_logprobs", "stream", "stream_options", "tools", "tool_choice", "response_format", "best_of", "ignore_eos"]
)  # fmt: skip


@pytest.mark.parametrize("kind", list(Kind))
@given(body=st.dictionaries(NAMES, JSON, max_size=6))
def test_any_body_passes_or_is_refused_by_type(kind: Kind, body: dict):
    base: dict[str, object] = {"model": "m", "messages": USER, "prompt": "p"}
    refusal = None
    try:
        read_ask(kind, Fields(base | body), "")
    except InvalidInput as error:
        refusal = error
    assert refusal is None or refusal.field


def test_formats_as_schemas():
    schema = {"type": "object", "title": "größe"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": None, "description": "d"}}
    assert json.loads(chat(response_format=wanted).request.sampling_params.json_schema) == schema
    assert chat(response_format={"type": "json_object"}).request.sampling_params.json_schema == '{"type": "object"}'
    for plain in ({"type": "text"}, None):
        assert chat(response_format=plain).request.sampling_params.json_schema == ""


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ("json_object", "response_format"),
        ({}, "response_format.type"),
        ({"type": 3}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema", "json_schema": {"strict": 3, "schema": {}}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}}, "response_format.json_schema.schema"),
    ],
)
def test_formats_that_are_none(wanted: object, field: str):
    assert refused(chat, response_format=wanted).field == field


def calls(*items: object) -> dict[str, object]:
    return {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": list(items)}]}


def test_calls_of_tools_go_on_with_their_arguments_as_an_object():
    given = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "ü"}'}}
    bare = {"id": "c2", "function": {"name": "date", "arguments": ""}}
    message = read_ask(Kind.CHAT, Fields({"model": "m", **calls(given, bare)}), "").request.chat.messages[1]
    assert [json.loads(text)["function"] for text in message.tool_calls] == [
        {"name": "clock", "arguments": {"zone": "ü"}},
        {"name": "date", "arguments": {}},
    ]
    assert json.loads(message.tool_calls[0])["id"] == "c1"


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ("x", ""),
        ({"type": "custom", "custom": {}}, ".type"),
        ({"type": "function"}, ".function"),
        ({"function": {"arguments": "{}"}}, ".function.name"),
        ({"function": {"name": "f", "arguments": {}}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": "[]"}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": "{"}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": "[" * 100_000}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": '"\\ud800"'}}, ".function.arguments"),
    ],
)
def test_calls_that_are_none(item: object, field: str):
    assert refused(chat, **calls(item)).field == f"messages[1].tool_calls[0]{field}"
