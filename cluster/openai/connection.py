"""HTTP/1.1 connections with limits: how many, how long for a request's head, how long without being read, how much and
in how many pieces.

The server below bounds a head's size and how long a connection may idle between requests. One timer for each connection
does the rest; a limit holds within twice its period. What comes is given to the parser in slices, one for each turn of
the event loop, so that no connection keeps the others waiting.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.http_status import status_of
from cluster.openai.errors import error_object
from cluster.openai.gate import Gate
from cluster.openai.intake import Intake, begun, check_head
from cluster.openai.replies import encode
from kvstore.errors import GenlockError, InvalidInput, NoCapacity

# What a client may send ahead of an answer that it waits for, and how long a body may be that is read to its end after
# its request was refused, so that the connection stays.
MAX_AHEAD_BYTES = 64 << 10
# Parsing this much takes milliseconds at the worst.
SLICE_BYTES = 16 << 10


class CountedParser(h11.Connection):
    """The parser, counting what a request is made of. `refusal`: why it stopped."""

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.intake = Intake()
        self.refusal: InvalidInput | None = None

    @property
    def leaves_body(self) -> bool:
        """The client has not sent its whole body, and it is not one that is read to its end in any case."""
        return self.their_state is h11.SEND_BODY and not self.intake.short

    def receive_data(self, data: bytes) -> None:
        self.intake = self.intake.with_raw(len(data))
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises h11.RemoteProtocolError."""
        try:
            if self.their_state is h11.IDLE:
                check_head(self.trailing_data[0])
            event = super().next_event()
            if isinstance(event, h11.Data):
                self.intake = self.intake.with_part(len(event.data), begins_chunk=event.chunk_start)
            elif isinstance(event, h11.Request):
                self.intake = begun(event.headers, MAX_AHEAD_BYTES).with_raw(len(self.trailing_data[0]))
            elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
                self.intake.check_framing()
        except InvalidInput as refusal:
            self.refusal = refusal
            raise h11.RemoteProtocolError("refused") from refusal
        return event

    # Which event gives no bytes is told by overloads of the class above.
    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if isinstance(event, h11.Response) and self.leaves_body:
            headers = [*event.headers, CLOSE_HEADER]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send(event)


class BoundedConnection(H11Protocol):
    # A head that is not complete, a client that does not read, and a close that does not end.
    patience_s: ClassVar[float] = 30.0

    conn: CountedParser

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self.conn = CountedParser(self.config.h11_max_incomplete_event_size or MAX_AHEAD_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._stuck_before = False
        self._write_paused = False
        self._gate: Gate | None = None
        # What has come and is not parsed yet: at most one read of the transport.
        self._pending = bytearray()
        self._turn: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the class below has it
        self._gate = Gate(transport, self.loop, lambda: self._sends)
        super().connection_made(self._gate)
        if len(self.connections) > self._max_connections:
            self._refuse(NoCapacity("too_many_connections", "this server has too many connections"))
        self._timer = self.loop.call_later(self.patience_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._pending.clear()
        if self._gate is not None:
            self._gate.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        assert self._gate is not None
        if self._gate.is_closing():
            self._gate.discard(len(data))
            return
        self._pending += data
        if self._turn is None:
            self._take()

    def _take(self) -> None:
        """One slice to the parser; the next one when the event loop has looked after the others."""
        assert self._gate is not None
        self._turn = None
        part = bytes(self._pending[:SLICE_BYTES])
        del self._pending[:SLICE_BYTES]
        super().data_received(part)
        if self._answering and not self.cycle.more_body and not self._gate.is_closing():
            # The class below stops reading here, and would not see the client leave.
            self.flow.resume_reading()
            if len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
                self._gate.abort()
        if self._gate.is_closing():
            self._pending.clear()
        elif self._pending:
            self._turn = self.loop.call_soon(self._take)
        self._gate.hold(bool(self._pending))

    def send_400_response(self, msg: str) -> None:
        """What came is no request, or none that is read to its end."""
        self._refuse(self.conn.refusal or InvalidInput("bad_http", "this is not HTTP/1.1"))

    def on_response_complete(self) -> None:
        if self.conn.leaves_body:
            # Nobody wants the rest.
            self.transport.close()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._write_paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _sends(self) -> bool:
        """Whether the client may be in the middle of something."""
        return self.conn.leaves_body or self.conn.their_state is h11.ERROR or self.conn.refusal is not None

    def _look(self) -> None:
        """Aborts a connection that is stuck at two looks in a row."""
        idle = self.timeout_keep_alive_task is not None
        stuck = self._write_paused or self.transport.is_closing() or not (self._answering or idle)
        if stuck and self._stuck_before:
            self.transport.abort()
            return
        self._stuck_before = stuck
        self._timer = self.loop.call_later(self.patience_s, self._look)

    def _refuse(self, error: GenlockError) -> None:
        """Answers in place of the application, and closes."""
        if self._answering:
            # It must not write any more; where it has begun to, the answer is cut.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        status = status_of(error.status, error.reason)
        body = encode(error_object(error))
        retry = "retry-after: 1\r\n" if isinstance(error, NoCapacity) else ""
        head = (
            f"HTTP/1.1 {status} {_PHRASES.get(status, 'Bad Request')}\r\ncontent-type: application/json\r\n"
            f"connection: close\r\n{retry}content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


_PHRASES = {400: "Bad Request", 429: "Too Many Requests"}
