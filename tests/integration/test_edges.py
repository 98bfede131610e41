"""The whole way of a request at its edges: each answer equals the oracle's, and every page comes back."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time

import pytest

from cluster.gateway.identity import BearerTenants, Caller
from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from genlock.v1 import inference_pb2 as pb
from kvstore.header import PageHeader
from kvstore.layout import HEADER_BYTES
from kvstore.lifecycle import SlotState
from model.probe import CONTEXT_TOKENS, EOS_ID
from model.runner import StepHooks
from model.sampling import SamplingParams
from tests.support.edge_lab import EdgeLab, Seen, cluster

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
LAG = 64


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@pytest.fixture
async def lab(subject: Subject):
    async with cluster(subject) as lab:
        yield lab


def require_answer(lab: EdgeLab, seen: Seen, prompt, index: int = 0, **params) -> None:
    assert seen.error is None
    wanted = [t.token_id for t in lab.wanted(prompt, **params)]
    assert seen.tokens(index) == wanted
    assert seen.text(index) == lab.text_of(wanted)
    assert seen.finished(index).usage.completion_tokens == len(wanted)


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 255, 256, 257, 600])
async def test_prompts_of_every_length(lab, tokens):
    prompt = lab.subject.prompt(f"of {tokens}", tokens)
    seen = await lab.see(prompt, max_tokens=40, ignore_eos=True)
    require_answer(lab, seen, prompt, max_tokens=40, ignore_eos=True)
    assert seen.finished().usage.prompt_tokens == tokens
    assert seen.finished().verification.pages_received == -(-tokens // PAGE_TOKENS)


async def test_exactly_the_context(subject):
    async with cluster(subject, cache__prefill_pages=200, cache__decode_pages=200) as lab:
        prompt = lab.subject.prompt("long", CONTEXT_TOKENS - 3)
        seen = await lab.see(prompt, max_tokens=3, ignore_eos=True)
        assert seen.error is None
        assert seen.tokens() == list(prompt[-LAG : -LAG + 3]), "the probe's answer, by its definition"
        over = await lab.see(prompt, max_tokens=4, ignore_eos=True)
        assert (over.error.status, over.error.field) == ("INVALID_ARGUMENT", "sampling_params.max_tokens")


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_shortest_answers(lab, max_tokens, stream):
    prompt = lab.subject.prompt("short", 70)
    seen = await lab.see(prompt, max_tokens=max_tokens, stream=stream)
    require_answer(lab, seen, prompt, max_tokens=max_tokens)
    assert seen.finished().finish_reason == LENGTH


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_ends_with_its_first_token_is_empty(lab, stream):
    prompt = (EOS_ID, *lab.subject.prompt("after eos", LAG - 1))
    seen = await lab.see(prompt, max_tokens=9, stream=stream)
    require_answer(lab, seen, prompt, max_tokens=9)
    assert (seen.text(), seen.tokens()) == ("", [EOS_ID])
    assert seen.finished().finish_reason == STOP
    assert lab.decode.engine.facts().steps == 0, "decode computes nothing for it"


async def test_the_first_token_that_ends_the_answer_does_not_wait_for_pages(lab):
    """Its pages hang; nobody needs them."""
    let_go = threading.Event()
    lab.hooks.each_pull = lambda start, orders: let_go.wait(30)
    try:
        prompt = lab.subject.prompt("one", 70)
        seen = await asyncio.wait_for(lab.see(prompt, max_tokens=1), 20)
        require_answer(lab, seen, prompt, max_tokens=1)
        assert seen.finished().verification.pages_received == 0
    finally:
        let_go.set()


async def test_the_lease_of_an_answer_that_has_ended_is_kept_while_its_pages_are_pulled(lab, monkeypatch):
    """Released under their pull, pages may move on before their tags are read: a healthy answer then counts as a failed
    check, which an alert is for."""
    engine, under_way = lab.decode.engine._receiver._engine, [0]
    read_tags = engine.read_tags

    def slow(peer, timeout_ms):
        under_way[0] += 1
        try:
            time.sleep(0.4)
            return read_tags(peer, timeout_ms)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(engine, "read_tags", slow)
    prompt = lab.subject.prompt("one", 40)
    seen = await asyncio.wait_for(lab.see(prompt, max_tokens=1), 20)
    require_answer(lab, seen, prompt, max_tokens=1)
    leases, held = lab.prefill.engine.core.leases, []
    while under_way[0]:
        held.append(len(leases))
        await asyncio.sleep(0.02)
    assert held, "the answer waited for its pages"
    assert set(held) == {1}
    async with asyncio.timeout(10):
        while len(leases):
            await asyncio.sleep(0.02)


async def test_ends_by_stop_token_min_tokens_and_ignored_eos(lab):
    prompt = list(lab.subject.prompt("ends", LAG))
    prompt[3] = prompt[9] = EOS_ID
    for params, count in (
        ({"max_tokens": 30}, 4),
        ({"max_tokens": 30, "ignore_eos": True}, 30),
        ({"max_tokens": 30, "stop_token_ids": (prompt[2],), "ignore_eos": True}, 3),
        ({"max_tokens": 30, "stop_token_ids": (prompt[0],)}, 1),
    ):
        seen = await lab.see(prompt, **params)
        assert seen.tokens() == prompt[:count]
        wanted = [t.token_id for t in lab.wanted(prompt, **params)]
        assert seen.tokens() == wanted
        assert seen.finished().finish_reason == (LENGTH if count == 30 else STOP)
    seen = await lab.see(prompt, max_tokens=30, min_tokens=6)
    assert seen.tokens() == [t.token_id for t in lab.wanted(prompt, max_tokens=30, min_tokens=6)]
    assert len(seen.tokens()) > 4


# --- several answers, several callers -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_three_answers_at_once_are_three_attempts_and_each_is_right(lab, stream):
    tickets: list[bytes] = []
    lab.hooks.each_event = lambda start, message: tickets.append(start.ticket.ticket_id) or [message]
    prompt = lab.subject.prompt("three", 70)
    seen = await lab.see(prompt, max_tokens=20, n=3, stream=stream, ignore_eos=True)
    for index in range(3):
        require_answer(lab, seen, prompt, index, max_tokens=20, ignore_eos=True)
    assert len(set(tickets)) == 3
    assert len({m.server_id for m in seen.messages}) == 1


async def test_one_label_twice_at_once_and_a_retry_while_the_first_runs(lab):
    """A client's label names nothing here: the requests do not meet."""
    one, two = lab.subject.prompt("label one", 70), lab.subject.prompt("label two", 70)
    asked = [(one, 200), (two, 200), (one, 200)]
    seen = await asyncio.gather(
        *(lab.see(prompt, max_tokens=most, request_id="same", ignore_eos=True) for prompt, most in asked)
    )
    for got, (prompt, most) in zip(seen, asked, strict=True):
        require_answer(lab, got, prompt, max_tokens=most, ignore_eos=True)
    assert len({m.server_id for got in seen for m in got.messages}) == 3


