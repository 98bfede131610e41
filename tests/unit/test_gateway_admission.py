"""Admission's rules that need no server, seeds of several answers, and the tenants file."""

from __future__ import annotations

import hashlib
import json
import math

import pytest

from cluster.gateway.admission import (
    MAX_SCHEMA_DEPTH,
    ModelLimits,
    check_prompt,
    check_request,
    choice_seed,
    fit_sampling,
)
from cluster.gateway.identity import Caller, SingleTenant, authenticator_from
from cluster.settings import ApiConfig
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import InvalidInput, Unauthenticated
from model.sampling import MAX_SCHEMA_BYTES

MODEL = ModelLimits("toy-1b", vocab_size=100, context_tokens=64, aliases=("toy",))
API = ApiConfig(max_prompt_bytes=10)


def draft(request: pb.GenerateRequest | None = None, **params: object):
    request = request or pb.GenerateRequest(text="x", sampling_params=pb.SamplingParams(**params))
    return check_request(request, MODEL, API)


def test_defaults():
    plain = draft()
    sampling = fit_sampling(plain, 10, MODEL)
    assert (sampling.temperature, sampling.top_p, sampling.logprobs, sampling.max_tokens) == (0.0, 1.0, -1, 54)
    assert (plain.choices, plain.stream, plain.seed_given) == (1, True, False)
    wide = ModelLimits("toy", 100, 4096)
    assert fit_sampling(plain, 10, wide).max_tokens == 128


def test_given_values_are_kept():
    given = draft(
        temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=1.5, seed=0, max_tokens=9, min_tokens=2,
        stop=["a", "b" * 256], stop_token_ids=[0, 99], ignore_eos=True, logprobs=0, n=8,
    )  # fmt: skip
    sampling = fit_sampling(given, 10, MODEL)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.repetition_penalty, sampling.seed, sampling.max_tokens, sampling.min_tokens) == (1.5, 0, 9, 2)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b" * 256), (0, 99))
    assert (sampling.ignore_eos, sampling.logprobs, given.choices, given.seed_given) == (True, 0, 8, True)


@pytest.mark.parametrize("name", ["", "toy", "toy-1b"])
def test_the_model_may_be_named_either_way(name: str):
    draft(pb.GenerateRequest(text="x", model=name))


@pytest.mark.parametrize(
    ("text", "fits"), [("0123456789", True), ("0123456789x", False), ("☃☃☃", True), ("☃☃☃☃", False)]
)
def test_a_prompt_s_size_is_in_bytes(text: str, fits: bool):
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=part) for part in (text[:2], text[2:])])
    for request in (pb.GenerateRequest(text=text), pb.GenerateRequest(chat=chat)):
        if fits:
            draft(request)
        else:
            with pytest.raises(InvalidInput) as caught:
                draft(request)
            assert caught.value.reason == "prompt_too_large"


def test_the_last_token_id_of_the_vocabulary_is_fine():
    ids = pb.TokenPrompt(token_ids=[0, 99])
    assert draft(pb.GenerateRequest(tokens=ids)).prompt.token_ids == (0, 99)


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(InvalidInput) as caught:
        fit_sampling(draft(), 0, MODEL)
    assert (caught.value.reason, caught.value.field) == ("empty_prompt", "text")


