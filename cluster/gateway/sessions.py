"""Many requests over one call, the gateway's half: one call to each decode worker carries all requests there.

    open ─► submit command ─► events of all requests ─► each request's own buffer ─► next()

A request is named by a number that no other request of the session ever has, scattered at random over 64 bits so that
one that was confused belongs to nobody: an event whose number belongs to nobody reaches nobody. What a client does not
read yet waits in its request's buffer, which its max_tokens bounds, and leaves as one.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from genlock.v1 import worker_pb2
from kvstore.errors import Cancelled, GenlockError, Unavailable
from wire.calls import responses
from wire.ending import end_tasks
from wire.errors import from_status, surprise, to_status

NUMBER_BITS = 64
NUMBERS_SEED_BYTES = 16

# Names a prefill worker for an attempt of a preempted request. Raises GenlockError where there is none.
Assign = Callable[[int], worker_pb2.PrefillAssigned]


def call_numbers(seed: bytes) -> Iterator[int]:
    """The numbers of one session's requests. `seed`: NUMBERS_SEED_BYTES random bytes. An odd stride meets each of the
    2^64 numbers once before it meets one again."""
    first, stride = int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:], "little") | 1
    return ((first + stride * at) % (1 << NUMBER_BITS) for at in itertools.count())


class Token(NamedTuple):
    """A token of an answer; the rest only where log-probabilities were asked for."""

    token_id: int
    logprob: float | None = None
    top: Sequence[worker_pb2.SampledLogprob] = ()


class Stream(Protocol):
    """What a session needs of grpc.aio's call."""

    def __aiter__(self) -> AsyncIterator[worker_pb2.DecodeEvents]: ...

    async def wait_for_connection(self) -> None: ...

    async def write(self, request: worker_pb2.DecodeCommand) -> None: ...

    def cancel(self) -> bool: ...


