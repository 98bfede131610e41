"""What applications ask of the HTTP door beside text: tools, formats, usage of streams. With the stock client."""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel

from genlock.v1 import inference_pb2 as pb
from kvstore.errors import CorruptPage
from tests.support.fake_workers import ByteTokenizer, finished, say, tokens
from tests.support.http_door import ProbeCluster, scripted

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


class ToolTokenizer(ByteTokenizer):
    """A template that shows tools before the messages."""

    shows_tools = True

    def encode_chat(self, messages, *, add_generation_prompt=True, tools=()) -> list[int]:
        shown = "".join(f"<{tool['function']['name']}>" for tool in tools)
        made = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        told = "".join(f"{one['name']}({one['arguments']})" for one in made)
        return self.encode(shown) + super().encode_chat(messages) + self.encode(told)


async def test_the_second_turn_of_a_talk_with_a_tool():
    """As the stock client sends it: the assistant's call, then what the tool said."""
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": 2}'}}
    talk = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk += [{"role": "tool", "tool_call_id": "c1", "content": "12:00"}]
    async with scripted(say(tokens("ok"), finished(2)), tokenizer=ToolTokenizer()) as env:
        reply = await env.client.chat.completions.create(model="toy", messages=talk, tools=[TOOL])
        assert reply.choices[0].message.content == "ok"
        prompt = bytes(env.decode.seen[-1].request.ticket.token_ids)
        assert prompt == b"<clock>user:hi\nassistant:\ntool:12:00\nclock({'zone': 2})"


async def test_a_template_without_tools_refuses_the_second_turn_by_name():
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    talk = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "12"}]
    async with ProbeCluster() as cluster:
        with pytest.raises(openai.BadRequestError) as caught:
            await cluster.client.chat.completions.create(model="probe", messages=talk)
        assert (caught.value.param, caught.value.code) == ("messages[1].tool_calls", "tools_unsupported")


class Answer(BaseModel):
    number: int


async def test_tools_reach_the_template_and_none_hides_them():
    async with scripted(say(tokens("ok"), finished(2)), tokenizer=ToolTokenizer()) as env:

        async def prompt_of(**fields: object) -> bytes:
            reply = await env.client.chat.completions.create(model="toy", messages=USER, **fields)
            assert reply.choices[0].message.content == "ok"
            return bytes(env.decode.seen[-1].request.ticket.token_ids)

        assert await prompt_of(tools=[TOOL], tool_choice="auto") == b"<clock>user:hi\n"
        assert await prompt_of(tools=[TOOL]) == b"<clock>user:hi\n"
        assert await prompt_of(tools=[TOOL], tool_choice="none") == b"user:hi\n"
        with pytest.raises(openai.BadRequestError) as caught:
            await prompt_of(tools=[TOOL], tool_choice={"type": "custom", "custom": {"name": "clock"}})
        assert (caught.value.param, caught.value.code) == ("tool_choice.type", "unsupported_field")


SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_format_goes_to_the_workers_with_the_ticket(stream: bool):
    async with scripted(say(tokens('{"number": 4}'), finished(13))) as env:

        async def schema_of(wanted: object) -> str:
            await env.client.chat.completions.create(model="toy", messages=USER, response_format=wanted, stream=stream)
            return env.decode.seen[-1].request.ticket.sampling.json_schema

        assert await schema_of({"type": "text"}) == ""
        assert json.loads(await schema_of({"type": "json_object"})) == {"type": "object"}
        assert json.loads(await schema_of(SCHEMA)) == Answer.model_json_schema()
        seen = len(env.decode.seen)
        with pytest.raises(openai.BadRequestError) as caught:
            await schema_of({"type": "grammar"})
        assert (caught.value.param, caught.value.code) == ("response_format.type", "unsupported_field")
        assert len(env.decode.seen) == seen


async def test_the_clients_own_way_to_ask_for_a_class():
    async with scripted(say(tokens('{"number": 4}'), finished(13, pb.FINISH_REASON_STOP))) as env:
        reply = await env.client.chat.completions.parse(model="toy", messages=USER, response_format=Answer)
        assert reply.choices[0].message.parsed == Answer(number=4)
        (seen,) = env.decode.seen
        sent = json.loads(seen.request.ticket.sampling.json_schema)
        assert sent["properties"] == Answer.model_json_schema()["properties"]
        assert sent["additionalProperties"] is False


@pytest.mark.parametrize("include", [False, True])
async def test_usage_of_a_stream_of_completions_comes_last_and_when_it_is_asked_for(include: bool):
    async with scripted(say(tokens("a"), tokens("b"), finished(2))) as env:
        stream = await env.client.completions.create(
            model="toy", prompt="hello", stream=True, stream_options={"include_usage": include}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert all(chunk.usage is None for chunk in chunks)
        if include:
            usage = last.usage
            assert (last.choices, usage.prompt_tokens, usage.completion_tokens) == ([], 5, 2)
            assert usage.prompt_tokens_details.cached_tokens == 3
        else:
            assert (last.usage, last.choices[0].finish_reason) == (None, "length")


async def test_a_completion_that_fails_after_it_began_is_never_a_clean_end():
    async with scripted(say(tokens("ab"), CorruptPage("digest_mismatch"))) as env:
        stream = await env.client.completions.create(model="toy", prompt="hello", stream=True)
        seen = []

        async def follow() -> None:
            async for chunk in stream:
                seen.extend(chunk.choices)

        with pytest.raises(openai.APIError) as caught:
            await follow()
        assert caught.value.code == "digest_mismatch"
        assert ["".join(choice.text for choice in seen), {choice.finish_reason for choice in seen}] == ["ab", {None}]
