"""The stock client against a real cluster in this process: real pages, real transfer, the probe model."""

from __future__ import annotations

import asyncio

import openai
import pytest

from genlock.v1 import inference_pb2 as pb
from model.probe import echo_of
from tests.support.http_door import PAGE_TOKENS, ProbeCluster, probe

# Longer than the probe's lag of 64 tokens: the answer repeats the last 64, each read from a page.
TEXT = "The quick brown fox jumps over the lazy dog while seven wizards box quietly in a corner. "
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOKENS = 40


@pytest.fixture
async def cluster():
    async with ProbeCluster() as running:
        yield running
        assert await running.all_pages_are_back()


def expected(ids: list[int], count: int = TOKENS) -> str:
    return probe()[1].decode(echo_of(ids, count))


def chat(cluster: ProbeCluster, **fields: object):
    fields = {"model": "probe", "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0, **fields}
    fields["extra_body"] = {"ignore_eos": True, **fields.pop("extra_body", {})}
    return cluster.client.chat.completions.create(**fields)


def complete(cluster: ProbeCluster, **fields: object):
    return cluster.client.completions.create(
        **{"model": "probe", "prompt": TEXT, "max_tokens": TOKENS, "temperature": 0, **fields}
    )


async def over_grpc(cluster: ProbeCluster, **prompt: object) -> tuple[str, list[float]]:
    sampling = pb.SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    request = pb.GenerateRequest(sampling_params=sampling, **prompt)
    messages = [message async for message in cluster.stub.Generate(request, timeout=30)]
    text = "".join(message.text for message in messages)
    return text, [entry.logprob for message in messages for entry in message.logprobs]


async def test_chat_whole_streamed_and_over_grpc_are_one_answer(cluster: ProbeCluster):
    turns = [pb.ChatMessage(role=one["role"], content=one["content"]) for one in MESSAGES]
    text, logprobs = await over_grpc(cluster, chat=pb.ChatPrompt(messages=turns))
    ids = probe()[1].encode_chat(MESSAGES)
    assert text == expected(ids)

    whole = await chat(cluster, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", text, "length")
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-3)
    assert bytes(byte for entry in choice.logprobs.content for byte in entry.bytes).decode() == text
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in choice.logprobs.content)

    stream = await chat(cluster, stream=True, logprobs=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == text
    assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(logprobs, abs=1e-3)
    assert chunks[-1].usage.completion_tokens == TOKENS

    # Full pages of the prompt are cached by now; the last page is never taken from there whole.
    full = (len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
            len(ids),
            TOKENS,
            len(ids) + TOKENS,
        )
        assert usage.prompt_tokens_details.cached_tokens == full > 0


async def test_completions_from_text_and_ids_are_one_answer(cluster: ProbeCluster):
    ids = probe()[1].encode(TEXT)
    text, logprobs = await over_grpc(cluster, text=TEXT)
    assert text == expected(ids)
    whole = await complete(cluster, logprobs=1)
    (choice,) = whole.choices
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3)
    assert "".join(choice.logprobs.tokens) == text
    assert [text[at] for at in choice.logprobs.text_offset] == choice.logprobs.tokens
    assert [max(best, key=best.get) for best in choice.logprobs.top_logprobs] == choice.logprobs.tokens
    assert (await complete(cluster, prompt=ids)).choices[0].text == text
    assert (await complete(cluster, prompt=[TEXT])).choices[0].text == text
    stream = await complete(cluster, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(cluster: ProbeCluster, stream: bool):
    text = expected(probe()[1].encode(TEXT))
    stop = text[10:14]
    cut = text[: text.index(stop)]
    for given in (stop, ["never", stop]):
        reply = await complete(cluster, stop=given, stream=stream)
        if stream:
            choices = [chunk.choices[0] async for chunk in reply]
            assert "".join(choice.text for choice in choices) == cut
            assert choices[-1].finish_reason == "stop"
        else:
            assert (reply.choices[0].text, reply.choices[0].finish_reason) == (cut, "stop")


async def test_two_answers(cluster: ProbeCluster):
    text = expected(probe()[1].encode_chat(MESSAGES))
    whole = await chat(cluster, n=2)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(0, text), (1, text)]
    assert whole.usage.completion_tokens == 2 * TOKENS
    texts, reasons = {0: "", 1: ""}, []
    async for chunk in await chat(cluster, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {0: text, 1: text}
    assert reasons == ["length", "length"]


async def test_a_seed_decides_and_answers_differ(cluster: ProbeCluster):
    hot = {"prompt": TEXT, "temperature": 40.0, "max_tokens": 24}
    first, again = [await complete(cluster, seed=-5, n=2, **hot) for _ in range(2)]
    assert [one.text for one in first.choices] == [one.text for one in again.choices]
    assert first.choices[0].text != first.choices[1].text
    assert (await complete(cluster, seed=6, **hot)).choices[0].text != first.choices[0].text


async def test_the_end_of_sequence_is_a_stop(cluster: ProbeCluster):
    ids = [*probe()[1].encode(TEXT)[:60], 256, *probe()[1].encode(TEXT)[:20]]
    reply = await complete(cluster, prompt=ids, max_tokens=60)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == probe()[1].decode(echo_of(ids, 60)[: echo_of(ids, 60).index(256)])


@pytest.mark.parametrize("kill", ["decode-0", "prefill-0"])
async def test_a_worker_that_dies_never_makes_a_finished_answer(kill: str):
    """Decode dies in a stream: an error, no reason to end. Prefill dies: what runs ends well, what comes is refused."""
    async with ProbeCluster(control__restart=False) as cluster:
        count = 1200
        stream = await chat(cluster, stream=True, max_tokens=count)
        rest = aiter(stream)
        chunks = [await anext(rest) for _ in range(3)]
        await cluster.cluster.kill_worker(kill)
        error = None
        try:
            chunks += [chunk async for chunk in rest]
        except openai.APIError as caught:
            error = caught
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        whole = expected(probe()[1].encode_chat(MESSAGES), count)
        if kill == "decode-0":
            assert isinstance(error, openai.APIError)
            assert reasons == []
            assert whole.startswith(text)
            assert len(text) < len(whole)
        else:
            assert (error, reasons, text) == (None, ["length"], whole)
        with pytest.raises(openai.InternalServerError) as caught:
            await chat(cluster)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_gives_every_page_back_and_a_neighbour_finishes(cluster: ProbeCluster, stream: bool):
    neighbour = asyncio.create_task(complete(cluster, max_tokens=200, extra_body={"ignore_eos": True}))
    leaving = asyncio.create_task(_read(chat(cluster, stream=stream, max_tokens=1500), stream))
    decode = cluster.worker("decode-0")
    async with asyncio.timeout(10):
        while decode.guard.slots - decode.guard.free_pages < 10:
            await asyncio.sleep(0.005)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    answer = await neighbour
    assert answer.choices[0].text == expected(probe()[1].encode(TEXT), 200)
    assert await cluster.all_pages_are_back()
    outcomes = cluster.cluster.gateway.state.outcomes
    assert outcomes == {"cancelled": 1, "ok": 1}


async def _read(asked, stream: bool) -> None:
    reply = await asked
    if stream:
        async with reply:
            async for _chunk in reply:
                pass
