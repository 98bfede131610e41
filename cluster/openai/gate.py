"""A connection's transport as the HTTP server sees it: reading waits until what has come is taken in, and a close while
the client still sends does not cost the client its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# A client that is refused in the middle of its body reads the answer when it has sent the body, if ever.
LINGER_S = 2.0
LINGER_BYTES = 16 << 20


class Gate(asyncio.Transport):
    """`lingers()`: whether the client may be sending yet when the connection is closed. Then this side says nothing
    more and throws away what comes, unread, for a short while; otherwise unread bytes would reset the connection, and
    with it what was written last."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, lingers: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._lingers = lingers
        self._paused = False
        self._held = False
        self._closing = False
        self._left_bytes = LINGER_BYTES
        self._end: asyncio.TimerHandle | None = None

    def hold(self, held: bool) -> None:
        """While it is held nothing is read, whatever the server above wants."""
        self._held = held
        self._apply()

    def pause_reading(self) -> None:
        self._paused = True
        self._apply()

    def resume_reading(self) -> None:
        self._paused = False
        self._apply()

    def _apply(self) -> None:
        if self.is_closing():
            return
        if self._paused or self._held:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def write(self, data: Any) -> None:
        if not self._closing:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._lingers():
            self._closing = True
            self._transport.close()
            return
        self._paused = self._held = False
        self._apply()
        self._closing = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._end = self._loop.call_later(LINGER_S, self.abort)

    def discard(self, count: int) -> None:
        """`count` bytes came after the close."""
        self._left_bytes -= count
        if self._left_bytes < 0:
            self.abort()

    def lost(self) -> None:
        if self._end is not None:
            self._end.cancel()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
