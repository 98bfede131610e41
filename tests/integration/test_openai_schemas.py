"""Answers that keep to a JSON Schema, from a real cluster in this process, with the stock client."""

from __future__ import annotations

import asyncio
import json

import grpc.aio
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from genlock.v1 import inference_pb2 as pb
from kvstore.layout import KvFormat
from model.grammar import grammars_of
from model.sampling import SamplingParams
from sim.oracle import Oracle
from tests.support.http_door import PAGE_TOKENS, ProbeCluster, probe


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    tags: list[str] = Field(max_length=2)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "rooms": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["city", "rooms", "open"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "hotel", "schema": SCHEMA, "strict": True}}
ANY_OBJECT = {"type": "json_object"}
USER = [{"role": "user", "content": "Which hotel is it? Answer as JSON. " * 3}]
# The probe repeats the prompt's last 64 tokens: this object, then what the template puts behind it.
OBJECT = '{"list": [1, 2, {"deep": null}], "e": "x-y", "a":1}'
ECHO = [{"role": "user", "content": "Say it again: " + OBJECT}]


@pytest.fixture
async def cluster():
    async with ProbeCluster() as running:
        yield running
        assert await running.all_pages_are_back()


def ask(cluster: ProbeCluster, wanted: object, **fields: object):
    fields = {"model": "probe", "messages": USER, "max_tokens": 400, "temperature": 0, **fields}
    return cluster.client.chat.completions.create(response_format=wanted, **fields)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_answers_keep_to_a_schema(cluster: ProbeCluster, temperature: float, stream: bool):
    texts, reasons = ["", ""], []
    reply = await ask(cluster, BY_SCHEMA, temperature=temperature, n=2, stream=stream, seed=3)
    if stream:
        async for chunk in reply:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
    else:
        texts = [choice.message.content for choice in reply.choices]
        reasons = [choice.finish_reason for choice in reply.choices]
    assert reasons == ["stop", "stop"]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("temperature", [0, 1])
async def test_any_object(cluster: ProbeCluster, temperature: float):
    reply = await ask(cluster, ANY_OBJECT, messages=ECHO, temperature=temperature)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == (OBJECT, "stop")
    # The end of the sequence, which the model would not have chosen.
    assert reply.usage.completion_tokens == len(OBJECT) + 1


async def test_the_clients_own_way_to_ask_for_a_class(cluster: ProbeCluster):
    for temperature in (0, 1):
        reply = await cluster.client.chat.completions.parse(
            model="probe", messages=USER, response_format=Person, temperature=temperature, max_tokens=600
        )
        assert isinstance(reply.choices[0].message.parsed, Person)


async def test_an_answer_that_is_cut_tells_so(cluster: ProbeCluster):
    for stream in (False, True):
        reply = await ask(cluster, BY_SCHEMA, max_tokens=5, stream=stream)
        if stream:
            parts = [chunk.choices[0] async for chunk in reply if chunk.choices]
            text, reason = "".join(part.delta.content or "" for part in parts), parts[-1].finish_reason
        else:
            text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
        assert reason == "length"
        assert len(text) == 5


async def test_answers_side_by_side_are_those_of_an_oracle(cluster: ProbeCluster):
    """Some keep to a schema and some to none, in the same steps; each is what a process of its own answers."""
    model, tokenizer = probe()
    oracle = Oracle(
        model, page_tokens=PAGE_TOKENS, kv_format=KvFormat.INT8, grammars=grammars_of(model.info, tokenizer)
    )
    schema = json.dumps(SCHEMA)
    wanted = [BY_SCHEMA, {"type": "text"}, ANY_OBJECT, BY_SCHEMA]
    schemas = [schema, "", '{"type": "object"}', schema]
    hot = [0.0, 0.0, 1.0, 1.0]
    replies = await asyncio.gather(
        *[
            ask(cluster, form, temperature=heat, seed=n, max_tokens=24, logprobs=True, top_logprobs=2)
            for n, (form, heat) in enumerate(zip(wanted, hot, strict=True))
        ]
    )
    ids = tokenizer.encode_chat(USER)
    for n, reply in enumerate(replies):
        (choice,) = reply.choices
        params = SamplingParams(temperature=hot[n], seed=n, max_tokens=24, json_schema=schemas[n], logprobs=2)
        alone = oracle.answer(ids, params)
        assert choice.message.content == tokenizer.decode([token.token_id for token in alone])
        # Of the model's own distribution: a forced token may be one that it found unlikely.
        told = [entry.logprob for entry in choice.logprobs.content]
        assert told == pytest.approx([max(token.logprob, -9999.0) for token in alone][: len(told)], abs=1e-3)


