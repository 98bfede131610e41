"""The HTTP door: one port in front of a gateway's request path, on the gateway's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Generator

import uvicorn

from cluster.gateway.state import GatewayState
from cluster.openai.app import make_app
from cluster.openai.connection import BoundedConnection
from cluster.openai.lobby import Lobby
from cluster.tls import front_tls
from kvstore.errors import Unavailable
from wire.loops import keep_going
from wire.tls import TlsSource

OFF = -1
BACKLOG = 256
IDLE_CONNECTION_S = 60
STOP_S = 1
RENEW_S = 2.0
MAX_HEAD_BYTES = 32 << 10


class HttpDoor:
    """Starts, serves, stops. Draining is the gateway's: its running requests are these too."""

    def __init__(self, state: GatewayState, unix_s: Callable[[], float] = time.time) -> None:
        self._state = state
        self._unix_s = unix_s
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._lobby: Lobby | None = None

    async def start(self) -> str:
        """Listens and returns the API's base URL; "" when `api.http_port` is off. Raises Unavailable (`port_taken`),
        InvalidInput (`bad_tls_files`)."""
        api = self._state.config.api
        if api.http_port == OFF:
            return ""
        tls = front_tls(self._state.config.tls)
        listener = _listen(api.http_host, api.http_port)
        bounded = functools.partial(BoundedConnection, max_connections=api.max_connections)
        connection: Callable[..., asyncio.Protocol] = bounded
        if tls is not None:
            context = tls.ssl_context()
            connection = self._lobby = Lobby(context, bounded, api.max_connections)
            self._renewing = asyncio.create_task(
                keep_going(_renewal(tls, context), "certificates of the HTTP door", self._state.surprised),
                name="http certificates",
            )
        config = uvicorn.Config(
            make_app(self._state, self._unix_s),
            # The library calls it like the class that it takes it for.
            http=connection,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            # What goes wrong is in the response and in the outcomes; the library's own lines would quote requests.
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_S,
            timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http door")
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            await self._serving
        host, port = listener.getsockname()[:2]
        scheme = "http" if tls is None else "https"
        return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"

    async def stop(self) -> None:
        """Takes no more connections, lets answers that are being written end for a moment, ends the rest."""
        server, self._server = self._server, None
        serving, self._serving = self._serving, None
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
        if server is not None and serving is not None:
            server.should_exit = True
            if self._lobby is not None:
                await self._lobby.close()
            await serving


def _renewal(tls: TlsSource, context: ssl.SSLContext) -> Callable[[], Awaitable[None]]:
    """New connections are greeted with the files as they are."""
    generation = tls.current().generation

    async def renew() -> None:
        nonlocal generation
        await asyncio.sleep(RENEW_S)
        generation = tls.refresh(context, generation)

    return renew


class _Server(uvicorn.Server):
    """Signals are the command line's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise Unavailable("bad_host", f"{host} is no address to listen on", field="api.http_host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise Unavailable(
            "port_taken",
            f"cannot listen on {host}:{port}: choose another api.http_port (0: any free one; -1: none)",
            field="api.http_port",
        ) from error
    listener.setblocking(False)
    return listener