class DecodeCall:
    """One request at a decode worker."""

    __slots__ = (
        "_assign", "_cancel", "_end", "_left", "_loop", "_most", "_tokens", "_waiter", "call_no", "started",
    )  # fmt: skip

    def __init__(
        self, call_no: int, most_tokens: int, cancel: Callable[[int], None], assign: Assign | None = None
    ) -> None:
        """`most_tokens`: what the request asks for at most."""
        self.call_no = call_no
        self._left = self._most = most_tokens
        self._loop = asyncio.get_running_loop()
        self._assign = assign
        # What the handoff cost; there with the first token.
        self.started: worker_pb2.DecodeStarted | None = None
        self._cancel = cancel
        self._tokens: list[Token] = []
        self._end: worker_pb2.DecodeFinished | GenlockError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> tuple[Sequence[Token], worker_pb2.DecodeFinished | None]:
        """What has come since the last time, at least one token or the end. Raises the GenlockError that the request
        ended with, after the tokens that came before it."""
        if not self._tokens and self._end is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        tokens, self._tokens = self._tokens, []
        if isinstance(self._end, GenlockError):
            if tokens:
                return tokens, None
            raise self._end
        return tokens, self._end

    @property
    def begun(self) -> bool:
        """Whether the worker has told anything of it."""
        return self.started is not None or self._left < self._most

    def cancel(self) -> None:
        """Tells the worker at once, without waiting; no effect on a request that has ended."""
        self._cancel(self.call_no)

    def assign(self, attempt: int) -> worker_pb2.PrefillAssigned:
        """What the worker is told that asks who computes this request again."""
        try:
            if self._assign is None:
                raise Unavailable("prefill_not_assigned", "this request is not routed anew")
            return self._assign(attempt)
        except Exception as exc:
            error = surprise(exc, "a prefill worker for a preempted request")
            return worker_pb2.PrefillAssigned(attempt=attempt, refused=to_status(error))

    def put(self, token: Token) -> bool:
        """False: it is one more than the request asks for, and is not kept."""
        if not self._left:
            return False
        self._left -= 1
        self._tokens.append(token)
        if self._waiter is not None:
            self._wake()
        return True

    def end(self, end: worker_pb2.DecodeFinished | GenlockError) -> None:
        self._end = end
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DecodeSession:
    """All requests of this gateway at one decode worker. `over`: it takes no more; open another."""

    def __init__(self, open_stream: Callable[[], Stream], numbers: Iterator[int]) -> None:
        """`open_stream`: a stub's Session. Starts at once; an unreachable worker shows in the requests. `numbers`: as
        of `call_numbers`, no two alike."""
        self._open_stream = open_stream
        self._numbers = numbers
        self._calls: dict[int, DecodeCall] = {}
        # All bounded by the requests that run in this gateway. A request that was not sent yet is cancelled by not
        # sending it.
        self._unsent: dict[int, worker_pb2.DecodeRequest] = {}
        self._assigned: dict[int, worker_pb2.PrefillAssigned] = {}
        self._cancels: deque[int] = deque()
        self._to_send = asyncio.Event()
        self.over = False
        self._task = asyncio.create_task(self._run(), name="decode session")

    def __len__(self) -> int:
        return len(self._calls)

    def submit(self, request: worker_pb2.DecodeRequest, assign: Assign | None = None) -> DecodeCall:
        """`assign` None: once preempted, the request ends as Unavailable."""
        call_no = next(self._numbers)
        call = self._calls[call_no] = DecodeCall(
            call_no, max(0, request.ticket.sampling.max_tokens), self._cancel, assign
        )
        self._unsent[call_no] = request
        self._to_send.set()
        return call

    async def close(self) -> None:
        """Requests that are open end as Unavailable."""
        await end_tasks([self._task])
        self._fail(_cut())  # where the task was cancelled before it had begun

    def _cancel(self, call_no: int) -> None:
        self._give_up(call_no, Cancelled("cancelled", "the call was cancelled on this side"))

    def _give_up(self, call_no: int, error: GenlockError) -> None:
        """Ends a request on this side, and tells the worker."""
        call = self._calls.pop(call_no, None)
        if call is not None:
            call.end(error)
            self._assigned.pop(call_no, None)
            if self._unsent.pop(call_no, None) is None:
                self._cancels.append(call_no)
                self._to_send.set()

    async def _run(self) -> None:
        error: GenlockError = _cut()
        writing: asyncio.Task[None] | None = None
        try:
            stream = self._open_stream()
            writing = asyncio.create_task(self._write(stream))
            async for events in responses(stream):
                self._take(events)
            self._turned_away()
        except Exception as exc:
            error = surprise(exc, "a session with a decode worker")
        finally:
            self._fail(error)
            if writing is not None:
                await end_tasks([writing])

    def _turned_away(self) -> None:
        """The worker has ended the session well: it stops, and none of its requests was open. What it told nothing of
        was on its way to a door that had shut, and can be served elsewhere."""
        for call_no, call in list(self._calls.items()):
            if not call.begun:
                del self._calls[call_no]
                call.end(Unavailable("draining", "the decode worker stopped before it took the request"))

    def _fail(self, error: GenlockError) -> None:
        self.over = True
        self._unsent.clear()
        self._assigned.clear()
        self._cancels.clear()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            # One for each: tracebacks gather in an error that is raised.
            call.end(copy.copy(error))

    async def _write(self, stream: Stream) -> None:
        try:
            await stream.wait_for_connection()
            while True:
                while self._unsent or self._cancels or self._assigned:
                    await stream.write(self._next_command())
                self._to_send.clear()
                await self._to_send.wait()
        except Exception:
            # The reader hears why.
            stream.cancel()

    def _next_command(self) -> worker_pb2.DecodeCommand:
        """Cancels first: they make room. Then what requests wait for that were admitted before."""
        if self._cancels:
            return worker_pb2.DecodeCommand(call_no=self._cancels.popleft(), cancel=worker_pb2.DecodeCancel())
        if self._assigned:
            call_no = next(iter(self._assigned))
            return worker_pb2.DecodeCommand(call_no=call_no, assign=self._assigned.pop(call_no))
        call_no = next(iter(self._unsent))
        return worker_pb2.DecodeCommand(call_no=call_no, submit=self._unsent.pop(call_no))

    def _take(self, events: worker_pb2.DecodeEvents) -> None:
        """Every token of every answer passes here: keep it short."""
        calls = self._calls
        call_nos, token_ids = events.call_nos, events.token_ids
        if len(call_nos) != len(token_ids):
            raise Unavailable("stream_protocol", "the decode worker's lists of requests and tokens differ in length")
        for call_no, token_id in zip(call_nos, token_ids, strict=True):
            call = calls.get(call_no)
            if call is not None and not call.put(Token(token_id)):
                self._give_up(call_no, _too_many())
        for event in events.events:
            call = calls.get(event.call_no)
            if call is not None:
                self._take_event(call, event)

    def _take_event(self, call: DecodeCall, event: worker_pb2.DecodeEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            for token in event.tokens.tokens:
                logprob = token.logprob if token.HasField("logprob") else None
                if not call.put(Token(token.token_id, logprob, token.top)):
                    self._give_up(call.call_no, _too_many())
                    return
            return
        if kind == "started":
            call.started = event.started
            return
        if kind == "prefill_wanted":
            self._assigned[call.call_no] = call.assign(event.prefill_wanted.attempt)
            self._to_send.set()
            return
        if kind not in ("finished", "failed"):
            what = "the decode worker sent an event of no kind that is known here"
            self._give_up(call.call_no, Unavailable("stream_protocol", what))
            return
        del self._calls[call.call_no]
        if kind == "finished":
            call.end(event.finished)
        else:
            call.end(from_status(event.failed) or GenlockError("peer_internal", "the decode worker told no reason"))


def _too_many() -> Unavailable:
    return Unavailable("stream_protocol", "the decode worker sent more tokens than max_tokens")


def _cut() -> Unavailable:
    return Unavailable("stream_cut", "the decode worker's stream ended before the answer was complete")
