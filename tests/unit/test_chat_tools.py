"""Tools on their way into a chat template: shown where the template shows any, and never a control token."""

from __future__ import annotations

import json

import pytest

from cluster.config import load
from cluster.gateway.admission import MAX_TOOL_DEPTH, MAX_TOOLS, ModelLimits, check_request
from cluster.gateway.pool import FairPool
from cluster.gateway.prompt import PromptEncoder
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput
from model.chat_template import ChatTemplate
from model.probe import probe_tokenizer
from model.tokenizer import Control, byte_tokenizer

MODEL = ModelLimits("toy", 300, 256)
API = load().config.api
CONTROLS = {"<|eos|>": Control(256, True), "<|tool|>": Control(257, True)}
SOURCE = (
    "{% if tools %}<|tool|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|tool|>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
)
TOKENIZER = byte_tokenizer(CONTROLS, (256,), ChatTemplate(SOURCE, tuple(CONTROLS)))
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "required": ["a", 1, None]}}}


def request(*tools: str, **fields: str) -> pb.GenerateRequest:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="tool", content="hi", **fields)], tools=tools)
    return pb.GenerateRequest(chat=chat)


def refused(*tools: str, **fields: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        check_request(request(*tools, **fields), MODEL, API)
    return caught.value


def test_a_template_that_shows_tools_gets_them():
    ids = TOKENIZER.encode_chat(USER, tools=[TOOL])
    assert ids[0] == 257
    assert TOKENIZER.decode(ids) == json.dumps(TOOL, ensure_ascii=False) + "user:hi"
    assert TOKENIZER.decode(TOKENIZER.encode_chat(USER)) == "user:hi"


def test_a_template_that_shows_none_refuses_them():
    for tokenizer in (probe_tokenizer(), byte_tokenizer(CONTROLS, (256,), ChatTemplate("{{ messages[0].tools }}"))):
        with pytest.raises(InvalidInput) as caught:
            tokenizer.encode_chat(USER, tools=[TOOL])
        assert (caught.value.reason, caught.value.field) == ("tools_unsupported", "tools")


@pytest.mark.parametrize(
    "tool",
    [{"<|tool|>": 1}, {"name": "<|tool|>"}, {"a": [{"b": "x<|tool|><|eos|>"}]}, {"a": {"<|eos|>": ["<|tool|>"]}}],
)
def test_words_of_a_tool_never_become_control_tokens(tool: dict):
    ids = TOKENIZER.encode_chat(USER, tools=[tool])
    assert [token for token in ids if token > 255] == [257, 257]
    assert TOKENIZER.decode(ids) == json.dumps(tool) + "user:hi"


async def test_tools_of_a_request_reach_the_template():
    encoder = PromptEncoder(TOKENIZER, FairPool("tokenize"))
    draft = check_request(request(json.dumps(TOOL), tool_call_id="c1"), MODEL, API)
    text = TOKENIZER.decode(await encoder.encode(draft.prompt, "acme"))
    assert text == json.dumps(TOOL, ensure_ascii=False) + "tool:hi#c1"


async def test_a_refusal_names_the_tools_of_the_request():
    encoder = PromptEncoder(probe_tokenizer(), FairPool("tokenize"))
    draft = check_request(request(json.dumps(TOOL)), MODEL, API)
    with pytest.raises(InvalidInput) as caught:
        await encoder.encode(draft.prompt, "acme")
    assert caught.value.field == "chat.tools"


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    "tool", ["", "3", "[]", "{", nested(MAX_TOOL_DEPTH), nested(100_000), '{"a": ' + "9" * 9000 + "}"]
)
def test_what_is_no_tool(tool: str):
    error = refused("{}", tool)
    assert (error.reason, error.field) == ("bad_tool", "chat.tools[1]")


