"""Fields are counted on the wire as the parser would find them."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError, Message

from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput
from wire.shape import check_fields

KIND = pb.GenerateRequest.DESCRIPTOR
CHAT = KIND.fields_by_name["chat"].number
MESSAGES = pb.ChatPrompt.DESCRIPTOR.fields_by_name["messages"].number


def fields_of(message: Message) -> int:
    """How often the wire names a field; packed numbers are one."""
    count = 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            inner = list(value) if field.is_repeated else [value]
            count += len(inner) + sum(map(fields_of, inner))
        elif field.is_repeated and field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            count += len(value)
        else:
            count += 1
    return count


def request(messages: int, ids: int = 3) -> pb.GenerateRequest:
    turns = [pb.ChatMessage(role="user", content="x" * 300, tool_calls=["{}"] * 2) for _ in range(messages)]
    return pb.GenerateRequest(
        request_id="r",
        chat=pb.ChatPrompt(messages=turns, tools=["{}"]),
        sampling_params=pb.SamplingParams(temperature=0.5, seed=1 << 63, stop=["a", "b"], stop_token_ids=[7] * ids),
    )


@pytest.mark.parametrize("messages", [0, 1, 300])
def test_the_count_is_the_messages(messages: int):
    one = request(messages)
    most = fields_of(one)
    check_fields(one.SerializeToString(), KIND, most)
    with pytest.raises(InvalidInput) as caught:
        check_fields(one.SerializeToString(), KIND, most - 1)
    assert (caught.value.reason, caught.value.field) == ("too_many_values", "request")


def test_packed_numbers_are_one_field():
    check_fields(pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=range(10_000))).SerializeToString(), KIND, 2)


def empty_messages(count: int) -> bytes:
    inner = bytes([MESSAGES << 3 | 2, 0]) * count
    assert len(inner) < 1 << 14
    return bytes([CHAT << 3 | 2, len(inner) & 127 | 128, len(inner) >> 7]) + inner


@pytest.mark.parametrize(
    "before",
    [b"", bytes([15 << 3 | 3, 15 << 3 | 4]), bytes([15 << 3 | 0, 1]), bytes([15 << 3 | 1]) + b"8" * 8,
     bytes([15 << 3 | 5]) + b"4444", bytes([15 << 3 | 2, 3]) + b"abc"],
    ids=["none", "group", "varint", "fixed64", "bytes", "fixed32"],
)  # fmt: skip
def test_nothing_hides_behind_fields_that_are_not_known(before: bytes):
    data = before + empty_messages(5000)
    assert len(pb.GenerateRequest.FromString(data).chat.messages) == 5000
    with pytest.raises(InvalidInput):
        check_fields(data, KIND, 5000)
    check_fields(data, KIND, 5003)


def test_whatever_the_parser_takes_is_counted_in_full():
    """Bytes at random, and cuts: counting ends, and where the parser makes a message the count is no less than its."""
    rng = random.Random(5)
    good = request(5).SerializeToString()
    for _ in range(3000):
        data = bytearray(good[: rng.randrange(len(good) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            made = pb.GenerateRequest.FromString(bytes(data))
        except DecodeError:
            check_fields(bytes(data), KIND, 1 << 20)
            continue
        if fields_of(made):
            with pytest.raises(InvalidInput):
                check_fields(bytes(data), KIND, fields_of(made) - 1)