def test_seeds_of_answers_differ_and_repeat():
    seeds = [choice_seed(7, index) for index in range(8)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 8
    assert seeds == [choice_seed(7, index) for index in range(8)]
    assert set(seeds[1:]).isdisjoint(choice_seed(8, index) for index in range(8))
    assert all(0 <= choice_seed(2**64 - 1, index) < 2**64 for index in range(8))


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def test_a_token_names_its_tenant():
    text = (
        f"tenants: {{a: {{tokens_sha256: [{digest('t1')}, {digest('t2')}]}}, b: {{tokens_sha256: ['{digest('t3')}']}}}}"
    )
    known = authenticator_from(text, "t.yaml")
    assert known.caller([("authorization", "Bearer t2"), ("x-tenant", "b")]) == Caller("a")
    assert known.caller([("authorization", "bearer t3")]) == Caller("b")
    for metadata in (
        [],
        [("authorization", "t1")],
        [("authorization", "Basic t1")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer t4")],
        [("authorization", "Bearer t1"), ("authorization", "Bearer t3")],
        [("authorization", b"Bearer t1")],
        [("authorization", "Bearer " + "x" * 5000)],
    ):
        with pytest.raises(Unauthenticated):
            known.caller(metadata)


def test_without_tenants_everybody_is_the_one():
    assert SingleTenant().caller([("x-tenant", "victim"), ("authorization", "Bearer x")]) == Caller("default", True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: [b",
        "tenants: 3",
        "tenants: {}",
        "tenants: {a: {tokens_sha256: [secret]}}",
        "tenants: {a: {tokens_sha256: []}}",
        "tenants: {a: {token: x}}",
        "tenants: {'a b': {tokens_sha256: ['" + "0" * 64 + "']}}",
        "tenants: {a: {tokens_sha256: ['" + "0" * 64 + "']}, b: {tokens_sha256: ['" + "0" * 64 + "']}}",
        "tenants: {a: {tokens_sha256: ['" + "0" * 64 + "']}, b: {tokens_sha256: [], max_priority: top}}",
    ],
)
def test_a_broken_tenants_file_is_refused(text: str):
    with pytest.raises(InvalidInput) as caught:
        authenticator_from(text, "t.yaml")
    assert caught.value.field == "api.tenants_file"
    assert "secret" not in caught.value.message


def nested(levels: int) -> str:
    return '{"items":' * (levels - 1) + "{}" + "}" * (levels - 1)


def test_a_schema_is_an_object_within_limits():
    assert draft(json_schema=nested(MAX_SCHEMA_DEPTH)).sampling.json_schema == nested(MAX_SCHEMA_DEPTH)
    assert draft().sampling.json_schema == ""
    long = json.dumps({"title": "é" * (MAX_SCHEMA_BYTES // 2)}, ensure_ascii=False)
    deep = '{"a":' + "[" * 30_000 + "]" * 30_000 + "}"  # within the size, and deeper than it can be read
    assert len(deep) < MAX_SCHEMA_BYTES
    for text in ("{", "[]", "null", nested(MAX_SCHEMA_DEPTH + 1), deep, '{"a":' + "9" * 9000 + "}", long):
        with pytest.raises(InvalidInput) as caught:
            draft(json_schema=text)
        assert (caught.value.reason, caught.value.field) == ("bad_json_schema", "sampling_params.json_schema")


def of_multiples(*values: object) -> str:
    return json.dumps({"anyOf": [{"type": "number", "multipleOf": value} for value in values]})


@pytest.mark.parametrize(
    "values",
    [(32_768,), (20_000_000,), (0.25, 1e-9, 86_400), (99_990,), (-7, True, "99991", None), (math.nan, math.inf),
     (30_000 + 1, 2_766)],
)  # fmt: skip
def test_what_multiples_may_come_to(values: tuple[object, ...]):
    draft(json_schema=of_multiples(*values))


@pytest.mark.parametrize(
    "values", [(32_769,), (99_991,), (0.99991,), (1 / 3,), (30_001, 2_768), (-99_991,), (5, 10**99 + 1)]
)
def test_multiples_that_take_long_to_compile_are_refused_each_time_alike(values: tuple[object, ...]):
    with pytest.raises(InvalidInput) as caught:
        draft(json_schema=of_multiples(*values))
    assert (caught.value.reason, caught.value.field) == ("json_schema_too_complex", "sampling_params.json_schema")


@pytest.mark.parametrize(("name", "value"), [("ignore_eos", True), ("min_tokens", 1)])
def test_what_would_forbid_the_end_does_not_go_with_a_schema(name: str, value: object):
    with pytest.raises(InvalidInput) as caught:
        draft(json_schema="{}", **{name: value})
    assert caught.value.field == f"sampling_params.{name}"
    draft(**{name: value})


@pytest.mark.parametrize("over", [False, True])
def test_text_that_no_tokens_could_fit_is_refused_before_it_is_tokenized(over: bool):
    model = ModelLimits("toy", 100, context_tokens=8, longest_token_bytes=3)
    text = "x" * (24 + over)
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=text)])
    requests = (pb.GenerateRequest(text=text), pb.GenerateRequest(chat=chat), pb.TokenizeRequest(text=text))
    for request in requests:
        if not over:
            check_prompt(request, model, ApiConfig())
            continue
        with pytest.raises(InvalidInput) as caught:
            check_prompt(request, model, ApiConfig())
        assert caught.value.reason == "prompt_too_long"


def test_ids_beyond_the_context_are_counted_and_not_looked_at():
    model = ModelLimits("toy", 100, context_tokens=8)
    with pytest.raises(InvalidInput) as caught:
        check_prompt(pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1000] * 8)), model, ApiConfig())
    assert (caught.value.reason, caught.value.field) == ("prompt_too_long", "tokens")
    check_prompt(pb.GenerateRequest(tokens=pb.TokenPrompt(token_ids=[1] * 7)), model, ApiConfig())
