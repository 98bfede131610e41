"""Many requests over one call: the worker's half."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlock.v1 import worker_pb2
from kvstore.errors import Cancelled, InvalidInput, StalePage, Unavailable
from model.sampler import SampledToken
from wire.causes import Causes
from wire.errors import from_status
from wire.session import MAX_MESSAGE_TOKENS, Handle, Session, pack

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
        self.assigned: list[tuple[int, worker_pb2.PrefillAssigned]] = []

    async def start(self, _request, tell):
        at = len(self.tells)
        self.tells.append(tell)
        return Handle(lambda: self.cancelled.append(at), lambda assigned: self.assigned.append((at, assigned)))


class Commands:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[worker_pb2.DecodeCommand | None] = asyncio.Queue()

    def submit(self, call_no: int) -> None:
        self.queue.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, submit=worker_pb2.DecodeRequest()))

    def cancel(self, call_no: int) -> None:
        self.queue.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, cancel=worker_pb2.DecodeCancel()))

    def assign(self, call_no: int, **assigned) -> None:
        answer = worker_pb2.PrefillAssigned(**assigned)
        self.queue.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, assign=answer))

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
            return Handle(lambda: cancelled.append(7), lambda _assigned: None)

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


# --- a number is one request's for good ----------------------------------------------------------------------------


def reasons(caller: Caller) -> list[tuple[int, str]]:
    """The ends, with the reason of those that failed."""
    return [
        (event.call_no, "finished" if event.HasField("finished") else from_status(event.failed).reason)
        for message in caller.got
        for event in message.events
        if event.WhichOneof("event") in ("finished", "failed")
    ]


@pytest.mark.parametrize("how", ["cancelled", "finished", "refused"])
async def test_a_number_of_a_request_that_has_ended_is_refused(how: str):
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    refused = Causes()
    running = asyncio.create_task(
        Session(worker.start, caller, max_open=0 if how == "refused" else 9, refused=refused).run(commands)
    )
    commands.submit(7)
    if how != "refused":
        await until(lambda: worker.tells)
        commands.cancel(7) if how == "cancelled" else worker.tells[0](DONE)
    await until(lambda: ends(caller))
    commands.submit(7)
    commands.submit(7)
    commands.end()
    await asyncio.wait_for(running, 5)
    first = {"cancelled": "cancelled", "finished": "finished", "refused": "session_full"}[how]
    assert reasons(caller) == [(7, first), (7, "call_no_taken"), (7, "call_no_taken")]
    assert len(worker.tells) == (how != "refused"), "nothing of it was begun"
    assert refused.read() == {"call_no_taken": 2}


async def test_what_comes_late_of_a_request_reaches_nobody_that_has_its_number():
    """Numbers are forgotten here at once: then a number may come again, and what is told is of the request all the
    same."""
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    running = asyncio.create_task(Session(worker.start, caller, max_ended=0).run(commands))
    commands.submit(7)
    await until(lambda: worker.tells)
    commands.cancel(7)
    await until(lambda: ends(caller))
    commands.submit(7)
    await until(lambda: len(worker.tells) == 2)
    for late in (SampledToken(111), worker_pb2.DecodeStarted(), worker_pb2.PrefillWanted(attempt=1), DONE):
        worker.tells[0](late)
    worker.tells[0](StalePage("stale_tag", "of the first"))
    worker.tells[1](SampledToken(5))
    worker.tells[1](DONE)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert reasons(caller) == [(7, "cancelled"), (7, "finished")]
    assert [token for message in caller.got for token in message.token_ids] == [5]
    assert {event.WhichOneof("event") for message in caller.got for event in message.events} == {"failed", "finished"}


async def test_numbers_are_forgotten_when_enough_ends_have_left_and_never_before_their_own():
    caller, worker, commands = Caller(), Worker(), Commands()
    refused = Causes()
    running = asyncio.create_task(Session(worker.start, caller, max_ended=3, refused=refused).run(commands))
    for number in range(10):
        commands.submit(number)
        await until(lambda last=number: len(worker.tells) > last)
        worker.tells[number](DONE)
    caller.turn.release()
    await until(lambda: caller.got)
    for _ in range(5):
        await asyncio.sleep(0)
    commands.submit(1)  # the first end has left, this one not
    await until(refused.read)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert len(worker.tells) == 10

    caller, commands = Caller(), Commands()
    caller.turn = asyncio.Semaphore(100)
    session = Session(worker.start, caller, max_ended=3)
    running = asyncio.create_task(session.run(commands))
    for number in range(10, 20):
        commands.submit(number)
        await until(lambda last=number: len(worker.tells) > last)
        worker.tells[number](DONE)
        await until(lambda last=number: len(ends(caller)) == last - 9)
    await until(lambda: len(session._ended) == 3)
    commands.submit(19)
    commands.submit(10)
    await until(lambda: len(worker.tells) == 21)
    worker.tells[20](DONE)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert reasons(caller)[10:] == [(19, "call_no_taken"), (10, "finished")]


@given(st.randoms(use_true_random=False))
def test_in_any_order_of_commands_and_tells_a_number_is_one_requests(rng):
    """Each token spells the request that it was computed for: no request's tokens come under an end that is another's,
    and none at all after the number's first end."""

    async def play() -> None:
        caller, worker, commands, made = Caller(), Worker(), Commands(), []
        caller.turn = asyncio.Semaphore(1000)
        running = asyncio.create_task(Session(worker.start, caller).run(commands))
        for _ in range(40):
            number, kind = rng.randrange(3), rng.randrange(5)
            if kind == 0:
                commands.submit(number)
                made.append(number)
            elif kind == 1:
                commands.cancel(number)
            elif worker.tells:
                at = rng.randrange(len(worker.tells))
                worker.tells[at](DONE if kind == 2 else SampledToken(at))
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        commands.end()
        for _ in range(9):
            await asyncio.sleep(0)
        for tell in worker.tells:
            tell(SampledToken(77))
            tell(DONE)
        await asyncio.wait_for(running, 5)
        over, of = set(), {}
        for message in caller.got:
            for number, token in zip(message.call_nos, message.token_ids, strict=True):
                assert number not in over, "a token after the number's end"
                assert token == 77 or of.setdefault(number, token) == token, "two requests under one number"
            over |= {event.call_no for event in message.events}
        told = [number for number, _reason in reasons(caller)]
        assert all(1 <= told.count(number) <= made.count(number) for number in set(made))

    asyncio.run(play())


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


