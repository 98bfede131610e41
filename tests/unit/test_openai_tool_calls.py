"""Calls that a request demands: what the answer must be, and the call out of the answer's text."""

from __future__ import annotations

import json
from itertools import pairwise

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.openai.fields import Fields
from cluster.openai.replies import Answer, Served
from cluster.openai.requests import Ask, Kind, in_api_words, read_ask
from cluster.openai.tool_calls import CallText
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput
from model.chat_template import ChatTemplate
from model.grammar import FIELD, Grammars
from model.tokenizer import Control, byte_tokenizer

PLACE = {
    "type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}, "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                        "required": ["x"], "additionalProperties": False}},
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "clock"}}
GOTO = {"type": "function", "function": {"name": "goto", "parameters": PLACE}}
NAMED = {"type": "function", "function": {"name": "goto"}}
TOKENIZER = byte_tokenizer({"<|eos|>": Control(256, True)}, (256,), ChatTemplate("", ("<|eos|>",)))
SERVED = Served("toy", "fp_1", TOKENIZER.bytes_of, TOKENIZER.stream)


def ask(shows_tools: bool = True, **fields: object) -> Ask:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [CLOCK, GOTO], **fields}
    return read_ask(Kind.CHAT, Fields(body), "label", shows_tools)


def schema_of(one: Ask) -> dict:
    return json.loads(one.request.sampling_params.json_schema)


def test_any_tool_or_the_one_that_is_named() -> None:
    some, one = ask(tool_choice="required"), ask(tool_choice=NAMED)
    clock, goto = {"name": "clock", "arguments": {}}, {"name": "goto", "arguments": {"at": {"x": 3}}}
    for call, in_some, in_one in (
        (clock, True, False),
        (goto, True, True),
        ({"name": "clock", "arguments": {"at": {"x": 3}}}, False, False),
        ({"name": "goto", "arguments": {"at": {"x": 30}}}, False, False),
        ({"name": "other", "arguments": {}}, False, False),
        ({"name": "goto"}, False, False),
    ):
        found = [jsonschema.Draft202012Validator(schema_of(asked)).is_valid(call) for asked in (some, one)]
        assert found == [in_some, in_one], call
    assert some.calls
    assert one.calls
    assert [json.loads(tool) for tool in some.request.chat.tools] == [CLOCK, GOTO], "shown as they are"


def test_the_library_follows_both() -> None:
    """With references of the parameters to themselves, which stand elsewhere now."""
    grammars = Grammars(TOKENIZER, 257, (256,))
    for choice in ("required", NAMED):
        schema = ask(tool_choice=choice).request.sampling_params.json_schema
        text = '{"name": "goto", "arguments": {"at": {"x": 3}}}'
        matcher = grammars.start(schema, list(text.encode()))
        assert set(matcher.allowed([], len(text)).nonzero()[0]) <= {256, *b" \n\r\t"}
        with pytest.raises(Exception, match="keep"):
            grammars.start(schema, list(text.replace("3", "30").encode()))


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_demanded(choice: str | None) -> None:
    for parallel in (None, True, False):
        asked = ask(tool_choice=choice, parallel_tool_calls=parallel)
        assert (asked.calls, asked.request.sampling_params.json_schema) == (False, "")


def test_a_template_that_shows_no_tools_gets_words() -> None:
    for role in ("user", "system"):
        asked = ask(False, tool_choice=NAMED, messages=[{"role": role, "content": "Be brief."}])
        [message] = asked.request.chat.messages
        assert not asked.request.chat.tools
        assert message.role == role
        assert json.dumps(GOTO) in message.content
        assert message.content.endswith("\n\nBe brief.")
    assert ask(False).request.chat.tools, "where none is demanded it is the template's to refuse"