async def test_tenants_share_no_page(lab):
    tokens = {"a": "tenant-a", "b": "tenant-b"}
    lab.gateway.state.authenticator = BearerTenants(
        {hashlib.sha256(token.encode()).digest(): Caller(tenant) for token, tenant in tokens.items()}
    )
    prompt = lab.subject.prompt("shared", 5 * PAGE_TOKENS)

    async def cached(token: str) -> int:
        seen = await lab.see(prompt, max_tokens=8, ignore_eos=True, metadata=(("authorization", f"Bearer {token}"),))
        require_answer(lab, seen, prompt, max_tokens=8, ignore_eos=True)
        return seen.finished().usage.cached_tokens

    assert await cached("a") == 0
    assert await cached("b") == 0
    assert await cached("a") == 4 * PAGE_TOKENS
    assert await cached("b") == 4 * PAGE_TOKENS


@pytest.mark.parametrize("hits", range(6))
async def test_an_answer_from_the_cache_equals_a_cold_one(lab, hits):
    prompt = lab.subject.prompt("cache", 5 * PAGE_TOKENS + 3)
    if hits:
        await lab.see(prompt[: hits * PAGE_TOKENS + 1], max_tokens=1)
    seen = await lab.see(prompt, max_tokens=70, ignore_eos=True)
    require_answer(lab, seen, prompt, max_tokens=70, ignore_eos=True)
    assert seen.finished().usage.cached_tokens == hits * PAGE_TOKENS


# --- text -----------------------------------------------------------------------------------------------------------


def prompt_that_answers(text: str) -> str:
    """The probe repeats the last LAG bytes of its prompt, so its answer begins with these."""
    raw = text.encode()
    assert len(raw) <= LAG
    return text + "." * (LAG - len(raw))


