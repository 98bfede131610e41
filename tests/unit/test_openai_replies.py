"""Response messages to OpenAI's objects, and errors to OpenAI's errors."""

from __future__ import annotations

import json

import pytest

from cluster.openai.errors import error_headers, error_object, http_status
from cluster.openai.fields import Fields
from cluster.openai.replies import Answer, Served, encode, event, usage
from cluster.openai.requests import Kind, read_ask
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import (
    Cancelled,
    CorruptPage,
    DeadlineExceeded,
    GenlockError,
    InvalidInput,
    LayoutMismatch,
    NoCapacity,
    PermissionDenied,
    StalePage,
    TransferTimeout,
    Unauthenticated,
    Unavailable,
)
from tests.support.fake_workers import ByteTokenizer

TOKENIZER = ByteTokenizer()
SERVED = Served("toy", "fp_1", TOKENIZER.bytes_of, TOKENIZER.stream)


def answer(kind: Kind, **fields: object) -> Answer:
    base = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    return Answer(read_ask(kind, Fields({**base, **fields}), ""), SERVED, 17)


def said(text: str, index: int = 0, logprob: float = -0.5, top: int = 0) -> pb.GenerateResponse:
    message = pb.GenerateResponse(server_id="s1", index=index, text=text, token_ids=text.encode())
    for token in text.encode():
        entry = message.logprobs.add(token_id=token, text=TOKENIZER.token_text(token), logprob=logprob)
        for _ in range(top):
            entry.top.add(token_id=token, text=TOKENIZER.token_text(token), logprob=logprob)
    return message


def ended(message: pb.GenerateResponse, reason=pb.FINISH_REASON_STOP, prompt=3, completion=2, cached=1):
    message.finished.finish_reason = reason
    message.finished.usage.prompt_tokens = prompt
    message.finished.usage.completion_tokens = completion
    message.finished.usage.cached_tokens = cached
    return message


HEAD = {"created": 17, "model": "toy", "system_fingerprint": "fp_1"}


def test_a_whole_chat():
    one = answer(Kind.CHAT)
    one.add(ended(said("hi")))
    assert one.whole() == {
        **HEAD,
        "id": "chatcmpl-s1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_whole_completion_in_the_order_of_answers():
    one = answer(Kind.COMPLETION, n=2)
    one.add(ended(said("b", index=1), pb.FINISH_REASON_LENGTH))
    one.add(ended(said("a", index=0)))
    whole = one.whole()
    assert (whole["id"], whole["object"]) == ("cmpl-s1", "text_completion")
    assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == [
        ("a", "stop"),
        ("b", "length"),
    ]


def test_chunks_of_a_chat_are_a_role_then_text_then_a_reason():
    one = answer(Kind.CHAT, stream=True)
    chunks = [*one.chunks(said("h")), *one.chunks(said("")), *one.chunks(ended(said("i")))]
    assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "h"}, None),
        ({"content": "i"}, None),
        ({}, "stop"),
    ]
    assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {("chatcmpl-s1", "chat.completion.chunk")}
    assert all("usage" not in chunk for chunk in chunks)
    assert one.last_chunks() == []


def test_each_answer_of_a_stream_begins_with_its_role():
    one = answer(Kind.CHAT, stream=True, n=2)
    chunks = [*one.chunks(said("a", 1)), *one.chunks(said("b", 0)), *one.chunks(said("c", 1))]
    seen = [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("role")) for chunk in chunks]
    assert seen == [(1, "assistant"), (1, None), (0, "assistant"), (0, None), (1, None)]


def test_chunks_of_a_completion():
    one = answer(Kind.COMPLETION, stream=True)
    chunks = [*one.chunks(said("h")), *one.chunks(said("")), *one.chunks(ended(said("")))]
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("h", None),
        ("", "stop"),
    ]


def test_usage_of_a_stream_comes_last_and_alone():
    one = answer(Kind.CHAT, stream=True, stream_options={"include_usage": True})
    chunks = one.chunks(ended(said("hi")))
    assert all(chunk["usage"] is None for chunk in chunks)
    (last,) = one.last_chunks()
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


