"""Requests to a decode worker as a gateway sends them, and scripted ones in their place."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cluster.gateway.sessions import DecodeCall, DecodeSession, Token
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError


@asynccontextmanager
async def decoding(stub: worker_pb2_grpc.DecodeServiceAsyncStub) -> AsyncIterator[Decoding]:
    session = DecodeSession(lambda: stub.Session(None), itertools.count(1))
    try:
        yield Decoding(session)
    finally:
        await session.close()


class Decoding:
    """One session with a worker; all its requests share it."""

    def __init__(self, session: DecodeSession) -> None:
        self.session = session

    def submit(self, request: worker_pb2.DecodeRequest) -> DecodeCall:
        def again(attempt: int) -> worker_pb2.PrefillAssigned:
            """Whoever computed it first computes it again."""
            return worker_pb2.PrefillAssigned(
                attempt=attempt, prefill_endpoint=request.prefill_endpoint, prefill_worker=request.prefill_worker
            )

        return self.session.submit(request, again)

    async def run(self, request: worker_pb2.DecodeRequest, limit_s: float) -> tuple[list[int], GenlockError | None]:
        """Its tokens, and the error that it ended with."""
        return await told(self.submit(request), limit_s)

    async def refused(self, request: worker_pb2.DecodeRequest, limit_s: float = 20) -> GenlockError:
        _tokens, error = await self.run(request, limit_s)
        assert error is not None, "the request ended well"
        return error


async def told(call: DecodeCall, limit_s: float) -> tuple[list[int], GenlockError | None]:
    """Raises TimeoutError where the request has no end by then."""
    tokens: list[int] = []
    finished: worker_pb2.DecodeFinished | None = None
    try:
        async with asyncio.timeout(limit_s):
            while finished is None:
                some, finished = await call.next()
                tokens += [token.token_id for token in some]
    except GenlockError as error:
        return tokens, error
    return tokens, None


class ScriptedCall:
    """In a DecodeCall's place: tells `events`, step by step, then hangs. An exception is raised in its turn."""

    def __init__(self, *events: worker_pb2.DecodeEvent | Exception) -> None:
        self.events = list(events)
        self.cancelled = False
        self.started: worker_pb2.DecodeStarted | None = None

    def cancel(self) -> None:
        self.cancelled = True

    async def next(self) -> tuple[Sequence[Token], worker_pb2.DecodeFinished | None]:
        if not self.events:
            await asyncio.Event().wait()
        event = self.events.pop(0)
        if isinstance(event, Exception):
            raise event
        if event.HasField("finished"):
            return (), event.finished
        return [Token(token.token_id, token.logprob, token.top) for token in event.tokens.tokens], None