def cut_at(text: str, stops) -> tuple[str, str]:
    """Reference: the match that ends first, and of those the one that begins first."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return text, ""
    _, begin, stop = min(found)
    return text[:begin], stop


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_around_the_change_from_prefill_to_decode(lab, stream):
    """The first token is prefill's, the second decode's: stops of 1 to 12 characters begin at each of the first."""
    text = "abcdefghijklmnopqrstuvwxyz"
    prompt = prompt_that_answers(text)
    cases = [(text[begin : begin + size],) for size in range(1, 13) for begin in (0, 1, 2)]
    cases += [("ab", "abc"), ("abc", "b"), ("bcd", "abcde"), ("cd", "de"), ("zz", "yz"), ("abd", "bc"), ("aa", "a")]
    answer = lab.text_of([t.token_id for t in lab.wanted(prompt, max_tokens=40)])

    async def one(stops) -> None:
        seen = await lab.see(prompt, max_tokens=40, stop=stops, stream=stream)
        assert seen.error is None
        text, stop = cut_at(answer, stops)
        assert (seen.text(), seen.finished().matched_stop) == (text, stop), stops
        assert seen.finished().finish_reason == (STOP if stop else LENGTH)

    for at in range(0, len(cases), 6):
        await asyncio.gather(*(one(stops) for stops in cases[at : at + 6]))


async def test_an_answer_that_a_stop_string_ended_tells_what_its_handoff_cost(lab):
    """Decode does not finish it; what was known at its beginning is told all the same, and counted."""
    prompt = lab.subject.prompt("twice", 70)
    whole = await lab.see(prompt, max_tokens=8)
    stop = whole.text()[4:5]
    seen = await lab.see(prompt, max_tokens=40, ignore_eos=True, stop=[stop])
    last = seen.finished()
    assert last.matched_stop == stop
    assert last.usage.cached_tokens == 64, "the first request's full pages"
    assert last.timings.prefill_ms > 0
    metrics = lab.gateway.state.metrics
    assert metrics._times["prefill"]._sum.get() > 0
    for name in ("queue", "prefill", "transfer"):
        assert sum(bucket.get() for bucket in metrics._times[name]._buckets) == 2


SCRIPTS = ("😀é漢字🇩🇪👩‍👩‍👧x", "漢😀", "é" * 12, "🧪" * 8)


@pytest.mark.parametrize("text", SCRIPTS)
async def test_characters_of_many_tokens_are_never_cut(lab, text):
    """Answers of every length end between any two bytes; the joined stream is the unary text."""
    prompt = prompt_that_answers(text)
    size = len(text.encode())

    async def one(count: int) -> None:
        streamed, whole = await asyncio.gather(
            *(lab.see(prompt, max_tokens=count, stream=stream) for stream in (True, False))
        )
        raw = text.encode()[:count] + b"." * max(0, count - size)
        assert streamed.text() == whole.text()
        assert whole.tokens() == streamed.tokens() == list(raw)
        stream = lab.subject.tokenizer.stream()
        assert whole.text() == "".join(map(stream.push, raw)) + stream.finish()
        full = raw.decode("utf-8", "ignore")
        assert whole.text().startswith(full)
        assert set(whole.text()[len(full) :]) <= {"\ufffd"}

    counts = range(1, size + 2)
    for at in range(0, len(counts), 4):
        await asyncio.gather(*(one(count) for count in counts[at : at + 4]))


@pytest.mark.parametrize("logprobs", [0, 1, 5])
@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_are_the_oracles_from_the_first_token_on(lab, logprobs, stream):
    prompt = lab.subject.prompt("logprobs", 70)
    params = {"max_tokens": 12, "ignore_eos": True, "logprobs": logprobs}
    seen = await lab.see(prompt, stream=stream, **params)
    wanted = lab.wanted(prompt, **params)
    entries = seen.logprobs()
    assert len(entries) == len(seen.tokens()) == 12
    for entry, token in zip(entries, wanted, strict=True):
        assert entry.token_id == token.token_id
        assert entry.logprob == pytest.approx(token.logprob, abs=1e-5)
        assert [t.token_id for t in entry.top] == [t for t, _ in token.top]
        assert [t.logprob for t in entry.top] == pytest.approx([lp for _, lp in token.top], abs=1e-5, rel=1e-6)
        assert len(entry.top) == logprobs


async def test_no_logprobs_unless_asked(lab):
    seen = await lab.see(lab.subject.prompt("none", 70), max_tokens=5)
    assert seen.logprobs() == []


async def test_sampled_answers_follow_from_the_seed_alone(lab):
    prompt = lab.subject.prompt("sampled", 70)
    params = {"max_tokens": 30, "temperature": 5.0, "ignore_eos": True}
    first, again, other = [await lab.see(prompt, seed=seed, **params) for seed in (7, 7, 8)]
    require_answer(lab, first, prompt, seed=7, **params)
    assert again.tokens() == first.tokens()
    assert other.error is None
    biggest = await lab.see(prompt, seed=(1 << 64) - 1, **params)
    require_answer(lab, biggest, prompt, seed=(1 << 64) - 1, **params)


# --- prefill and decode apart equal one process ---------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 300])
async def test_received_pages_are_the_oracles_byte_for_byte(lab, tokens):
    """Header apart: it carries the pool's own tag."""
    prompt = lab.subject.prompt(f"bytes {tokens}", tokens)
    seen = await require_same_bytes(lab, prompt, max_tokens=2, ignore_eos=True)
    require_answer(lab, seen, prompt, max_tokens=2, ignore_eos=True)


