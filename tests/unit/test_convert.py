"""Messages between workers: there and back again, and every field that is checked at the border."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genlock.v1 import inference_pb2, worker_pb2
from kvstore.descriptor import PageDescriptor
from kvstore.errors import GenlockError, InvalidInput
from kvstore.ids import PageRef, Tag
from kvstore.transfer.base import PoolExport
from model.base import ModelInfo
from model.sampler import SampledToken
from model.sampling import SamplingParams
from model.ticket import FinishReason, Ticket
from wire.convert import (
    count_from_proto,
    descriptor_from_proto,
    descriptor_to_proto,
    duration_from_proto,
    export_from_proto,
    export_to_proto,
    finish_from_proto,
    finish_to_proto,
    first_token_from_proto,
    require_id,
    served_ticket,
    ticket_from_proto,
    ticket_to_proto,
    token_from_proto,
    token_to_proto,
)

VOCAB = 300
INFO = ModelInfo("probe", "rev", "tok", VOCAB, 64, (256,))
TICKET = Ticket(b"t" * 16, "tenant", (1, 2, 299), SamplingParams(max_tokens=8, json_schema="{}"), "rev", "tok", 1)


def over_the_wire(message):
    """As a peer sees it."""
    return type(message).FromString(message.SerializeToString())


floats = st.floats(0, 4, width=32)
params = st.builds(
    SamplingParams,
    temperature=floats,
    top_p=floats,
    top_k=st.integers(0, 1000),
    min_p=floats,
    repetition_penalty=floats,
    seed=st.integers(0, (1 << 63) - 1),
    max_tokens=st.integers(1, 1000),
    min_tokens=st.integers(0, 1000),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.integers(-1, 20),
)


@given(params, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.text(min_size=1, max_size=20))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_ticket_comes_back_as_it_went(sampling, ids, tenant):
    ticket = Ticket(b"i" * 16, tenant, tuple(ids), sampling, "rev", "tok", len(ids) - 1)
    assert ticket_from_proto(over_the_wire(ticket_to_proto(ticket)), VOCAB) == ticket


def test_stop_strings_do_not_travel():
    ticket = replace(TICKET, sampling=SamplingParams(stop=("secret",)))
    assert b"secret" not in ticket_to_proto(ticket).SerializeToString()


def wrong(**fields: object) -> worker_pb2.Ticket:
    message = ticket_to_proto(TICKET)
    for name, value in fields.items():
        if name == "token_ids":
            del message.token_ids[:]
            message.token_ids.extend(value)
        else:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (wrong(token_ids=[]), "ticket.token_ids"),
        (wrong(token_ids=[VOCAB]), "ticket.token_ids"),
        (wrong(token_ids=[-1]), "ticket.token_ids"),
        (wrong(generated_tokens=3), "ticket.generated_tokens"),
        (wrong(generated_tokens=-1), "ticket.generated_tokens"),
        (wrong(tenant=""), "ticket.tenant"),
        (wrong(tenant="x" * 257), "ticket.tenant"),
        (wrong(ticket_id=b""), "ticket.ticket_id"),
        (wrong(ticket_id=b"x" * 15), "ticket.ticket_id"),
        (wrong(ticket_id=b"x" * 17), "ticket.ticket_id"),
        (worker_pb2.Ticket(), "ticket.token_ids"),
        (wrong(model_revision="other"), "ticket.model_revision"),
        (wrong(tokenizer_digest="other"), "ticket.tokenizer_digest"),
    ],
)
def test_a_bad_ticket_is_refused_and_its_field_named(message, field):
    with pytest.raises(InvalidInput) as caught:
        served_ticket(message, INFO)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 64),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", math.inf),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("min_tokens", 9),
        ("logprobs", 21),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [1] * 65),
    ],
)
def test_bad_sampling_is_refused_at_the_border_and_never_reaches_a_step(name, value):
    message = ticket_to_proto(TICKET)
    if name == "stop_token_ids":
        message.sampling.stop_token_ids.extend(value)
    else:
        setattr(message.sampling, name, value)
    with pytest.raises(InvalidInput) as caught:
        served_ticket(message, INFO)
    assert caught.value.field.endswith(name)
    assert served_ticket(ticket_to_proto(TICKET), INFO) == TICKET


def test_a_ticket_of_a_later_attempt_is_measured_by_its_prompt():
    """Prompt 3, generated 50, max_tokens 61 of a context of 64: the answer so far is part of the 61."""
    ticket = replace(TICKET, token_ids=(1,) * 53, generated_tokens=50, sampling=SamplingParams(max_tokens=61))
    assert served_ticket(ticket_to_proto(ticket), INFO) == ticket


@pytest.mark.parametrize(
    "token",
    [
        SampledToken(7),
        SampledToken(7, 0.0),
        SampledToken(7, -1.5, ((7, -1.5), (8, -2.0))),
        SampledToken(0, -0.25),
    ],
)
def test_a_token_comes_back_as_it_went(token):
    assert token_from_proto(over_the_wire(token_to_proto(token))) == token


def test_finish_reasons():
    for reason in FinishReason:
        assert finish_from_proto(finish_to_proto(reason)) is reason
    assert finish_from_proto(inference_pb2.FINISH_REASON_UNSPECIFIED) is None
    assert finish_from_proto(99) is None


EXPORT = PoolExport("shm", (1 << 63) - 1, '{"layout": 1}', 8, 384, "an address")
DESC = PageDescriptor(
    PageRef(7, Tag((1 << 63) - 1, (1 << 40) + 1)), 2, 32, 5, 384, (1 << 63) - 1, b"k" * 32, (1 << 61) - 2
)


def test_exports_and_descriptors_come_back_as_they_went():
    assert export_from_proto(over_the_wire(export_to_proto(EXPORT))) == EXPORT
    assert descriptor_from_proto(over_the_wire(descriptor_to_proto(DESC))) == DESC


@pytest.mark.parametrize(("name", "value", "field"), [
    ("incarnation", 0, "pool.incarnation"),
    ("incarnation", -5, "pool.incarnation"),
    ("slots", 0, "pool.slots"),
    ("slots", -1, "pool.slots"),
])  # fmt: skip
def test_a_bad_export_is_refused(name, value, field):
    message = export_to_proto(EXPORT)
    setattr(message, name, value)
    with pytest.raises(InvalidInput) as caught:
        export_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize(("name", "value", "field"), [
    ("prefix_key", b"", "page.prefix_key"),
    ("prefix_key", b"k" * 31, "page.prefix_key"),
    ("incarnation", 0, "page.generation"),
    ("generation", 0, "page.generation"),
])  # fmt: skip
def test_a_bad_descriptor_is_refused(name, value, field):
    message = descriptor_to_proto(DESC)
    setattr(message, name, value)
    with pytest.raises(InvalidInput) as caught:
        descriptor_from_proto(message)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_id": VOCAB}, "first_token.token_id"),
        ({"token_id": -1}, "first_token.token_id"),
        ({"top": [worker_pb2.SampledLogprob(token_id=VOCAB)]}, "first_token.token_id"),
        ({"logprob": math.nan}, "first_token.logprob"),
        ({"logprob": math.inf}, "first_token.logprob"),
        ({"top": [worker_pb2.SampledLogprob(token_id=1, logprob=math.nan)]}, "first_token.logprob"),
    ],
)
def test_a_first_token_that_no_model_sampled_is_refused(change: dict, field: str):
    message = worker_pb2.SampledToken(**{"token_id": 4, "logprob": -1.0, **change})
    with pytest.raises(InvalidInput) as caught:
        first_token_from_proto(over_the_wire(message), VOCAB, len(message.top))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("logprob", "top", "asked", "right"),
    [
        (None, 0, -1, True), (-1.0, 0, 0, True), (-1.0, 2, 2, True), (-1.0, VOCAB, VOCAB + 1, True),
        (-1.0, 0, -1, False), (None, 1, -1, False), (None, 0, 0, False), (-1.0, 1, 0, False), (-1.0, 1, 2, False),
        (-1.0, 3, 2, False), (None, 2, 2, False),
    ],
)  # fmt: skip
def test_a_first_token_has_the_log_probabilities_that_were_asked_for(logprob, top: int, asked: int, right: bool):
    message = token_to_proto(SampledToken(4, logprob, tuple((at, -1.0) for at in range(top))))
    if right:
        assert len(first_token_from_proto(over_the_wire(message), VOCAB, asked).top) == top
    else:
        with pytest.raises(InvalidInput, match="as many as asked for"):
            first_token_from_proto(over_the_wire(message), VOCAB, asked)


@pytest.mark.parametrize(("value", "right"), [(0, True), (5, True), (6, False), (-1, False), (1 << 30, False)])
def test_a_count_that_cannot_be_is_refused(value: int, right: bool):
    if right:
        assert count_from_proto(value, 5, "x") == value
    else:
        with pytest.raises(InvalidInput) as caught:
            count_from_proto(value, 5, "x")
        assert caught.value.field == "x"


def test_a_first_token_comes_back_as_it_went():
    token = SampledToken(VOCAB - 1, 0.0, ((0, -0.5), (1, -math.inf)))
    assert first_token_from_proto(over_the_wire(token_to_proto(token)), VOCAB, len(token.top)) == token


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_a_duration_that_no_clock_shows_is_refused(value: float):
    assert duration_from_proto(0.5, "x") == 0.5
    with pytest.raises(InvalidInput) as caught:
        duration_from_proto(value, "completed.queue_ms")
    assert caught.value.field == "completed.queue_ms"


def test_an_id_is_sixteen_bytes():
    assert require_id(b"x" * 16, "a") == b"x" * 16
    with pytest.raises(InvalidInput) as caught:
        require_id(b"x", "a.field")
    assert caught.value.field == "a.field"


def test_random_bytes_in_place_of_messages_are_typed_errors_or_values():
    """Whatever parses is refused with a typed error or is a value; nothing else is ever raised."""
    rng = random.Random(5)
    samples = [
        (ticket_to_proto(TICKET), lambda m: served_ticket(m, INFO)),
        (export_to_proto(EXPORT), export_from_proto),
        (descriptor_to_proto(DESC), descriptor_from_proto),
    ]
    refused = 0
    for _ in range(3000):
        message, convert = rng.choice(samples)
        raw = bytearray(message.SerializeToString())
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            changed = type(message).FromString(bytes(raw))
        except Exception:  # not a message at all: the transport refuses it
            continue
        try:
            convert(changed)
        except GenlockError:
            refused += 1
    assert refused > 100