async def test_a_caller_that_sends_and_does_not_read_is_not_heard_until_it_reads():
    caller, worker, commands = Caller(), Worker(), Commands()
    session = Session(worker.start, caller, max_waiting=50)
    running = asyncio.create_task(session.run(commands))
    for call_no in range(1, 301):
        commands.submit(call_no)
        commands.cancel(call_no)
    commands.end()
    for _ in range(1000):
        await asyncio.sleep(0)
        assert len(session._outbox) <= 51
    assert commands.queue.qsize() > 400, "its commands wait where flow control holds them"
    for _ in range(700):
        caller.turn.release()
    await asyncio.wait_for(running, 5)
    assert [call_no for call_no, event in ends(caller) if event == "failed"] == list(range(1, 301))


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


async def test_a_question_leaves_and_its_answer_reaches_its_request_and_no_other():
    caller, worker, commands = Caller(), Worker(), Commands()
    caller.turn = asyncio.Semaphore(100)
    running = asyncio.create_task(Session(worker.start, caller).run(commands))
    commands.submit(7)
    commands.submit(8)
    await until(lambda: len(worker.tells) == 2)
    worker.tells[1](SampledToken(5))
    worker.tells[1](worker_pb2.PrefillWanted(attempt=2))
    worker.tells[1](SampledToken(6))
    await until(lambda: ends(caller))
    commands.assign(8, attempt=2, prefill_endpoint="there", prefill_worker="prefill-1")
    commands.assign(9, attempt=2, prefill_worker="of nobody")
    worker.tells[0](DONE)
    commands.assign(7, attempt=1, prefill_worker="of one that has ended")
    await until(lambda: worker.assigned)
    worker.tells[1](DONE)
    commands.end()
    await asyncio.wait_for(running, 5)
    assert [(at, one.attempt, one.prefill_worker) for at, one in worker.assigned] == [(1, 2, "prefill-1")]
    assert ends(caller)[0] == (8, "prefill_wanted")
    assert [token for message in caller.got for token in message.token_ids] == [5, 6], "it goes on after the question"


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
