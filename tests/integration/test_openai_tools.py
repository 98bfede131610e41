"""Calls of tools that a request demands, from a real cluster in this process, with the stock client: with the probe
model, and with the default one."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest

from cluster.openai.fields import Fields
from cluster.openai.requests import Kind, read_ask
from cluster.openai.tool_calls import CallText
from kvstore.layout import KvFormat
from model.grammar import grammars_of
from model.sampling import SamplingParams
from sim.oracle import Oracle
from tests.support.http_door import PAGE_TOKENS, ProbeCluster, probe

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "A forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
USER = [{"role": "user", "content": "What will the weather be in Rome for three days?"}]
MODELS = ("probe", "smollm2")


@pytest.fixture(params=MODELS)
async def named(request: pytest.FixtureRequest):
    async with ProbeCluster(request.param) as running:
        yield request.param, running
        assert await running.all_pages_are_back()


@pytest.fixture
async def cluster():
    async with ProbeCluster() as running:
        yield running
        assert await running.all_pages_are_back()


def ask(cluster: ProbeCluster, model: str = "probe", **fields: object):
    fields = {"messages": USER, "tools": TOOLS, "max_tokens": 400, "temperature": 0, **fields}
    return cluster.client.chat.completions.create(model=model, **fields)


def check(name: str, arguments: str) -> None:
    assert name in ("weather", "clock")
    jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object", "maxProperties": 0})


def of_an_oracle(model_name: str, choice: object) -> tuple[str, str]:
    """Name and arguments of the call that a process of its own makes of the same messages and the same schema."""
    model, tokenizer = probe(model_name)
    grammars = grammars_of(model.info, tokenizer)
    oracle = Oracle(model, page_tokens=PAGE_TOKENS, kv_format=KvFormat.INT8, grammars=grammars)
    body = {"model": "m", "messages": USER, "tools": TOOLS, "tool_choice": choice}
    asked = read_ask(Kind.CHAT, Fields(body), "", tokenizer.shows_tools).request
    [turn] = asked.chat.messages
    ids = tokenizer.encode_chat([{"role": turn.role, "content": turn.content}])
    params = SamplingParams(temperature=0.0, max_tokens=400, json_schema=asked.sampling_params.json_schema)
    piece = CallText().push(tokenizer.decode([token.token_id for token in oracle.answer(ids, params)]))
    return piece.name, piece.arguments


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_call_that_is_demanded_is_that_of_an_oracle(named: tuple[str, ProbeCluster], choice: object):
    model, cluster = named
    reply = await ask(cluster, model, tool_choice=choice)
    [one] = reply.choices
    [call] = one.message.tool_calls
    assert (one.finish_reason, one.message.content, call.type) == ("tool_calls", None, "function")
    check(call.function.name, call.function.arguments)
    assert (call.function.name, call.function.arguments) == of_an_oracle(model, choice)
    if choice is NAMED:
        assert call.function.name == "weather"


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_two_streams_of_one_request(cluster: ProbeCluster, temperature: float, parallel: bool):
    stream = await ask(
        cluster, tool_choice="required", n=2, seed=5, temperature=temperature, stream=True, parallel_tool_calls=parallel
    )
    heads: dict[int, list] = {0: [], 1: []}
    arguments, reasons = ["", ""], []
    async for chunk in stream:
        for choice in chunk.choices:
            assert not choice.delta.content
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or ():
                assert call.index == 0, "one call, whatever is said of several"
                heads[choice.index] += [(call.id, call.type, call.function.name)] if call.id else []
                arguments[choice.index] += call.function.arguments
    assert reasons == ["tool_calls", "tool_calls"]
    [(first, kind, name)], [(second, _kind, other)] = heads[0], heads[1]
    assert first != second
    assert kind == "function"
    for made, told in zip((name, other), arguments, strict=True):
        check(made, told)
    whole = await ask(cluster, tool_choice="required", n=2, seed=5, temperature=temperature)
    calls = [choice.message.tool_calls[0].function for choice in whole.choices]
    assert [(call.name, call.arguments) for call in calls] == [(name, arguments[0]), (other, arguments[1])]


async def test_a_call_that_is_cut_tells_so(cluster: ProbeCluster):
    """The probe repeats the prompt's last 64 tokens: this call, then what the template puts behind it."""
    call = '{"name":"clock",' + " " * 20 + '"arguments":{}}'
    said = [{"role": "user", "content": "Say it again: " + call}]
    assert len(call) == 51
    clock = {"type": "function", "function": {"name": "clock"}}
    for tokens, reason, arguments in ((400, "tool_calls", "{}"), (49, "length", "{")):
        reply = await ask(cluster, tool_choice=clock, messages=said, max_tokens=tokens)
        [choice] = reply.choices
        assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == (reason, arguments)
    reply = await ask(cluster, tool_choice=clock, messages=said, max_tokens=9)
    assert (reply.choices[0].finish_reason, reply.choices[0].message.tool_calls) == ("length", [])


async def test_what_is_refused_took_no_page(cluster: ProbeCluster):
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    for fields, param in (
        ({"tools": [bad], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tools": [*TOOLS, bad], "tool_choice": "required"}, "tools"),
        ({"tool_choice": NAMED, "stop": ["x"]}, "stop"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": NAMED, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"tool_choice": "auto"}, "tools"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(cluster, **fields)
        assert caught.value.param == param, caught.value.message
    assert cluster.worker("decode-0").guard.free_pages == cluster.worker("decode-0").guard.slots
