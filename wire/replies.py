"""Writing to callers so that a stream always gets its status.

grpc.aio notes that a stream's headers were sent when its first write has ended. A cancel in the middle of that write
leaves the note undone: the status is then sent with headers once more, which grpc refuses, and the caller waits for
ever. So the headers go first, by themselves, and a cancel waits for them. They are small, and flow control does not
hold them up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

HEADERS_S = 5.0


class Replies:
    """The messages of one streaming answer. `context` is grpc.aio's servicer context."""

    __slots__ = ("_begun", "_context")

    def __init__(self, context: Any) -> None:
        self._context = context
        self._begun = False

    def write(self, message: Any) -> Awaitable[None]:
        """One message; the first one is preceded by the headers. Every token passes here: no coroutine of our own."""
        written: Awaitable[None] = self._context.write(message) if self._begun else self._first(message)
        return written

    async def _first(self, message: Any) -> None:
        await self._begin()
        await self._context.write(message)

    async def _begin(self) -> None:
        self._begun = True
        sending = asyncio.ensure_future(self._context.send_initial_metadata(()))
        # Where the caller has gone and this task is cancelled too, nobody else asks how it ended.
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            await asyncio.wait([sending], timeout=HEADERS_S)
            raise
