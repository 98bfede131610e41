"""Many requests over one call: the worker's half, the gateway's half, and the two together over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.gateway.sessions import DecodeSession, Token
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import Cancelled, GenlockError, InvalidInput, NoCapacity, StalePage, Unavailable
from model.sampler import SampledToken
from tests.support.decode_calls import told
from wire.session import MAX_MESSAGE_TOKENS, Session, pack

DONE = worker_pb2.DecodeFinished(completion_tokens=1)


class Caller:
    """grpc's side of a session at a worker: takes one message each time that it is let."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(0)
        self.got: list[worker_pb2.DecodeEvents] = []

    async def send_initial_metadata(self, metadata) -> None:
        pass

    async def write(self, events) -> None:
        await self.turn.acquire()
        self.got.append(events)


class Worker:
    """Keeps what tells, and what was cancelled."""

    def __init__(self) -> None:
        self.tells = []
        self.cancelled: list[int] = []

    async def start(self, _request, tell):
        at = len(self.tells)
        self.tells.append(tell)
        return lambda: self.cancelled.append(at)


class Commands:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[worker_pb2.DecodeCommand | None] = asyncio.Queue()

    def submit(self, call_no: int) -> None:
        self.queue.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, submit=worker_pb2.DecodeRequest()))

    def cancel(self, call_no: int) -> None:
        self.queue.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, cancel=worker_pb2.DecodeCancel()))

    def end(self) -> None:
        self.queue.put_nowait(None)

    async def __aiter__(self):
        while (command := await self.queue.get()) is not None:
            yield command


async def until(ready) -> None:
    async with asyncio.timeout(5):
        while not ready():
            await asyncio.sleep(0)


def ends(caller: Caller) -> list[tuple[int, str]]:
    return [
        (event.call_no, event.WhichOneof("event"))
        for message in caller.got
        for event in message.events
        if event.WhichOneof("event") != "tokens"
    ]


async def test_what_gathers_while_a_message_is_on_its_way_leaves_as_one_for_all_requests():
    caller, worker, commands = Caller(), Worker(), Commands()
    running = asyncio.create_task(Session(worker.start, caller).run(commands))
    commands.submit(11)
    commands.submit(22)
    await until(lambda: len(worker.tells) == 2)
    worker.tells[0](SampledToken(1))
    for _ in range(5):
        await asyncio.sleep(0)
    for token in (2, 3, 4):
        worker.tells[0](SampledToken(token))
        worker.tells[1](SampledToken(10 * token))
        await asyncio.sleep(0)
    worker.tells[1](Unavailable("worker_stopped"))
    worker.tells[0](DONE)
    commands.end()
    for _ in range(2):
        caller.turn.release()
    await asyncio.wait_for(running, 5)
    assert [list(zip(m.call_nos, m.token_ids, strict=True)) for m in caller.got] == [
        [(11, 1)], [(11, 2), (22, 20), (11, 3), (22, 30), (11, 4), (22, 40)],
    ]  # fmt: skip
    assert ends(caller) == [(22, "failed"), (11, "finished")]


async def test_a_request_ends_once_whoever_tells_its_end():
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    running = asyncio.create_task(Session(worker.start, caller).run(commands))
    commands.submit(7)
    await until(lambda: worker.tells)
    commands.cancel(7)
    await until(lambda: worker.cancelled)
    worker.tells[0](SampledToken(1))
    worker.tells[0](Cancelled("cancelled"))
    worker.tells[0](DONE)
    commands.cancel(7)
    commands.cancel(99)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert ends(caller) == [(7, "failed")]
    assert worker.cancelled == [0]
    assert not any(message.token_ids for message in caller.got), "nothing follows an end"


async def test_a_cancel_reaches_a_request_that_is_still_being_started():
    caller, commands, entered, left = Caller(), Commands(), asyncio.Event(), asyncio.Event()
    caller.turn = asyncio.Semaphore(100)

    async def start(_request, _tell):
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    running = asyncio.create_task(Session(start, caller).run(commands))
    commands.submit(7)
    await asyncio.wait_for(entered.wait(), 5)
    commands.cancel(7)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert left.is_set()
    assert ends(caller) == [(7, "failed")]