async def test_an_answer_that_is_computed_again_goes_on_in_its_schema():
    """Decode has pages for two of three answers: one gives them back in the middle, and is the same."""
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "minItems": 15}
    wanted = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema | {"maxItems": 16}}}
    async with ProbeCluster(cache__decode_pages=36) as cluster:

        async def answer(seed: int) -> str:
            reply = await ask(cluster, wanted, temperature=1, seed=seed, max_tokens=300)
            assert reply.choices[0].finish_reason == "stop"
            return reply.choices[0].message.content

        alone = [await answer(seed) for seed in range(3)]
        assert "preempted" not in cluster.worker("decode-0").engine.facts().outcomes
        assert await asyncio.gather(*map(answer, range(3))) == alone
        assert cluster.worker("decode-0").engine.facts().outcomes["preempted"] > 0
        for text in alone:
            assert len(json.loads(text)) in (15, 16)
        assert await cluster.all_pages_are_back()


async def test_the_same_over_grpc(cluster: ProbeCluster):
    async def text_of(schema: object) -> str:
        sampling = pb.SamplingParams(max_tokens=400, json_schema=json.dumps(schema))
        turns = [pb.ChatMessage(role=one["role"], content=one["content"]) for one in USER]
        request = pb.GenerateRequest(chat=pb.ChatPrompt(messages=turns), sampling_params=sampling)
        return "".join([message.text async for message in cluster.stub.Generate(request, timeout=30)])

    assert await text_of(SCHEMA) == (await ask(cluster, BY_SCHEMA)).choices[0].message.content
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await text_of({"type": "nope"})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith("sampling_params.json_schema cannot be followed: ")


BAD = [
    ({"type": "grammar"}, "response_format.type", "unsupported_field"),
    ({"type": "json_schema"}, "response_format.json_schema", "bad_json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema", "bad_json_schema"),
    ("json", "response_format", "bad_type"),
]
BAD_SCHEMAS = [
    ({"type": "nope"}, "bad_json_schema"),
    ({"not": {"type": "string"}}, "bad_json_schema"),
    ({"type": "string", "pattern": "("}, "bad_json_schema"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "bad_json_schema"),
    ({"$ref": "https://example.com/schema.json"}, "bad_json_schema"),
    ({"description": "x" * 65536}, "bad_json_schema"),
    # Compiling it does not end within minutes.
    ({"type": "integer", "multipleOf": 1000003}, "json_schema_too_complex"),
    ({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}}, "json_schema_too_complex"),
]


async def test_what_cannot_be_followed_is_refused_by_name_before_any_worker_hears_of_it(cluster: ProbeCluster):
    async def refused(wanted: object, **fields: object) -> tuple[str, str]:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(cluster, wanted, **fields)
        assert caught.value.message.startswith(f"Error code: 400 - {caught.value.param} ")
        return caught.value.param, caught.value.code

    for wanted, field, code in BAD:
        assert await refused(wanted) == (field, code)
    for schema, code in BAD_SCHEMAS:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        assert await refused(wanted) == ("response_format.json_schema.schema", code), schema
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        assert await refused(ANY_OBJECT, extra_body={name: value}) == (name, f"bad_{name}")
    assert cluster.worker("decode-0").engine.facts().outcomes == {}
    assert (await ask(cluster, ANY_OBJECT, messages=ECHO)).choices[0].message.content == OBJECT
