"""The load and the figures of `genlock bench serve`: arrivals, shapes, percentiles, adding up, the stop-watch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

import pytest

from bench.drive import Chunk, Limits, OpenAiSystem, drive, place_of
from bench.load import (
    Ask,
    Percentiles,
    Sample,
    ServerTimes,
    Shape,
    Spread,
    add_up,
    arrivals_s,
    make_asks,
    percentiles,
    ttft_ratio,
)
from bench.serve import remarks
from kvstore.errors import DeadlineExceeded, InvalidInput, NoCapacity, Unavailable

SHAPE = Shape(4, 2.0, Spread(8, 8), Spread(3, 3))


def ask(number: int, at_s: float = 0.0, answer_tokens: int = 3) -> Ask:
    return Ask(number, at_s, tuple(range(8)), answer_tokens)


# --- arrivals and shapes --------------------------------------------------------------------------------------------


def test_arrivals_are_a_poisson_process():
    rate = 5.0
    times = arrivals_s(20_000, rate, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0.0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / rate, rel=0.03)
    # Exponential gaps: the standard deviation is the mean, and 1/e of them are longer than it.
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(g > mean for g in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)
    # Counts in windows of one second: variance equals mean.
    counts = [0] * int(times[-1])
    for at_s in times:
        if int(at_s) < len(counts):
            counts[int(at_s)] += 1
    average = sum(counts) / len(counts)
    assert sum((c - average) ** 2 for c in counts) / len(counts) == pytest.approx(average, rel=0.1)


def test_a_seed_gives_one_load_and_another_seed_another():
    shape = Shape(20, 2.0, Spread(4, 40), Spread(1, 9), 0.5, seed=1)
    asks = make_asks(shape, 1000)
    assert asks == make_asks(shape, 1000)
    other = make_asks(Shape(20, 2.0, Spread(4, 40), Spread(1, 9), 0.5, seed=2), 1000)
    assert [a.at_s for a in asks] != [a.at_s for a in other]
    assert asks[0].token_ids[:2] != other[0].token_ids[:2]


def test_lengths_fill_their_spread_and_ids_keep_clear_of_the_ends():
    asks = make_asks(Shape(400, 2.0, Spread(4, 9), Spread(2, 5)), 260)
    assert {len(a.token_ids) for a in asks} == set(range(4, 10))
    assert {a.answer_tokens for a in asks} == {2, 3, 4, 5}
    ids = {t for a in asks for t in a.token_ids}
    assert min(ids) >= 260 // 8
    assert max(ids) < 260 - 260 // 8


@pytest.mark.parametrize(("part", "shared"), [(0.0, 0), (0.25, 10), (1.0, 40)])
def test_prompts_share_the_part_that_was_asked_for(part: float, shared: int):
    first, second, *_ = make_asks(Shape(8, 2.0, Spread(40, 40), Spread(1, 1), part), 30_000)
    same = [a == b for a, b in zip(first.token_ids, second.token_ids, strict=True)]
    assert all(same[:shared])
    assert sum(same[shared:]) == 0


@pytest.mark.parametrize("text", ["", "0", "9:3", "a:b", "5:", "-1:3", "1:2:3", "99999999"])
def test_a_bad_spread_is_refused(text: str):
    with pytest.raises(InvalidInput) as caught:
        Spread.parse(text, "--prompt-tokens")
    assert caught.value.field == "--prompt-tokens"


def test_spreads_read():
    assert Spread.parse("64:512", "f") == Spread(64, 512)
    assert Spread.parse("32", "f") == Spread(32, 32)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("requests", (0, 1.0, 0.0)),
        ("requests", (10**9, 1.0, 0.0)),
        ("rate", (1, 0.0, 0.0)),
        ("rate", (1, float("nan"), 0.0)),
        ("rate", (1, float("inf"), 0.0)),
        ("shared_prefix", (1, 1.0, 1.5)),
        ("shared_prefix", (1, 1.0, float("nan"))),
    ],
)
def test_a_bad_shape_names_its_field(field: str, values: tuple[int, float, float]):
    with pytest.raises(InvalidInput) as caught:
        Shape(values[0], values[1], Spread(1, 1), Spread(1, 1), values[2])
    assert caught.value.field == field


# --- percentiles and adding up --------------------------------------------------------------------------------------


def test_percentiles_interpolate():
    assert percentiles(list(range(101))) == Percentiles(50.0, 90.0, 99.0)
    assert percentiles([1.0, 2.0]) == Percentiles(1.5, 1.9, 1.99)
    assert percentiles([7.0]) == Percentiles(7.0, 7.0, 7.0)
    assert percentiles([]) is None


def answered(number: int, at_s: float, sent_s: float, server: ServerTimes | None = None) -> Sample:
    """First token 0.5 s after the sending, then two more, 0.1 s and 0.3 s later."""
    first_s = sent_s + 0.5
    return Sample(ask(number, at_s), sent_s, first_s, first_s + 0.4, first_s + 0.4, 3, (0.1, 0.3), "", server)


def test_every_request_is_counted_once():
    samples = [
        answered(0, 0.0, 0.0),
        Sample(ask(1, 1.0), 1.0, None, None, 1.2, 0, (), "decode_full"),
        Sample(ask(2, 2.0), 2.0, 2.1, 2.2, 3.0, 2, (0.1,), "stream_cut"),
        Sample(ask(3, 3.0)),
    ]
    row = add_up("x", SHAPE, samples)
    assert (row.requests, row.sent, row.ok, row.errors) == (4, 3, 1, {"decode_full": 1, "stream_cut": 1})
    assert row.ok + sum(row.errors.values()) == row.sent
    # Only what was answered whole counts as throughput and as latency; time runs until the last end.
    assert row.seconds == 3.0
    assert row.tokens_per_s == 1.0
    assert row.prompt_tokens_per_s == pytest.approx(8 / 3, abs=1e-3)
    assert row.ttft_ms == Percentiles(500.0, 500.0, 500.0)
    assert any("1 of 4 requests were not sent" in line for line in remarks([row]))


def test_latency_counts_from_the_arrival_not_from_the_sending():
    row = add_up("x", SHAPE, [answered(0, 0.0, 2.0)])
    assert row.late_ms == Percentiles(2000.0, 2000.0, 2000.0)
    assert row.ttft_ms == Percentiles(2500.0, 2500.0, 2500.0)
    assert row.total_ms == Percentiles(2900.0, 2900.0, 2900.0)
    assert row.per_token_ms == Percentiles(200.0, 200.0, 200.0)
    assert row.gap_ms is not None
    assert row.gap_ms.p50 == 200.0
    assert any("waited at the client" in line for line in remarks([row]))


def test_the_phases_of_the_first_token_add_up():
    times = ServerTimes(10.0, 200.0, 30.0, 260.0, 700.0, cached_tokens=32)
    row = add_up("x", SHAPE, [answered(0, 0.0, 0.0, times), answered(1, 1.0, 1.0, times)])
    phases = (row.queue_ms, row.prefill_ms, row.transfer_ms, row.rest_ms)
    assert sum(p.p50 for p in phases if p is not None) == times.first_token_ms
    assert row.decode_ms == Percentiles(440.0, 440.0, 440.0)
    assert row.cached_tokens == 64


def test_the_servers_time_is_held_against_the_stop_watch_from_the_sending():
    def one(number: int, server_ms: float) -> Sample:
        return answered(number, 0.0, 3.0, ServerTimes(0.0, 0.0, 0.0, server_ms, server_ms))

    samples = [one(0, 490.0), one(1, 480.0), one(2, 5.0)]
    assert ttft_ratio(samples) == 0.96
    assert ttft_ratio([answered(0, 0.0, 0.0)]) is None
    assert not any("of the client's" in line for line in remarks([add_up("x", SHAPE, samples)]))
    for wrong_ms in (250.0, 600.0):
        row = add_up("x", SHAPE, [one(0, wrong_ms)])
        assert any("of the client's" in line for line in remarks([row]))


def test_nothing_measured_is_no_figure():
    assert not Sample(ask(0)).ok
    row = add_up("x", SHAPE, [Sample(ask(0))])
    assert (row.sent, row.ok, row.errors, row.tokens_per_s) == (0, 0, {}, 0.0)
    assert row.ttft_ms is None
    assert row.server_ttft_ratio is None


# --- the driver -----------------------------------------------------------------------------------------------------


class Scripted:
    """Answers with three chunks; what it does with a request depends on the number."""

    def __init__(self, errors: dict[int, Exception] | None = None, hang: frozenset[int] = frozenset()) -> None:
        self.errors = errors or {}
        self.hang = hang
        self.running = self.most = 0
        self.closed: list[int] = []

    async def ask(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Chunk, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield Chunk(1)
            await asyncio.sleep(0.001)
            if ask.number in self.hang:
                await asyncio.sleep(3600)
            if ask.number in self.errors:
                raise self.errors[ask.number]
            yield Chunk(2, ServerTimes(0, 0, 0, 1, 2), 3)
        finally:
            self.running -= 1
            self.closed.append(ask.number)


async def test_all_requests_get_a_sample_with_their_outcome():
    system = Scripted({1: NoCapacity("decode_full"), 2: DeadlineExceeded("deadline_exceeded")})
    samples: list[Sample] = []
    await drive(system, [ask(n) for n in range(6)], Limits(), samples)
    by_number = {s.ask.number: s for s in samples}
    assert len(samples) == 6
    assert [by_number[n].error for n in range(6)] == ["", "decode_full", "deadline_exceeded", "", "", ""]
    assert all(s.tokens == 3 and s.server is not None and len(s.gaps_s) == 1 for s in samples if s.ok)


async def test_the_concurrency_limit_holds_and_is_reached():
    system = Scripted()
    await drive(system, [ask(n) for n in range(20)], Limits(concurrency=3), [])
    assert system.most == 3


async def test_arrivals_do_not_wait_for_answers():
    system = Scripted(hang=frozenset({0}))
    samples: list[Sample] = []
    await drive(system, [ask(0), ask(1, 0.01), ask(2, 0.02)], Limits(run_s=0.3), samples)
    assert {s.ask.number: s.error for s in samples} == {0: "run_time_limit", 1: "", 2: ""}


async def test_the_time_limit_ends_the_run_and_counts_everyone():
    system = Scripted(hang=frozenset({0, 1}))
    samples: list[Sample] = []
    asks = [ask(0), ask(1), ask(2), ask(3, 1000.0)]
    await drive(system, asks, Limits(concurrency=2, run_s=0.1), samples)
    row = add_up("x", SHAPE, samples)
    assert sorted(system.closed) == [0, 1]
    # The third waited for a place and the fourth for its arrival: not sent.
    assert (len(samples), row.sent, row.ok, row.errors) == (4, 2, 0, {"run_time_limit": 2})


async def test_a_cancelled_run_keeps_its_samples_and_leaves_nothing_running():
    system = Scripted(hang=frozenset({1}))
    samples: list[Sample] = []
    task = asyncio.create_task(drive(system, [ask(0), ask(1), ask(2, 1000.0)], Limits(), samples))
    while not samples:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert system.running == 0
    row = add_up("x", SHAPE, samples)
    assert (len(samples), row.sent, row.ok, row.errors) == (3, 2, 1, {"interrupted": 1})


async def test_an_answer_without_tokens_is_an_error():
    class Silent:
        async def ask(self, ask: Ask, timeout_s: float) -> AsyncGenerator[Chunk, None]:
            yield Chunk(0)

    samples: list[Sample] = []
    await drive(Silent(), [ask(0)], Limits(), samples)
    assert samples[0].error == "empty_answer"


# --- OpenAI-compatible peers ----------------------------------------------------------------------------------------

EVENTS = (
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n',
    b": a remark\n\n",
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":4}}\n\n',
    b"data: [DONE]\n\n",
)


async def peer(answer: bytes, chunk_bytes: int | None, status: bytes = b"200 OK") -> tuple[asyncio.Server, str, list]:
    """A server that answers every request with `answer`, chunked or until the end of the connection."""
    seen: list[tuple[bytes, bytes]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        seen.append((head, await reader.readexactly(length)))
        body = b'{"data":[{"id":"tiny"}]}' if head.startswith(b"GET") else answer
        writer.write(b"HTTP/1.1 " + status + b"\r\n")
        if chunk_bytes:
            pieces = [body[i : i + chunk_bytes] for i in range(0, len(body), chunk_bytes)]
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            for piece in [*pieces, b""]:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        else:
            writer.write(b"\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen


@pytest.mark.parametrize("chunk_bytes", [None, 1, 7, 4096])
async def test_a_compatible_server_is_asked_and_its_events_are_tokens(chunk_bytes: int | None):
    server, url, seen = await peer(b"".join(EVENTS), chunk_bytes)
    async with server:
        system = await OpenAiSystem.find(url, "secret")
        samples: list[Sample] = []
        await drive(system, [ask(5)], Limits(request_s=5), samples)
    assert system.model == "tiny"
    # Three messages with text; the server's own count says that one of them brought two tokens.
    assert (samples[0].error, samples[0].tokens, len(samples[0].gaps_s)) == ("", 4, 2)
    (get, _), (post, body) = seen
    assert get.startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert post.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in post
    assert b'"prompt": [0, 1, 2, 3, 4, 5, 6, 7], "max_tokens": 3, "stream": true' in body


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (EVENTS[0], b"200 OK", "stream_cut"),
        (b"data: {oops\n\n", b"200 OK", "peer_protocol"),
        (b'data: {"error": {"message": "no"}}\n\n', b"200 OK", "peer_error"),
        (b"", b"503 Busy", "http_503"),
    ],
)
async def test_what_a_compatible_server_does_wrong_has_a_reason(answer: bytes, status: bytes, reason: str):
    server, url, _ = await peer(answer, 16, status)
    async with server:
        samples: list[Sample] = []
        await drive(OpenAiSystem(url, "tiny"), [ask(0)], Limits(request_s=5), samples)
    assert samples[0].error == reason


async def test_a_silent_server_meets_the_deadline_and_no_server_is_unavailable():
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    samples: list[Sample] = []
    async with server:
        await drive(OpenAiSystem(url, "tiny"), [ask(0)], Limits(request_s=0.05), samples)
    assert samples[0].error == "deadline_exceeded"
    with pytest.raises(Unavailable):
        await OpenAiSystem.find(url)


async def test_a_url_that_is_none_is_bad_input():
    with pytest.raises(InvalidInput):
        await OpenAiSystem.find("ftp://host/v1")
    assert place_of("http://user:password@host:80/v1") == "host:80"
