"""Which tokens keep an answer to a schema: the same from a replay as from going on, row by row, within limits."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvstore.errors import GenlockError, InvalidInput
from model import schema_check
from model.grammar import Grammars, grammars_of
from model.grammar import compiled as real
from model.probe import EOS_ID, build_probe
from model.sampler import NO_TOKEN, SampledToken, SampleRow, sample, validate
from model.sampling import SamplingParams
from model.ticket import Ticket
from model.turns import TenantTurns
from wire.matchers import matcher_for

ANY = '{"type": "object"}'
SCHEMA = json.dumps({
    "type": "object", "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer"}}, "required": ["a"],
    "additionalProperties": False,
})  # fmt: skip
TEXT = b'{"a": "yy", "b": -12}'
VOCAB = 260


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    model, tokenizer = build_probe()
    return grammars_of(model.info, tokenizer)


def ids_of(mask) -> list[int]:
    return np.flatnonzero(mask).tolist()


def test_the_masks_of_an_answer(grammars: Grammars):
    matcher = grammars.start(SCHEMA)
    assert ids_of(matcher.allowed([], 0)) == [ord("{")]
    for count, byte in enumerate(TEXT):
        mask = matcher.allowed(list(TEXT[:count]), count)
        assert mask[byte], TEXT[:count]
        assert not mask[EOS_ID:].any(), "neither an end nor a control token inside of an object"
    assert ids_of(matcher.allowed(list(TEXT), len(TEXT))) == [EOS_ID]
    inside = grammars.start(SCHEMA, list(b'{"a": "'))
    assert ids_of(inside.allowed(list(b'{"a": "'), 7)) == [ord("x"), ord("y")]


def test_a_replay_says_what_going_on_says(grammars: Grammars):
    """A prompt before the answer is no part of it. A matcher that skipped tokens, or that went too far, replays."""
    history = [7, 8, *TEXT]
    steady = grammars.start(SCHEMA)
    skipping = grammars.start(SCHEMA)
    for count in range(len(TEXT) + 1):
        known = history[: 2 + count]
        expected = steady.allowed(known, count)
        assert (expected == steady.allowed(np.asarray(known), count)).all(), "asked again"
        assert (expected == grammars.start(SCHEMA, list(TEXT[:count])).allowed(known, count)).all()
        if count % 5 == 0:
            assert (expected == skipping.allowed(known, count)).all()
    assert (steady.allowed(history[:6], 4) == grammars.start(SCHEMA, list(TEXT[:4])).allowed(history[:6], 4)).all()


def test_whitespace_between_parts_ends(grammars: Grammars):
    matcher = grammars.start(ANY)
    answer = list(b"{")
    while len(answer) < 40 and matcher.allowed(answer, len(answer))[ord(" ")]:
        answer.append(ord(" "))
    assert len(answer) == 33


def test_no_text_of_an_answer_comes_from_a_control_token(grammars: Grammars):
    text = list(b'{"a')
    mask = grammars.start(ANY, text).allowed(text, len(text))
    assert mask[ord("<")]
    assert not mask[EOS_ID:].any()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_rows_with_a_schema_and_rows_without_side_by_side(grammars: Grammars, temperature: float):
    logits = torch.from_numpy(np.random.default_rng(5).normal(0, 4, (6, VOCAB)).astype(np.float32))
    params = SamplingParams(temperature=temperature, seed=3, logprobs=2, top_k=9)
    bound = replace(params, json_schema=SCHEMA)

    def rows():
        return [
            SampleRow(bound, 40, 7, (EOS_ID,), list(b'ab{"a": "'), grammars.start(SCHEMA)) if n % 2 else
            SampleRow(params, 40 + n, 7, (EOS_ID,), list(b'ab{"a": "')) for n in range(6)
        ]  # fmt: skip

    together = sample(logits, rows())
    alone = [sample(logits[n : n + 1], [row])[0] for n, row in enumerate(rows())]
    assert together == alone
    free = sample(logits, [replace(row, params=params, matcher=None) for row in rows()])
    assert together[::2] == free[::2]
    for n in (1, 3, 5):
        assert together[n].token_id in b"xy"
        # Of the model's own distribution, whatever the schema forbids.
        total = torch.logsumexp(logits[n].double(), 0)
        assert together[n].logprob == pytest.approx(float(logits[n, together[n].token_id] - total), abs=1e-4)
        assert together[n].top == free[n].top


def test_an_answer_that_is_off_its_schema_ends_its_row_alone(grammars: Grammars):
    logits = torch.zeros(3, VOCAB)
    params = SamplingParams(json_schema=SCHEMA)
    rows = [SampleRow(params, 9, 1, (EOS_ID,), list(history), grammars.start(SCHEMA)) for history in (b"{", b"[", b"{")]
    first, second, third = sample(logits, rows)
    assert (second.token_id, second.error.reason) == (NO_TOKEN, "answer_off_schema")
    assert first == third != SampledToken(NO_TOKEN)
    assert type(second.error) is GenlockError


def test_a_schema_beyond_the_limits_is_the_callers_and_leaves_no_worn_lexer(grammars: Grammars):
    wide = json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}})
    with pytest.raises(InvalidInput) as caught:
        grammars.start(wide, list(b'{"'))
    assert (caught.value.reason, caught.value.field) == ("json_schema_too_complex", "sampling_params.json_schema")
    assert ("", wide) not in grammars._compiled
    assert len(caught.value.message) < 400


def test_few_grammars_are_kept(grammars: Grammars):
    small = Grammars(build_probe()[1], VOCAB, (EOS_ID,), kept=2)
    for n in range(5):
        small.start(json.dumps({"const": n}))
    small.start(json.dumps({"const": 3}))
    assert list(small._compiled) == [("", json.dumps({"const": n})) for n in (4, 3)]


async def test_what_a_tenant_has_compiled_is_compiled_again_for_another(grammars: Grammars, monkeypatch):
    """How soon an answer begins would tell else that somebody uses this schema."""
    compiled = []
    monkeypatch.setattr("model.grammar.compiled", lambda *args: compiled.append(args[0]) or real(*args))
    ticket = Ticket(b"t" * 16, "a", (1, 2), SamplingParams(json_schema='{"const": "secret"}'), "rev", "tok")
    for tenant, times in (("a", 1), ("a", 1), ("b", 2), ("a", 2), ("b", 2)):
        await matcher_for(replace(ticket, tenant=tenant), grammars)
        assert len(compiled) == times, tenant


async def test_tenants_take_turns_at_what_compiles(grammars: Grammars, monkeypatch):
    """One that brings many at a time keeps no other waiting but for the one under way."""
    order, first, go = [], threading.Event(), threading.Event()

    def slow(schema: str, *args):
        first.set()
        go.wait()
        order.append(schema)
        return real(schema, *args)

    monkeypatch.setattr("model.grammar.compiled", slow)

    def begun(tenant: str, number: int) -> asyncio.Task:
        sampling = SamplingParams(json_schema=json.dumps({"const": f"{tenant}{number}"}))
        return asyncio.create_task(matcher_for(Ticket(b"t" * 16, tenant, (1,), sampling, "rev", "tok"), grammars))

    tasks = [begun("many", number) for number in range(4)]
    await asyncio.to_thread(first.wait)
    tasks += [begun("one", 0), begun("gone", 0), begun("other", 0)]
    await asyncio.sleep(0)
    tasks.pop(5).cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks)
    assert [json.loads(schema)["const"] for schema in order] == ["many0", "one0", "other0", "many1", "many2", "many3"]


@pytest.mark.parametrize(
    "schema", ["", "{", "[]", "3", '{"type": 3}', '{"not": {}}', '{"enum": []}', '{"$ref": "#/x"}']
)
def test_what_is_no_schema(grammars: Grammars, schema: str):
    with pytest.raises(InvalidInput) as caught:
        grammars.start(schema)
    assert (caught.value.reason, caught.value.field) == ("bad_json_schema", "sampling_params.json_schema")
    reason, message = schema_check.problem(schema)
    assert (reason, message) == (caught.value.reason, caught.value.message)


def test_a_schema_that_can_be_followed_has_no_problem():
    assert schema_check.problem(SCHEMA) is None
    assert schema_check.problem(ANY) is None


def test_a_model_without_an_end_refuses():
    endless = Grammars(build_probe()[1], VOCAB, ())
    with pytest.raises(InvalidInput) as caught:
        endless.start(ANY)
    assert caught.value.reason == "json_schema_unsupported"


async def test_a_matcher_for_a_ticket(grammars: Grammars):
    plain = Ticket(b"t" * 16, "a", (1, 2, 3), SamplingParams(), "rev", "tok")
    bound = replace(plain, token_ids=(1, 2, *b'{"a'), sampling=SamplingParams(json_schema=SCHEMA), generated_tokens=3)
    before = threading.active_count()
    assert await matcher_for(plain, grammars) is None
    assert threading.active_count() == before, "text costs no thread"
    matcher = await matcher_for(bound, grammars)
    assert ids_of(matcher.allowed(bound.token_ids, 3)) == [ord('"')]
    with pytest.raises(InvalidInput) as caught:
        await matcher_for(bound, None)
    assert caught.value.reason == "json_schema_unsupported"


async def test_who_waits_when_the_worker_stops_is_cancelled():
    turns, first, go = TenantTurns("t"), threading.Event(), threading.Event()
    under_way = turns.submit("a", lambda: first.set() or go.wait())
    waiting = [turns.submit(tenant, lambda: 1) for tenant in "ab"]
    await asyncio.to_thread(first.wait)
    turns.close()
    go.set()
    assert await asyncio.wrap_future(under_way)
    assert [one.cancelled() for one in waiting] == [True, True]
    with pytest.raises(RuntimeError):
        turns.submit("a", lambda: 1)


def test_what_does_not_go_with_a_schema_at_a_worker():
    limits = {"context_tokens": 100, "prompt_tokens": 10, "vocab_size": VOCAB}
    params = SamplingParams(max_tokens=9, json_schema=ANY)
    validate(params, **limits)
    for name, changes in (
        ("json_schema", {"json_schema": "é" * 32769}),
        ("ignore_eos", {"ignore_eos": True}),
        ("min_tokens", {"min_tokens": 1}),
    ):
        with pytest.raises(InvalidInput) as caught:
            validate(replace(params, **changes), **limits)
        assert caught.value.field == f"sampling_params.{name}"