async def test_a_cancel_that_comes_while_a_start_ends_is_not_lost():
    caller, commands, cancelled = Caller(), Commands(), []
    caller.turn = asyncio.Semaphore(100)

    async def start(_request, _tell):
        commands.cancel(7)
        commands.end()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # As a start whose work was queued already: it has a result all the same.
            return lambda: cancelled.append(7)

    running = asyncio.create_task(Session(start, caller).run(commands))
    commands.submit(7)
    await asyncio.wait_for(running, 5)
    await until(lambda: cancelled == [7])


@pytest.mark.parametrize("started", [True, False])
async def test_the_callers_end_cancels_everything(started: bool):
    caller, worker, commands, entered, left = Caller(), Worker(), Commands(), asyncio.Event(), asyncio.Event()

    async def never(_request, _tell):
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    running = asyncio.create_task(Session(worker.start if started else never, caller).run(commands))
    commands.submit(7)
    await until(lambda: worker.tells or entered.is_set())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: worker.cancelled == [0] if started else left.is_set())


async def test_a_number_that_is_taken_ends_its_request_and_no_other():
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    running = asyncio.create_task(Session(worker.start, caller).run(commands))
    commands.submit(7)
    commands.submit(8)
    await until(lambda: len(worker.tells) == 2)
    commands.submit(7)
    await until(lambda: worker.cancelled)
    worker.tells[1](DONE)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert ends(caller) == [(7, "failed"), (8, "finished")]
    assert worker.cancelled == [0]


async def test_requests_of_a_session_are_bounded():
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    running = asyncio.create_task(Session(worker.start, caller, max_open=2).run(commands))
    for number in (1, 2, 3):
        commands.submit(number)
    await until(lambda: ends(caller))
    assert ends(caller) == [(3, "failed")]
    for tell in worker.tells:
        tell(DONE)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert len(ends(caller)) == 3


async def test_a_worker_that_stops_ends_its_sessions_when_they_are_idle():
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    session = Session(worker.start, caller)
    running = asyncio.create_task(session.run(commands))
    commands.submit(1)
    await until(lambda: worker.tells)
    session.finish()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not running.done()
    worker.tells[0](DONE)
    await asyncio.wait_for(running, 5)
    assert ends(caller) == [(1, "finished")]


async def test_an_error_and_a_surprise_of_a_start_end_one_request():
    caller, commands = Caller(), Commands()
    caller.turn = asyncio.Semaphore(100)
    errors = iter(
        [InvalidInput("bad_id", "ticket_id must be 16 bytes", field="ticket.ticket_id"), ValueError("secret")]
    )

    async def start(_request, _tell):
        raise next(errors)

    running = asyncio.create_task(Session(start, caller).run(commands))
    commands.submit(1)
    commands.submit(2)
    commands.end()
    await asyncio.wait_for(running, 5)
    failed = {event.call_no: event.failed for message in caller.got for event in message.events}
    assert failed[1].message == "ticket_id must be 16 bytes"
    assert "secret" not in failed[2].message


# --- messages ----------------------------------------------------------------------------------------------------

TOLD = st.one_of(
    st.builds(SampledToken, st.integers(0, 300)),
    st.builds(lambda t: SampledToken(t, -0.5, ((t, -0.5), (1, -1.0))), st.integers(0, 300)),
)


