"""Many requests over one call: the gateway's half, and both halves together over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.sessions import NUMBERS_SEED_BYTES, DecodeSession, Token, call_numbers
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, NoCapacity, StalePage, Unavailable
from model.sampler import SampledToken
from tests.support.decode_calls import told
from wire.errors import from_status
from wire.session import Handle, Session


def request(max_tokens: int = 9) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(ticket=worker_pb2.Ticket(sampling=worker_pb2.Sampling(max_tokens=max_tokens)))


async def until(ready) -> None:
    async with asyncio.timeout(5):
        while not ready():
            await asyncio.sleep(0)


MANY = worker_pb2.Sampling(max_tokens=500)


class Scripted:
    """A stream that gives what a test puts."""

    def __init__(self) -> None:
        self.sent: list[worker_pb2.DecodeCommand] = []
        self.events: asyncio.Queue[worker_pb2.DecodeEvents | None] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.connected.set()

    def say(self, call_nos=(), token_ids=(), events=()) -> None:
        self.events.put_nowait(worker_pb2.DecodeEvents(call_nos=call_nos, token_ids=token_ids, events=events))

    async def wait_for_connection(self) -> None:
        await self.connected.wait()

    async def write(self, command) -> None:
        self.sent.append(command)

    def cancel(self) -> bool:
        return True

    async def __aiter__(self):
        while (events := await self.events.get()) is not None:
            yield events


def finished(call_no: int, count: int) -> worker_pb2.DecodeEvent:
    return worker_pb2.DecodeEvent(call_no=call_no, finished=worker_pb2.DecodeFinished(completion_tokens=count))


async def test_tokens_reach_the_request_whose_number_they_carry_and_nobody_else():
    stream = Scripted()
    session = DecodeSession(lambda: stream, itertools.count(5))
    one, two = (session.submit(request()) for _ in range(2))
    stream.say([5, 6, 5, 77], [1, 2, 3, 4], [finished(77, 1), finished(5, 2)])
    stream.say([5, 6], [9, 9], [finished(6, 2), finished(5, 9)])
    assert (await told(one, 5), await told(two, 5)) == (([1, 3], None), ([2, 9], None))
    assert len(session) == 0
    await session.close()


@given(st.binary(min_size=NUMBERS_SEED_BYTES, max_size=NUMBERS_SEED_BYTES))
def test_numbers_of_a_session_never_come_again_and_lie_apart(seed: bytes):
    numbers = list(itertools.islice(call_numbers(seed), 1000))
    assert len(set(numbers)) == 1000
    assert all(0 <= number < 1 << 64 for number in numbers)
    # Of any sequence of this kind: the stride has no factor in common with 2^64, so it comes back after all of them.
    assert (numbers[1] - numbers[0]) % 2 == 1


async def test_a_number_is_not_used_again_when_its_request_has_gone():
    """The worker may still tell of the first: its end is on its way."""
    stream = Scripted()
    session = DecodeSession(lambda: stream, call_numbers(bytes(NUMBERS_SEED_BYTES)))
    first = session.submit(request())
    await until(lambda: stream.sent)
    first.cancel()
    second = session.submit(request())
    stream.say([first.call_no], [111], [finished(first.call_no, 1)])
    stream.say([second.call_no], [5], [finished(second.call_no, 1)])
    assert await told(second, 5) == ([5], None)
    await session.close()


async def test_a_request_that_was_cancelled_hears_nothing_more_and_the_worker_hears_of_it_once():
    stream = Scripted()
    session = DecodeSession(lambda: stream, itertools.count(5))
    call = session.submit(request())
    waiting = asyncio.create_task(told(call, 5))
    await until(lambda: stream.sent)
    call.cancel()
    call.cancel()
    tokens, error = await waiting
    assert (tokens, error.reason) == ([], "cancelled")
    stream.say([5], [1], [finished(5, 1)])
    await until(lambda: len(stream.sent) == 2)
    await asyncio.sleep(0)
    assert [command.WhichOneof("command") for command in stream.sent] == ["submit", "cancel"]
    await session.close()


async def test_a_question_is_answered_by_its_own_request_and_a_refusal_or_a_surprise_ends_no_other():
    stream, asked = Scripted(), []

    def name(attempt: int) -> worker_pb2.PrefillAssigned:
        asked.append(attempt)
        return worker_pb2.PrefillAssigned(attempt=attempt, prefill_endpoint="there", prefill_worker="prefill-1")

    def refuse(_attempt: int) -> worker_pb2.PrefillAssigned:
        raise Unavailable("no_prefill_worker", "nobody is ready")

    def break_down(_attempt: int) -> worker_pb2.PrefillAssigned:
        raise ValueError("secret")

    session = DecodeSession(lambda: stream, itertools.count(1))
    for assign in (name, refuse, break_down, None):
        session.submit(request(), assign)
    await until(lambda: len(stream.sent) == 4)
    wanted = [
        worker_pb2.DecodeEvent(call_no=number, prefill_wanted=worker_pb2.PrefillWanted(attempt=9))
        for number in (1, 2, 3, 4, 77)
    ]
    stream.say([1], [5], wanted)
    await until(lambda: len(stream.sent) == 8)
    answers = {command.call_no: command.assign for command in stream.sent[4:]}
    assert answers[1].prefill_worker == "prefill-1"
    assert {answer.attempt for answer in answers.values()} == {9}
    assert [from_status(answers[number].refused).reason for number in (2, 3, 4)] == [
        "no_prefill_worker", "internal", "prefill_not_assigned",
    ]  # fmt: skip
    assert "secret" not in answers[3].refused.message
    assert asked == [9]
    assert len(session) == 4, "the worker ends them"
    await session.close()


async def test_a_question_of_a_cancelled_request_is_not_answered():
    stream = Scripted()
    stream.connected.clear()
    session = DecodeSession(lambda: stream, itertools.count(5))
    call = session.submit(request(), lambda attempt: worker_pb2.PrefillAssigned(attempt=attempt))
    session.submit(request())
    stream.say(events=[worker_pb2.DecodeEvent(call_no=5, prefill_wanted=worker_pb2.PrefillWanted(attempt=1))])
    for _ in range(5):
        await asyncio.sleep(0)
    call.cancel()
    stream.connected.set()
    await until(lambda: stream.sent)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(command.call_no, command.WhichOneof("command")) for command in stream.sent] == [(6, "submit")]
    await session.close()


async def test_a_request_that_is_cancelled_before_it_was_sent_is_not_sent():
    stream = Scripted()
    stream.connected.clear()
    session = DecodeSession(lambda: stream, itertools.count(5))
    calls = [session.submit(request()) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    calls[0].cancel()
    stream.connected.set()
    await until(lambda: stream.sent)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(command.call_no, command.WhichOneof("command")) for command in stream.sent] == [(6, "submit")]
    await session.close()


async def test_what_a_worker_that_stops_has_told_nothing_of_was_turned_away():
    stream = Scripted()
    session = DecodeSession(lambda: stream, itertools.count(1))
    calls = [session.submit(request()) for _ in range(4)]
    started = worker_pb2.DecodeEvent(call_no=2, started=worker_pb2.DecodeStarted())
    stream.say([1], [7], [started])
    stream.events.put_nowait(None)
    ended = [await told(call, 5) for call in calls]
    assert [error.reason for _tokens, error in ended] == ["stream_cut", "stream_cut", "draining", "draining"]
    assert ended[2][1] is not ended[3][1]
    assert session.over
    assert not len(session)
    await session.close()


async def test_what_was_on_its_way_to_a_worker_that_is_lost_is_not_taken_for_turned_away():
    class Lost(Scripted):
        async def __aiter__(self):
            raise Unavailable("peer_unreachable", "gone")
            yield

    session = DecodeSession(Lost, itertools.count(1))
    call = session.submit(request())
    _tokens, error = await told(call, 5)
    assert error.reason == "peer_unreachable"
    await session.close()


@pytest.mark.parametrize("how", ["end", "lists", "kind", "error", "close", "close at once"])
async def test_the_end_of_a_session_ends_every_request_typed(how: str):
    stream = Scripted()
    session = DecodeSession(lambda: stream, itertools.count(1))
    calls = [session.submit(request()) for _ in range(2)]
    if how == "close at once":
        await session.close()
    stream.say([1, 2], [7, 8])
    if how == "end":
        stream.events.put_nowait(None)
    elif how == "lists":
        stream.say([1, 2], [7])
    elif how == "kind":
        stream.say(events=[worker_pb2.DecodeEvent(call_no=number) for number in (1, 2)])
    elif how == "error":
        status = worker_pb2.DecodeEvent(call_no=1)
        status.failed.code = 13
        stream.say(events=[status, worker_pb2.DecodeEvent(call_no=2, failed=status.failed)])
    elif how == "close":
        await until(stream.events.empty)
        await session.close()
    ended = [await told(call, 5) for call in calls]
    reasons = {"lists": "stream_protocol", "kind": "stream_protocol", "error": "peer_internal"}
    assert [error.reason for _tokens, error in ended] == [reasons.get(how, "stream_cut")] * 2
    assert ended[0][1] is not ended[1][1]
    if how != "close at once":
        assert [tokens for tokens, _error in ended] == [[7], [8]], "what came before is told"
    assert session.over is (how not in ("kind", "error"))
    await session.close()


async def test_what_gathers_leaves_as_one_with_log_probabilities():
    stream = Scripted()
    session = DecodeSession(lambda: stream, itertools.count(5))
    call = session.submit(request())
    event = worker_pb2.DecodeEvent(call_no=5)
    event.tokens.tokens.add(token_id=3, logprob=-0.5, top=[worker_pb2.SampledLogprob(token_id=3, logprob=-0.5)])
    stream.say([5, 5], [1, 2], [event])
    await until(stream.events.empty)
    await asyncio.sleep(0)
    tokens, end = await call.next()
    assert end is None
    assert tokens[:2] == [Token(1), Token(2)]
    assert (tokens[2].token_id, tokens[2].logprob, tokens[2].top[0].token_id) == (3, -0.5, 3)
    await session.close()


@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_worker_that_tells_more_than_was_asked_for_fills_no_memory_and_is_told_to_stop(logprobs: bool):
    stream = Scripted()
    session = DecodeSession(lambda: stream, itertools.count(5))
    call, other = session.submit(request(3)), session.submit(request(3))
    await until(lambda: len(stream.sent) == 2)
    event = worker_pb2.DecodeEvent(call_no=5)
    for at in range(1000 if logprobs else 0):
        event.tokens.tokens.add(token_id=at, logprob=-0.5)
    stream.say([5, 6] if logprobs else [5] * 1000 + [6], list(range(2 if logprobs else 1001)), [event])
    stream.say([6], [8], [finished(6, 2)])
    tokens, error = await told(call, 5)
    assert (len(tokens), error.reason) == (3, "stream_protocol")
    assert (await told(other, 5))[1] is None, "its neighbour goes on"
    await until(lambda: len(stream.sent) == 3)
    assert (stream.sent[2].call_no, stream.sent[2].WhichOneof("command")) == (5, "cancel")
    await session.close()


# --- both, over real gRPC ------------------------------------------------------------------------------------------


class Echo(worker_pb2_grpc.DecodeServiceServicer):
    """Answers a prompt with itself, a step apart; `left_ms` says after how many tokens it fails."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.sessions = 0

    async def Session(self, commands, context):
        self.sessions += 1
        await Session(self._start, context).run(commands)

    async def _start(self, request, tell):
        if len(request.ticket.token_ids) == 13:
            raise NoCapacity("no_pages", "full", retry_after_ms=70)
        task = asyncio.create_task(self._play(list(request.ticket.token_ids), request.left_ms, tell))

        def cancel() -> None:
            self.cancelled += 1
            task.cancel()

        return Handle(cancel, lambda _assigned: None)

    async def _play(self, tokens, fails_after, tell):
        for at, token in enumerate(tokens):
            if fails_after and at == fails_after:
                tell(StalePage("stale_tag", f"after {at}"))
                return
            tell(SampledToken(token))
            await asyncio.sleep(0.001 * (token % 3))
        tell(worker_pb2.DecodeFinished(completion_tokens=len(tokens)))


