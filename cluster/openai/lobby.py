"""Where connections of the HTTP door wait while their TLS greeting is under way: bounded in number and time.

The event loop's own TLS server counts none of them, and a stranger needs no certificate to begin one.

    accepted ─► Greeting ─► greeted ─► the connection itself, which is bounded from here on
                   └─► too many, too late, no TLS: gone, without an answer
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from cluster.openai.connection import BoundedConnection
from wire.ending import end_tasks

GREETING_S = 10.0


class Lobby:
    """Called like the class of a connection, by the server that accepts them."""

    greeting_s = GREETING_S

    def __init__(self, context: ssl.SSLContext, make: Callable[..., BoundedConnection], max_greetings: int) -> None:
        self.context = context
        self.make = make
        self.max_greetings = max_greetings
        self.greetings: set[asyncio.Task[None]] = set()

    def __call__(self, **of_server: Any) -> Greeting:
        return Greeting(self, self.make(**of_server))

    async def close(self) -> None:
        await end_tasks(self.greetings)


class Greeting(asyncio.Protocol):
    """One connection, until it was greeted. What comes right behind the greeting is kept for the connection."""

    def __init__(self, lobby: Lobby, connection: BoundedConnection) -> None:
        self._lobby = lobby
        self._connection = connection
        self._data = bytearray()
        self._ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # The greeting is read by nobody else.
        transport.pause_reading()
        greetings = self._lobby.greetings
        if len(greetings) >= self._lobby.max_greetings:
            transport.abort()
            return
        task = asyncio.create_task(self._greet(transport), name="greeting of the HTTP door")
        greetings.add(task)
        task.add_done_callback(greetings.discard)

    def data_received(self, data: bytes) -> None:
        self._data += data

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, _error: Exception | None) -> None:
        self._ended = True

    async def _greet(self, plain: asyncio.Transport) -> None:
        lobby, secure = self._lobby, None
        try:
            secure = await asyncio.get_running_loop().start_tls(
                plain, self, lobby.context, server_side=True, ssl_handshake_timeout=lobby.greeting_s
            )
        except OSError:
            return  # it is no TLS, it took too long, or the client went away
        finally:
            if secure is None or self._ended:
                plain.abort()
        if secure is None or self._ended:
            return
        secure.set_protocol(self._connection)
        self._connection.connection_made(secure)
        if self._data:
            self._connection.data_received(bytes(self._data))