def test_usage_counts_a_prompt_once_and_the_least_that_was_cached():
    ends = [
        ended(said(""), prompt=9, completion=2, cached=8).finished,
        ended(said(""), prompt=9, completion=3, cached=4).finished,
    ]
    assert usage(ends) == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_chat_logprobs_carry_bytes():
    one = answer(Kind.CHAT, logprobs=True, top_logprobs=1)
    one.add(ended(said("☃", top=1)))
    entries = one.whole()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "☃".encode()]
    assert entries[0]["logprob"] == -0.5
    assert entries[0]["top_logprobs"] == [{"token": "<226>", "logprob": -0.5, "bytes": [226]}]


def test_logprobs_of_a_stream_travel_with_their_text_and_offsets_run_on():
    one = answer(Kind.COMPLETION, stream=True, logprobs=1)
    first = one.chunks(said("a☃", top=1))[0]["choices"][0]["logprobs"]
    assert first["text_offset"] == [0, 1, 1, 1]
    assert first["top_logprobs"][0] == {"a": -0.5}
    assert one.chunks(said("b"))[0]["choices"][0]["logprobs"]["text_offset"] == [2]


def test_completion_logprobs_of_the_chosen_alone():
    one = answer(Kind.COMPLETION, logprobs=0)
    one.add(ended(said("a")))
    assert one.whole()["choices"][0]["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": None,
        "text_offset": [0],
    }


def test_what_cannot_happen_is_a_number_in_json_and_no_number_is_an_error():
    one = answer(Kind.COMPLETION, logprobs=0)
    one.add(ended(said("a", logprob=-float("inf"))))
    assert json.loads(encode(one.whole()))["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]
    with pytest.raises(ValueError, match="JSON"):
        encode({"a": float("nan")})


def test_an_event_is_one_line():
    assert event({"a": "x\ny\r"}) == b'data: {"a":"x\\ny\\r"}\n\n'
    assert event({}, "error") == b"event: error\ndata: {}\n\n"


ERRORS = [
    (InvalidInput("bad_top_p", "m", field="top_p"), 400, "invalid_request_error", "bad_top_p"),
    (InvalidInput("unknown_model", "m", field="model"), 404, "invalid_request_error", "model_not_found"),
    (InvalidInput("body_too_large", "m"), 413, "invalid_request_error", "body_too_large"),
    (InvalidInput("bad_content_type", "m"), 415, "invalid_request_error", "bad_content_type"),
    (DeadlineExceeded("body_timeout", "m"), 408, "invalid_request_error", "body_timeout"),
    (Unauthenticated("no_credential", "m"), 401, "authentication_error", "invalid_api_key"),
    (PermissionDenied("no", "m"), 403, "permission_error", "no"),
    (NoCapacity("gateway_full", "m"), 429, "rate_limit_error", "gateway_full"),
    (Cancelled("aborted_by_caller", "m"), 499, "cancelled", "aborted_by_caller"),
    (Unavailable("draining", "m"), 503, "server_error", "draining"),
    (TransferTimeout("transfer_timeout", "m"), 503, "server_error", "transfer_timeout"),
    (DeadlineExceeded("deadline_exceeded", "m"), 504, "server_error", "deadline_exceeded"),
    (StalePage("stale_tag", "m"), 500, "server_error", "stale_tag"),
    (CorruptPage("digest", "m"), 500, "server_error", "digest"),
    (LayoutMismatch("layout", "m"), 500, "server_error", "layout"),
    (GenlockError("internal", "m"), 500, "server_error", "internal"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), ERRORS)
def test_errors(error: GenlockError, status: int, kind: str, code: str):
    assert http_status(error) == status
    assert error_object(error) == {"error": {"message": "m", "type": kind, "param": error.field or None, "code": code}}


def test_a_refused_caller_hears_when_to_come_again():
    headers = error_headers(NoCapacity("full", retry_after_ms=1500))
    assert headers == {"retry-after": "2", "retry-after-ms": "1500"}
    assert error_headers(NoCapacity("full", retry_after_ms=0))["retry-after"] == "1"


def test_clients_do_not_repeat_what_could_not_be_proved():
    never = {"x-should-retry": "false"}
    for error in (StalePage("stale"), CorruptPage("digest"), GenlockError("internal"), DeadlineExceeded("late")):
        assert error_headers(error) == never
    assert error_headers(Unavailable("worker_lost")) == error_headers(TransferTimeout("late")) == {}
    assert error_headers(Unauthenticated("no_credential")) == {"www-authenticate": "Bearer"}


def test_long_and_broken_messages_fit():
    message = error_object(InvalidInput("r", "\ud800" * 5000))["error"]["message"]
    assert len(message) == 1024
    encode(message)