async def test_many_requests_share_a_call_and_each_gets_its_own():
    echo, rng = Echo(), random.Random(5)
    server = grpc.aio.server()
    worker_pb2_grpc.add_DecodeServiceServicer_to_server(echo, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    outcomes: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_pb2_grpc.DecodeServiceStub(channel)
        session = DecodeSession(lambda: stub.Session(None), call_numbers(rng.randbytes(NUMBERS_SEED_BYTES)))

        async def one(number: int) -> None:
            prompt = [1000 * number + at for at in range(rng.randrange(1, 30))]
            fails_after = rng.choice((0, 0, 4))
            ticket = worker_pb2.Ticket(token_ids=prompt, sampling=MANY)
            asked = worker_pb2.DecodeRequest(ticket=ticket, left_ms=fails_after)
            await asyncio.sleep(rng.random() * 0.02)
            call = session.submit(asked)
            if rng.random() < 0.2:
                await asyncio.sleep(0.002)
                call.cancel()
            tokens, error = await told(call, 20)
            assert tokens == prompt[: len(tokens)], "no token of another request"
            assert error is not None or tokens == prompt
            if isinstance(error, NoCapacity):
                assert error.retry_after_ms == 70
            outcomes["ok" if error is None else error.reason] += 1

        await asyncio.gather(*(one(number) for number in range(200)))
        assert echo.sessions == 1
        assert {"ok", "stale_tag", "no_pages", "cancelled"} == set(outcomes)
        last = session.submit(worker_pb2.DecodeRequest(ticket=worker_pb2.Ticket(token_ids=[5] * 500, sampling=MANY)))
        await last.next()
        await server.stop(0)
        _tokens, error = await told(last, 5)
        assert isinstance(error, GenlockError)
        assert session.over
        await session.close()