async def require_same_bytes(lab: EdgeLab, prompt, **params) -> Seen:
    """Asks, and compares what decode received with what the oracle computed."""
    received: list[bytes] = []
    headers: list[PageHeader | None] = []

    def look() -> bool:
        number, refs = lab.decode_pages(prompt)
        if number and not received:
            guard = lab.decode.guard
            received.extend(bytes(guard._pool.slots_SU8[r.page_id]) for r in refs)
            headers.extend(guard.landed_header(r) for r in refs)
        return True

    lab.hooks.before_decode_plan = look
    seen = await lab.see(prompt, **params)
    oracle = lab.subject.oracle
    wanted: list[bytes] = []

    def keep(plan) -> None:
        [row] = plan.rows
        if row.context_len == len(prompt):
            wanted.extend(bytes(oracle._guard._pool.slots_SU8[r.page_id]) for r in row.pages.refs)

    runner = oracle._runner
    before, runner._hooks = runner._hooks, StepHooks(before_exit=keep)
    try:
        oracle.answer(prompt, SamplingParams(max_tokens=1))
    finally:
        runner._hooks = before
    assert len(received) == len(wanted) == -(-len(prompt) // PAGE_TOKENS)
    for index, (ours, theirs, header) in enumerate(zip(received, wanted, headers, strict=True)):
        assert ours[HEADER_BYTES:] == theirs[HEADER_BYTES:], f"page {index}"
        assert header is not None
        assert header.first_position == index * PAGE_TOKENS
    return seen


@pytest.fixture(scope="module")
def real() -> Subject:
    return load_subject("smollm2")


@pytest.mark.slow
async def test_the_real_model_apart_equals_the_real_model_in_one_process(real):
    """Bytes of every page, tokens and log-probabilities."""
    async with cluster(real) as lab:
        prompt = lab.subject.prompt("a real one", 100)
        params = {"max_tokens": 12, "logprobs": 3}
        seen = await require_same_bytes(lab, prompt, **params)
        wanted = lab.wanted(prompt, **params)
        assert seen.tokens() == [t.token_id for t in wanted]
        assert [e.logprob for e in seen.logprobs()] == pytest.approx([t.logprob for t in wanted], abs=1e-4)
        assert seen.text() == lab.text_of(seen.tokens())


# --- a tiny pool ----------------------------------------------------------------------------------------------------


async def test_preempted_requests_are_all_right(subject):
    async with cluster(subject, cache__decode_pages=18) as lab:
        prompts = [lab.subject.prompt(f"crowd {i}", 70) for i in range(4)]
        seen = await asyncio.gather(*(lab.see(p, max_tokens=80, ignore_eos=True) for p in prompts))
        for got, prompt in zip(seen, prompts, strict=True):
            require_answer(lab, got, prompt, max_tokens=80, ignore_eos=True)
        assert lab.decode.engine.facts().outcomes["preempted"] > 0
        assert all(s.finished().usage.cached_tokens <= 70 for s in seen)


async def test_a_prompt_that_no_pool_can_hold_is_refused_before_any_work(subject):
    async with cluster(subject, cache__decode_pages=4) as lab:
        seen = await lab.see(lab.subject.prompt("big", 70), max_tokens=4)
        assert (seen.error.status, seen.error.reason) == ("RESOURCE_EXHAUSTED", "prompt_over_pool")
        assert lab.prefill.engine.facts().steps == 0
        small = lab.subject.prompt("small", 20)
        require_answer(lab, await lab.see(small, max_tokens=4), small, max_tokens=4)


async def test_sealed_pages_of_an_answer_are_closed(lab):
    """A long answer: pages that decode filled itself are sealed, only the last one is open."""
    prompt = lab.subject.prompt("sealing", 70)
    seen_states: list[list[SlotState]] = []

    def look() -> bool:
        number, refs = lab.decode_pages(prompt)
        if number:
            seen_states.append([lab.decode.guard.slot_state(r.page_id) for r in refs])
        return True

    lab.hooks.before_decode_plan = look
    await lab.see(prompt, max_tokens=60, ignore_eos=True)
    assert max(len(states) for states in seen_states) >= 8
    for states in seen_states:
        assert set(states[:-1]) == {SlotState.SEALED}
