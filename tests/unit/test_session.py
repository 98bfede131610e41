"""Decode's stream to its caller: what gathers while a message is on its way leaves as one message."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from decode.engine import Ended
from decode.service import DecodeService
from kvstore.errors import Unavailable
from model.sampler import SampledToken


class SlowCaller:
    """Takes one message each time that it is let."""

    def __init__(self) -> None:
        self.turn = asyncio.Semaphore(0)
        self.got: list[list[int]] = []

    async def send_initial_metadata(self, metadata) -> None:
        pass

    async def write(self, event) -> None:
        await self.turn.acquire()
        self.got.append([token.token_id for token in event.tokens.tokens])


async def test_tokens_that_gather_while_a_message_is_written_leave_as_one():
    events: asyncio.Queue[SampledToken | Ended | Unavailable] = asyncio.Queue()
    service = DecodeService(SimpleNamespace(), SimpleNamespace(), lambda: 0)
    caller = SlowCaller()
    streaming = asyncio.create_task(service._stream(events, caller))
    events.put_nowait(SampledToken(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for token in (2, 3, 4):
        events.put_nowait(SampledToken(token))
        await asyncio.sleep(0)
    for _ in range(2):
        caller.turn.release()
    async with asyncio.timeout(5):
        while len(caller.got) < 2:
            await asyncio.sleep(0)
    assert caller.got == [[1], [2, 3, 4]]
    events.put_nowait(SampledToken(5))
    events.put_nowait(Unavailable("worker_stopped"))
    caller.turn.release()
    [error] = await asyncio.gather(streaming, return_exceptions=True)
    assert (error.reason, caller.got[-1]) == ("worker_stopped", [5]), "what came before the error is told"
