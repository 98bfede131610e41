"""HTTP/1.1 connections with limits: how many, how long for a request's head, how long without being read.

The server below bounds a head's size and how long a connection may idle between requests. One timer for each connection
does the rest; a limit holds within twice its period.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.openai.errors import error_object
from cluster.openai.replies import encode
from kvstore.errors import NoCapacity


class BoundedConnection(H11Protocol):
    max_connections: ClassVar[int] = 1024
    # A head that is not complete, a client that does not read, and a close that does not end.
    patience_s: ClassVar[float] = 30.0
    # What a client may send ahead of an answer that it waits for.
    max_ahead_bytes: ClassVar[int] = 64 << 10

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._stuck_before = False
        self._write_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the class below has it
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse()
        self._timer = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering and not self.cycle.more_body and not self.transport.is_closing():
            # The class below stops reading here, and would not see the client leave.
            self.flow.resume_reading()
            if len(self.conn.trailing_data[0]) > self.max_ahead_bytes:
                self.transport.abort()

    def pause_writing(self) -> None:
        self._write_paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """Aborts a connection that is stuck at two looks in a row."""
        idle = self.timeout_keep_alive_task is not None
        stuck = self._write_paused or self.transport.is_closing() or not (self._answering or idle)
        if stuck and self._stuck_before:
            self.transport.abort()
            return
        self._stuck_before = stuck
        self._timer = self.loop.call_later(self.patience_s, self._look)

    def _refuse(self) -> None:
        body = encode(error_object(NoCapacity("too_many_connections", "this server has too many connections")))
        head = (
            "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"retry-after: 1\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
