"""Many requests over one call, the worker's half: commands come in, and what has gathered of all requests goes out.

    command ─► start ─► the handler queues its work ─► tell, from any thread ─► outbox ─► one message for all requests

A step's tokens wake the event loop once and leave as one message, whoever they are for. While a message is on its way
the next one gathers. Each request ends once: the first end that is told counts, whoever tells it.

A number is one request's for good. What is told is bound to the request itself, so what comes late of one reaches no
other; and a number of a request that has ended is refused (`call_no_taken`): its caller may not have heard of that end,
and would take what is still on its way for the new request's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from genlock.v1 import worker_pb2
from kvstore.errors import Cancelled, GenlockError, InvalidInput, NoCapacity
from model.sampler import SampledToken
from wire.causes import Causes
from wire.convert import token_to_proto
from wire.ending import end_tasks
from wire.errors import surprise, to_status
from wire.replies import Replies

MAX_OPEN = 65_536
# Some 100 KB; what does not fit goes with the next message.
MAX_MESSAGE_TOKENS = 8_192
# What other events weigh beside a token: an error's message may be long.
EVENT_TOKENS = 64
# Numbers of ended requests that are remembered after their end has left; more than fit on a connection's way. Callers
# draw numbers at random, so that one which was forgotten does not come again.
MAX_ENDED = 16_384
# What may wait for a caller that does not read before no more of its commands are taken; some 50 MB. Of requests that
# are open it may be more, by the tokens that they have left.
MAX_WAITING = 262_144

# What may be followed by more of the same request.
Going = SampledToken | worker_pb2.DecodeStarted | worker_pb2.PrefillWanted
Told = Going | worker_pb2.DecodeFinished | GenlockError
Tell = Callable[[Told], None]


@dataclass(frozen=True)
class Handle:
    """One request, as its session reaches it. Both have no effect on one that has ended."""

    cancel: Callable[[], None]
    assign: Callable[[worker_pb2.PrefillAssigned], None]


# Queues one request. Raises GenlockError; `tell` may be called from any thread.
Start = Callable[[worker_pb2.DecodeRequest, Tell], Awaitable[Handle]]


@dataclass(eq=False)
class _Open:
    """A request that has not ended. `handle` None: it is still being started."""

    call_no: int
    task: asyncio.Task[None] | None = None
    handle: Handle | None = None


class Session:
    """One call of one gateway. `context` is grpc.aio's servicer context."""

    def __init__(
        self,
        start: Start,
        context: Any,
        max_open: int = MAX_OPEN,
        refused: Causes | None = None,
        max_ended: int = MAX_ENDED,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """`refused` counts commands for calls that are not there, or are there already. `max_ended`: numbers that are
        remembered of requests whose end has left. `max_waiting`: events in the outbox above which commands wait."""
        self._start = start
        self._replies = Replies(context)
        self._max_open = max_open
        self._max_ended = max_ended
        self._max_waiting = max_waiting
        self._refused = refused or Causes()
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, _Open] = {}
        # In the order of their last ends, as these stand in the outbox.
        self._ended: dict[int, None] = {}
        # Held while a request ends, and while anything is told of one.
        self._ending = threading.Lock()
        self._outbox: deque[tuple[int, Told]] = deque()
        self._ready = asyncio.Event()
        # A message has left; awaited only by commands that wait for room.
        self._left = asyncio.Event()
        self._woken = False
        self._last = False
        # Also of requests that have ended meanwhile.
        self._starting: set[asyncio.Task[None]] = set()

    async def run(self, commands: AsyncIterator[worker_pb2.DecodeCommand]) -> None:
        """Returns when no more commands come and every request has ended. When it is cancelled, so are they."""
        reading = asyncio.create_task(self._read(commands))
        try:
            await self._write(reading)
        finally:
            await end_tasks([reading])
            for one in list(self._open.values()):
                _stop(one)
            self._open.clear()

    def finish(self) -> None:
        """The worker stops: the call ends as soon as no request is open."""
        self._last = True
        self._ready.set()

    async def _read(self, commands: AsyncIterator[worker_pb2.DecodeCommand]) -> None:
        try:
            async for command in commands:
                if command.HasField("submit"):
                    self._submit(command.call_no, command.submit)
                elif command.HasField("cancel"):
                    self._cut(command.call_no, Cancelled("cancelled", "the caller went away"))
                elif command.HasField("assign"):
                    one = self._open.get(command.call_no)
                    if one is not None and one.handle is not None:  # what is being started has asked for nothing
                        one.handle.assign(command.assign)
                while len(self._outbox) > self._max_waiting:
                    self._left.clear()
                    await self._left.wait()
        finally:
            self.finish()

    async def _write(self, reading: asyncio.Task[None]) -> None:
        while True:
            if self._outbox:
                await self._replies.write(pack(self._outbox))
                self._left.set()
                self._forget()
                continue
            with self._ending:
                done = self._last and not self._open and not self._outbox
            if done:
                if reading.done():
                    reading.result()
                return
            self._ready.clear()
            self._woken = False
            if not self._outbox and not (self._last and not self._open):
                await self._ready.wait()

    def _submit(self, call_no: int, request: worker_pb2.DecodeRequest) -> None:
        with self._ending:
            one, ended = self._open.get(call_no), call_no in self._ended
        if one is not None or ended:
            self._refused.add("call_no_taken")
            # Whose tokens are whose could not be told apart: of two that are open, neither goes on.
            taken = InvalidInput("call_no_taken", "call_no is an earlier request's of this session", field="call_no")
            if one is None or not self._end(one, taken):
                self._refuse(call_no, taken)
            return
        if len(self._open) >= self._max_open:
            full = f"{self._max_open} requests of this gateway are open at this worker"
            self._refuse(call_no, NoCapacity("session_full", full))
            return
        one = self._open[call_no] = _Open(call_no)
        one.task = asyncio.create_task(self._begin(one, request))
        self._starting.add(one.task)
        one.task.add_done_callback(self._starting.discard)

    async def _begin(self, one: _Open, request: worker_pb2.DecodeRequest) -> None:
        def tell(told: Told) -> None:
            self._tell(one, told)

        try:
            handle = await self._start(request, tell)
        except GenlockError as error:
            tell(error)
        except asyncio.CancelledError:
            raise
        except Exception as unexpected:
            tell(surprise(unexpected, "a request of a session"))
        else:
            if self._open.get(one.call_no) is one:
                one.handle = handle
            else:
                handle.cancel()  # it was cut while it was being started; no effect on one that has ended by itself

    def _cut(self, call_no: int, error: GenlockError) -> None:
        """Ends a request from this side; no effect on one that has ended, which nobody need know yet."""
        one = self._open.get(call_no)
        if one is None:
            self._refused.add("unknown_call")
            return
        self._end(one, error)

    def _end(self, one: _Open, error: GenlockError) -> bool:
        """Ends a request from this side. False: it has ended by itself meanwhile."""
        ended = self._tell(one, error)
        _stop(one)
        return ended

    def _tell(self, one: _Open, told: Told) -> bool:
        """From any thread. After a request's end nothing more is told of it, whoever has its number by then. Returns
        whether it was told."""
        with self._ending:
            if self._open.get(one.call_no) is not one:
                return False
            if not isinstance(told, Going):
                del self._open[one.call_no]
                self._note_end(one.call_no)
            self._put(one.call_no, told)
            return True

    def _refuse(self, call_no: int, error: GenlockError) -> None:
        """The end of a request that has never begun."""
        with self._ending:
            self._note_end(call_no)
            self._put(call_no, error)

    def _note_end(self, call_no: int) -> None:
        """Its end is the next thing in the outbox."""
        self._ended.pop(call_no, None)
        self._ended[call_no] = None

    def _forget(self) -> None:
        """A message has left. Never the number of an end that still waits: of what waits, all may be ends."""
        with self._ending:
            spare = len(self._ended) - self._max_ended - len(self._outbox)
            for call_no in list(itertools.islice(self._ended, max(0, spare))):
                del self._ended[call_no]

    def _put(self, call_no: int, told: Told) -> None:
        self._outbox.append((call_no, told))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # a closed loop has no caller left to tell
                self._loop.call_soon_threadsafe(self._ready.set)