def function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": "goto"}}, "tool_choice.function"),
        ({"tool_choice": "required", "tools": [CLOCK, CLOCK]}, "tools[0].function.name"),
        ({"tool_choice": "required", "tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tool_choice": "required", "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required", "tools": [function(name="")]}, "tools[0].function.name"),
        ({"tool_choice": "required", "tools": [function(name="x" * 65)]}, "tools[0].function.name"),
        ({"tool_choice": "required", "tools": [function(parameters=3)]}, "tools[0].function.parameters"),
        (
            {"tool_choice": "required", "tools": [function(parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
        ),
        ({"tool_choice": "required", "stop": "x"}, "stop"),
        ({"tool_choice": "required", "stop_token_ids": [3]}, "stop_token_ids"),
        ({"tool_choice": NAMED, "logprobs": True}, "logprobs"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_what_is_refused_names_its_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ask(**fields)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


def test_words_without_a_place_are_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        ask(False, tool_choice="required", messages=[{"role": "assistant", "content": "hi"}])
    assert caught.value.field == "tools"


def test_a_schema_that_cannot_be_followed_is_the_tools() -> None:
    error = InvalidInput("bad_json_schema", f"{FIELD} cannot be followed: x", field=FIELD)
    for choice, field in (("required", "tools"), (NAMED, "tools[1].function.parameters")):
        told = in_api_words(error, ask(tool_choice=choice).names)
        assert (told.field, told.message) == (field, f"{field} cannot be followed: x")


# --- the answer -------------------------------------------------------------------------------------------------------

TEXTS = st.text(max_size=8) | st.sampled_from(["}", "{", '"', "\\", '\\"}', "]}"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.text(min_size=1, max_size=8), arguments=st.dictionaries(TEXTS, VALUES, max_size=3),
    indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans(), cuts=st.lists(st.integers(0, 300), max_size=20),
)  # fmt: skip
def test_a_call_comes_out_however_its_text_is_cut(
    name: str, arguments: dict[str, object], indent: int | None, ascii_only: bool, cuts: list[int]
) -> None:
    text = json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=ascii_only)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    call = CallText()
    pieces = [call.push(text[a:b]) for a, b in pairwise(ends)]
    assert [piece.name for piece in pieces if piece.name] == [name]
    told = "".join(piece.arguments for piece in pieces)
    assert json.loads(told) == arguments
    assert (told[0], told[-1]) == ("{", "}")


def test_spaces_around_the_arguments_are_left_out_however_they_come() -> None:
    text = ' {\n"name" : "f" ,\t"arguments" : \n { "a b" : " } " }\n } '
    for size in (1, 2, 7, len(text)):
        call = CallText()
        pieces = [call.push(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(piece.arguments for piece in pieces) == '{ "a b" : " } " }'


def message(text: str, reason: pb.FinishReason.ValueType | None = None, index: int = 0) -> pb.GenerateResponse:
    one = pb.GenerateResponse(server_id="ab", index=index, text=text)
    if reason is not None:
        one.finished.finish_reason = reason
    return one


TEXT = '{"name": "goto", "arguments": {"at": {"x": 3}}}'


def test_a_whole_answer_is_a_call() -> None:
    answer = Answer(ask(tool_choice="required"), SERVED, 17)
    answer.add(message(TEXT, pb.FINISH_REASON_STOP))
    answer.add(message(TEXT[:40], pb.FINISH_REASON_LENGTH, 1))
    answer.add(message(TEXT[:4], pb.FINISH_REASON_LENGTH, 2))
    whole, cut, nothing = answer.whole()["choices"]
    function = {"name": "goto", "arguments": '{"at": {"x": 3}}'}
    assert whole["message"] == {
        "role": "assistant", "content": None, "refusal": None,
        "tool_calls": [{"id": "call_ab_0", "type": "function", "function": function}],
    }  # fmt: skip
    assert whole["finish_reason"] == "tool_calls"
    assert (cut["message"]["tool_calls"][0]["function"]["arguments"], cut["finish_reason"]) == ('{"at": {"x', "length")
    assert (nothing["message"]["tool_calls"], nothing["finish_reason"]) == ([], "length")


def test_a_stream_tells_the_name_once_and_the_arguments_as_they_come() -> None:
    answer = Answer(ask(tool_choice="required", stream=True), SERVED, 17)
    sent = [*map(message, (TEXT[:4], TEXT[4:32], TEXT[32:])), message("", pb.FINISH_REASON_STOP)]
    choices = [chunk["choices"][0] for one in sent for chunk in answer.chunks(one)]
    assert choices[0]["delta"] == {"role": "assistant", "content": None}
    assert [choice["delta"]["tool_calls"] for choice in choices[1:-1]] == [
        [{"index": 0, "id": "call_ab_0", "type": "function", "function": {"name": "goto", "arguments": '{"'}}],
        [{"index": 0, "function": {"arguments": 'at": {"x": 3}}'}}],
    ]
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")