@given(st.lists(st.tuples(st.integers(0, 3), TOLD), max_size=40), st.sets(st.integers(0, 3)), st.integers(1, 12))
def test_each_request_keeps_its_own_order_in_messages_of_any_size(stream, ended, limit):
    outbox = deque([*stream, *((number, DONE) for number in sorted(ended))])
    got: dict[int, list[int]] = {number: [] for number in range(4)}
    over: set[int] = set()
    while outbox:
        before = len(outbox)
        message = worker_pb2.DecodeEvents.FromString(pack(outbox, limit).SerializeToString())
        assert len(outbox) < before
        for number, token in zip(message.call_nos, message.token_ids, strict=True):
            assert number not in over
            got[number].append(token)
        for event in message.events:
            assert event.call_no not in over
            if event.HasField("finished"):
                over.add(event.call_no)
            got[event.call_no] += [token.token_id for token in event.tokens.tokens]
    assert got == {n: [told.token_id for number, told in stream if number == n] for n in range(4)}
    assert over == ended


def test_a_message_stays_far_below_any_limit():
    top = tuple((t, -1.0) for t in range(20))
    for told_ in (SampledToken(1 << 30, -1.0, top), StalePage("x" * 64, "y" * 4096)):
        outbox = deque([(1 << 63, told_)] * (2 * MAX_MESSAGE_TOKENS))
        while outbox:
            assert pack(outbox).ByteSize() < 1 << 20


# --- the gateway's half --------------------------------------------------------------------------------------------


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
    session = DecodeSession(lambda: stream)
    one, two = (session.submit(number, worker_pb2.DecodeRequest()) for number in (5, 6))
    stream.say([5, 6, 5, 77], [1, 2, 3, 4], [finished(77, 1), finished(5, 2)])
    stream.say([5, 6], [9, 9], [finished(6, 2), finished(5, 9)])
    assert (await told(one, 5), await told(two, 5)) == (([1, 3], None), ([2, 9], None))
    assert len(session) == 0
    await session.close()


async def test_a_number_that_is_taken_is_passed_over():
    session = DecodeSession(Scripted)
    numbers = [session.submit((1 << 64) - 1, worker_pb2.DecodeRequest()).call_no for _ in range(3)]
    assert numbers == [(1 << 64) - 1, 0, 1]
    await session.close()


async def test_a_request_that_was_cancelled_hears_nothing_more_and_the_worker_hears_of_it_once():
    stream = Scripted()
    session = DecodeSession(lambda: stream)
    call = session.submit(5, worker_pb2.DecodeRequest())
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


async def test_a_request_that_is_cancelled_before_it_was_sent_is_not_sent():
    stream = Scripted()
    stream.connected.clear()
    session = DecodeSession(lambda: stream)
    calls = [session.submit(number, worker_pb2.DecodeRequest()) for number in (5, 6)]
    for _ in range(5):
        await asyncio.sleep(0)
    calls[0].cancel()
    stream.connected.set()
    await until(lambda: stream.sent)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [(command.call_no, command.WhichOneof("command")) for command in stream.sent] == [(6, "submit")]
    await session.close()


@pytest.mark.parametrize("how", ["end", "lists", "kind", "error", "close", "close at once"])
async def test_the_end_of_a_session_ends_every_request_typed(how: str):
    stream = Scripted()
    session = DecodeSession(lambda: stream)
    calls = [session.submit(number, worker_pb2.DecodeRequest()) for number in (1, 2)]
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
    session = DecodeSession(lambda: stream)
    call = session.submit(5, worker_pb2.DecodeRequest())
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

        return cancel

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
        session = DecodeSession(lambda: stub.Session(None))

        async def one(number: int) -> None:
            prompt = [1000 * number + at for at in range(rng.randrange(1, 30))]
            fails_after = rng.choice((0, 0, 4))
            request = worker_pb2.DecodeRequest(ticket=worker_pb2.Ticket(token_ids=prompt), left_ms=fails_after)
            await asyncio.sleep(rng.random() * 0.02)
            call = session.submit(rng.getrandbits(64), request)
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
        last = session.submit(1, worker_pb2.DecodeRequest(ticket=worker_pb2.Ticket(token_ids=[5] * 500)))
        await last.next()
        await server.stop(0)
        _tokens, error = await told(last, 5)
        assert isinstance(error, GenlockError)
        assert session.over
        await session.close()
