"""The gateway over real gRPC: what is refused before any worker is called, and who may ask."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from cluster.gateway.identity import authenticator_from
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import operator_pb2
from kvstore.errors import (
    GenlockError,
    InvalidInput,
    PermissionDenied,
    Unauthenticated,
)
from tests.support.fake_workers import (
    CONTEXT_TOKENS,
    VOCAB,
    ByteTokenizer,
    hang,
)
from tests.support.gateway_cluster import (
    cluster,
    first_of,
    prompt,
    read,
    refused,
    text_of,
)
from wire.errors import from_rpc

BAD = {
    "no prompt": (pb.GenerateRequest(), "no_prompt", "prompt"),
    "empty text": (prompt(""), "empty_prompt", "text"),
    "empty ids": (pb.GenerateRequest(tokens=pb.TokenPrompt()), "empty_prompt", "tokens.token_ids"),
    "negative id": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1, -1])),
        "bad_token_id",
        "tokens.token_ids[1]",
    ),
    "id past vocab": (
        pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[VOCAB])),
        "bad_token_id",
        "tokens.token_ids[0]",
    ),
    "no messages": (pb.GenerateRequest(chat=pb.ChatPrompt()), "no_messages", "chat.messages"),
    "unknown role": (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user"), pb.ChatMessage(role="root")])),
        "bad_role",
        "chat.messages[1].role",
    ),
    "context + 1": (prompt("x" * (CONTEXT_TOKENS + 1)), "prompt_too_long", "text"),
    "context": (prompt("x" * CONTEXT_TOKENS), "prompt_too_long", "text"),
    "context * 10": (prompt("x" * (CONTEXT_TOKENS * 10)), "prompt_too_long", "text"),
    "ids over context": (pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1] * 300)), "prompt_too_long", "tokens"),
    "200 KB": (prompt("x" * 200_000), "prompt_too_long", "text"),
    "200 KB chat": (
        pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * 200_000)])),
        "prompt_too_long",
        "chat.messages",
    ),
    "unknown model": (pb.GenerateRequest(text="x", model="other"), "unknown_model", "model"),
    "long label": (prompt(request_id="r" * 129), "bad_request_id", "request_id"),
    "max_tokens 0": (prompt(max_tokens=0), "bad_max_tokens", "sampling_params.max_tokens"),
    "max_tokens -1": (prompt(max_tokens=-1), "bad_max_tokens", "sampling_params.max_tokens"),
    "max_tokens over": (prompt(max_tokens=CONTEXT_TOKENS + 1), "bad_max_tokens", "sampling_params.max_tokens"),
    "no room": (prompt(max_tokens=CONTEXT_TOKENS - 4), "max_tokens_over_context", "sampling_params.max_tokens"),
    "min over max": (prompt(max_tokens=4, min_tokens=5), "bad_min_tokens", "sampling_params.min_tokens"),
    "nan temperature": (prompt(temperature=float("nan")), "bad_temperature", "sampling_params.temperature"),
    "inf temperature": (prompt(temperature=float("inf")), "bad_temperature", "sampling_params.temperature"),
    "cold": (prompt(temperature=-0.1), "bad_temperature", "sampling_params.temperature"),
    "top_p 0": (prompt(top_p=0.0), "bad_top_p", "sampling_params.top_p"),
    "top_p 1.1": (prompt(top_p=1.1), "bad_top_p", "sampling_params.top_p"),
    "top_p nan": (prompt(top_p=float("nan")), "bad_top_p", "sampling_params.top_p"),
    "top_k -1": (prompt(top_k=-1), "bad_top_k", "sampling_params.top_k"),
    "min_p 1": (prompt(min_p=1.0), "bad_min_p", "sampling_params.min_p"),
    "penalty 0": (prompt(repetition_penalty=0.0), "bad_repetition_penalty", "sampling_params.repetition_penalty"),
    "logprobs 21": (prompt(logprobs=21), "bad_logprobs", "sampling_params.logprobs"),
    "17 stops": (prompt(stop=["x"] * 17), "too_many_stops", "sampling_params.stop"),
    "long stop": (prompt(stop=["ok", "x" * 257]), "bad_stop", "sampling_params.stop[1]"),
    "empty stop": (prompt(stop=[""]), "bad_stop", "sampling_params.stop[0]"),
    "bad stop id": (prompt(stop_token_ids=[VOCAB]), "bad_token_id", "sampling_params.stop_token_ids[0]"),
    "n 0": (prompt(n=0), "bad_n", "sampling_params.n"),
    "n 9": (prompt(n=9), "bad_n", "sampling_params.n"),
}


async def test_bad_input_is_refused_before_any_worker_is_called():
    async with cluster() as env:
        for name, (request, reason, field) in BAD.items():
            error = await refused(env.stub.Generate(request, timeout=10))
            assert (type(error), error.reason, error.field) == (InvalidInput, reason, field), name
            assert field in error.message, name
        assert env.decode.seen == []
        assert sum(env.state.outcomes.values()) == len(BAD)
        assert "ok" not in env.state.outcomes
        assert text_of(await read(env.stub.Generate(prompt("still here"), timeout=5))) == "still here"


async def test_what_just_fits_is_served():
    async with cluster() as env:
        whole = prompt("x" * (CONTEXT_TOKENS - 1))
        assert len(text_of(await read(env.stub.Generate(whole, timeout=5)))) == 1
        exact = prompt("x" * 5, max_tokens=CONTEXT_TOKENS - 5)
        await read(env.stub.Generate(exact, timeout=5))
        assert env.decode.seen[1].request.ticket.sampling.max_tokens == CONTEXT_TOKENS - 5
        same = [env.stub.Generate(prompt("dup", request_id="same"), timeout=5) for _ in range(3)]
        assert [text_of(await read(call)) for call in same] == ["dup"] * 3


async def test_a_broken_chat_template_is_the_caller_s_error():
    broken = ByteTokenizer(InvalidInput("bad_chat_template", "cannot render", field="messages"))
    async with cluster(tokenizer=broken) as env:
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])
        error = await refused(env.stub.Generate(pb.GenerateRequest(chat=chat), timeout=5))
        assert (type(error), error.reason, error.field) == (InvalidInput, "bad_chat_template", "chat.messages")


async def test_a_bug_in_the_tokenizer_is_internal_and_quotes_nothing():
    tokenizer = ByteTokenizer()
    tokenizer.encode = lambda text, **_: [][len(text)]
    async with cluster(tokenizer=tokenizer) as env:
        error = await refused(env.stub.Generate(prompt("secret words"), timeout=5))
        assert (type(error), error.reason) == (GenlockError, "internal")
        assert "secret" not in error.message
        assert dict(env.state.outcomes) == {"internal": 1}


@pytest.mark.parametrize("data", [b"\x1a\x02\xff\xfe", b"\x1a\x7fabc", b"\xff\xff\xff"], ids=["utf8", "cut", "junk"])
async def test_bytes_that_are_no_message_are_invalid_argument(data: bytes):
    async with cluster() as env:
        raw = env.channel.unary_stream(
            "/genlock.v1.InferenceService/Generate", response_deserializer=pb.GenerateResponse.FromString
        )
        error = await refused(raw(data, timeout=5))
        assert (type(error), error.reason, error.field) == (InvalidInput, "malformed_request", "request")
        assert dict(env.state.outcomes) == {"malformed_request": 1}


async def test_a_message_over_the_wire_limit_is_refused():
    async with cluster(api__max_message_bytes=1 << 20, api__max_prompt_bytes=1 << 19) as env:
        error = await refused(env.stub.Generate(prompt("x" * (2 << 20)), timeout=5))
        assert (type(error), error.reason) == (InvalidInput, "body_too_large")
        assert text_of(await read(env.stub.Generate(prompt("ok"), timeout=5))) == "ok"


async def test_nothing_that_a_client_sends_names_a_peer_or_a_tenant():
    knocks = []
    listener = await asyncio.start_server(lambda reader, writer: knocks.append(writer), "127.0.0.1", 0)
    evil = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    metadata = (
        ("x-tenant", "victim"),
        ("tenant", "victim"),
        ("prefill_endpoint", evil),
        ("remote_host", evil),
        ("remote_engine_id", "e"),
        ("remote_block_ids", "[1,2]"),
        ("kv_transfer_params", f'{{"remote_host": "{evil}"}}'),
        ("peer", evil),
        ("page_ids", "1,2"),
    )
    # Fields that the schema does not have: number 100 as text, 101 as a number.
    unknown = b"\xa2\x06" + bytes([len(evil)]) + evil.encode() + b"\xa8\x06\x07"
    async with cluster() as env:
        raw = env.channel.unary_stream(
            "/genlock.v1.InferenceService/Generate", response_deserializer=pb.GenerateResponse.FromString
        )
        messages = await read(raw(prompt("hi").SerializeToString() + unknown, metadata=metadata, timeout=5))
        assert text_of(messages) == "hi"
        seen = env.decode.seen[0].request
        assert seen.ticket.tenant == "default"
        assert seen.prefill_endpoint == env.prefill.endpoint
        assert evil.encode() not in seen.SerializeToString()
    assert knocks == []
    listener.close()


TENANTS = """
tenants:
  acme: {tokens_sha256: [2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b]}
  ops: {tokens_sha256: [5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8], operator: true}
"""
ACME, OPS = (("authorization", "Bearer secret"),), (("authorization", "bearer password"),)


async def test_the_tenant_comes_from_the_credential():
    async with cluster(hang, authenticator=authenticator_from(TENANTS, "t.yaml")) as env:
        for metadata in ((), (("authorization", "Bearer nope"),), (("authorization", "secret"),), ACME + OPS):
            error = await refused(env.stub.Generate(prompt(), timeout=5, metadata=metadata))
            assert type(error) is Unauthenticated
        assert env.decode.seen == []
        rest = await first_of(env.stub.Generate(prompt(request_id="x"), timeout=30, metadata=ACME))
        assert env.decode.seen[0].request.ticket.tenant == "acme"
        # The same label of another tenant is another request.
        assert (await env.stub.Abort(pb.AbortRequest(request_id="x"), timeout=5, metadata=OPS)).aborted == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await env.operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=5, metadata=ACME)
        assert type(from_rpc(caught.value)) is PermissionDenied
        await env.operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=5, metadata=OPS)
        assert (await env.stub.Abort(pb.AbortRequest(request_id="x"), timeout=5, metadata=ACME)).aborted == 1
        await refused(rest)