def _stop(one: _Open) -> None:
    if one.handle is not None:
        one.handle.cancel()
    elif one.task is not None:
        one.task.cancel()


def pack(outbox: deque[tuple[int, Told]], limit: int = MAX_MESSAGE_TOKENS) -> worker_pb2.DecodeEvents:
    """Takes what fits into one message, oldest first. A request's own order is kept: its tokens without
    log-probabilities, which readers take first, come before its other events or go among these."""
    message = worker_pb2.DecodeEvents()
    call_nos: list[int] = []
    token_ids: list[int] = []
    among_events: dict[int, worker_pb2.DecodeTokens] = {}
    room = limit
    while outbox and room > 0:
        call_no, told = outbox.popleft()
        if isinstance(told, SampledToken):
            room -= 1 + len(told.top)
            if told.logprob is None and call_no not in among_events:
                call_nos.append(call_no)
                token_ids.append(told.token_id)
                continue
            if call_no not in among_events:
                among_events[call_no] = message.events.add(call_no=call_no).tokens
            among_events[call_no].tokens.append(token_to_proto(told))
            continue
        room -= EVENT_TOKENS
        if isinstance(told, GenlockError):
            message.events.add(call_no=call_no, failed=to_status(told))
        elif isinstance(told, worker_pb2.DecodeStarted):
            message.events.add(call_no=call_no, started=told)
        elif isinstance(told, worker_pb2.PrefillWanted):
            message.events.add(call_no=call_no, prefill_wanted=told)
        else:
            message.events.add(call_no=call_no, finished=told)
    message.call_nos.extend(call_nos)
    message.token_ids.extend(token_ids)
    return message