def test_limits():
    assert len(check_request(request(*["{}"] * MAX_TOOLS), MODEL, API).prompt.tools) == MAX_TOOLS
    check_request(request(nested(MAX_TOOL_DEPTH - 1)), MODEL, API)
    assert refused(*["{}"] * (MAX_TOOLS + 1)).field == "chat.tools"
    assert refused(name="x" * 257).field == "chat.messages[0].name"
    assert refused(tool_call_id="x" * 257).field == "chat.messages[0].tool_call_id"
    small = load(flags={"api.max_prompt_bytes": 100}).config.api
    with pytest.raises(InvalidInput) as caught:
        check_request(request(json.dumps({"a": "x" * 100})), MODEL, small)
    assert caught.value.reason == "prompt_too_large"


# As Qwen's and other templates have it.
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{% for c in m['tool_calls'] %}<|tool|>"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endif %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %};{% endfor %}"
)
CALLING = byte_tokenizer(CONTROLS, (256,), ChatTemplate(CALLS, tuple(CONTROLS)))


def call_of(name: str = "clock", **arguments: object) -> dict:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def second_turn(*calls: dict, role: str = "assistant") -> pb.GenerateRequest:
    turns = [
        pb.ChatMessage(role="user", content="hi"),
        pb.ChatMessage(role=role, tool_calls=[json.dumps(call) for call in calls]),
        pb.ChatMessage(role="tool", content="12:00", tool_call_id="c1"),
    ]
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=turns))


async def test_calls_of_an_assistant_reach_a_template_that_shows_them():
    encoder = PromptEncoder(CALLING, FairPool("tokenize"))
    draft = check_request(second_turn(call_of(zone="größe"), call_of("date")), MODEL, API)
    ids = await encoder.encode(draft.prompt, "acme")
    assert ids.count(257) == 2
    assert CALLING.decode(ids) == 'user:hi;assistant:clock({"zone": "größe"})date({});tool:12:00#c1;'


@pytest.mark.parametrize("source", [SOURCE, "{% for m in messages %}{{ m.content }}{# tool_calls #}{% endfor %}"])
async def test_a_template_that_shows_no_calls_refuses_them(source: str):
    encoder = PromptEncoder(
        byte_tokenizer(CONTROLS, (256,), ChatTemplate(source, tuple(CONTROLS))), FairPool("tokenize")
    )
    draft = check_request(second_turn(call_of()), MODEL, API)
    with pytest.raises(InvalidInput) as caught:
        await encoder.encode(draft.prompt, "acme")
    assert (caught.value.reason, caught.value.field) == ("tools_unsupported", "chat.messages[1].tool_calls")
    # Without calls the same messages are served.
    assert await encoder.encode(check_request(second_turn(), MODEL, API).prompt, "acme")


HOSTILE = [call_of("<|tool|>"), call_of(a="<|eos|>"), call_of(**{"<|tool|>": [{"x": "<|eos|>"}]})]


@pytest.mark.parametrize("call", HOSTILE)
def test_words_of_a_call_never_become_control_tokens(call: dict):
    ids = CALLING.encode_chat([*USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert [token for token in ids if token > 255] == [257]


def test_limits_of_calls():
    def field_of(request: pb.GenerateRequest, api=API) -> str:
        with pytest.raises(InvalidInput) as caught:
            check_request(request, MODEL, api)
        return caught.value.field

    bad = second_turn()
    bad.chat.messages[1].tool_calls.extend(["{}", "3"])
    assert field_of(bad) == "chat.messages[1].tool_calls[1]"
    bad.chat.messages[1].tool_calls[1] = nested(MAX_TOOL_DEPTH)
    assert field_of(bad) == "chat.messages[1].tool_calls[1]"
    assert field_of(second_turn(*[call_of()] * (MAX_TOOLS + 1))) == "chat.messages[1].tool_calls"
    assert field_of(second_turn(call_of(), role="user")) == "chat.messages[1].tool_calls"
    small = load(flags={"api.max_prompt_bytes": 100}).config.api
    assert field_of(second_turn(call_of(a="x" * 100)), small) == "chat.messages"
