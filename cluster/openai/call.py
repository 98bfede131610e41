"""One request of the HTTP door: its body comes in when the caller is known, its answer goes out as it comes.

Status and headers wait for the first message, so that whatever fails before it has a status of its own. A failure after
it is an `error` event, and the response is left without its end: no client can take it for a finished answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from cluster.gateway.admission import MAX_VALUES
from cluster.gateway.pool import INLINE_BYTES
from cluster.gateway.state import GatewayState
from cluster.gateway.steering import AFFINITY_KEY, PRIORITY_KEY
from cluster.openai.errors import error_headers, error_object, http_status
from cluster.openai.fields import bad, parse_object
from cluster.openai.replies import DONE, Answer, Served, encode, event
from cluster.openai.requests import Ask, Kind, in_api_words, read_ask
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import Cancelled, DeadlineExceeded, GenlockError, InvalidInput

BODY_TIMEOUT_S = 20.0
LABEL_HEADER = "x-client-request-id"
DEADLINE_HEADER = "x-genlock-deadline-ms"
STEERING_HEADERS = (AFFINITY_KEY, PRIORITY_KEY)
MAX_DEADLINE_DIGITS = 9
EVENT_STREAM = MappingProxyType(
    {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        # Proxies pass each event on at once.
        "x-accel-buffering": "no",
    }
)


class HttpCall:
    """Implements the gateway's `Call` over one ASGI request."""

    def __init__(
        self, kind: Kind, state: GatewayState, served: Served, scope: Scope, receive: Receive, send: Send,
        created_s: int,
    ) -> None:  # fmt: skip
        self._kind = kind
        self._state = state
        self._served = served
        self._headers = Headers(scope=scope)
        self._receive = receive
        self._send = send
        self._created_s = created_s
        self._received_ms = state.sources.now_ms()
        self._body_read = asyncio.Event()
        self._ask: Ask | None = None
        self._answer: Answer | None = None
        self._begun = False

    @property
    def label(self) -> str:
        return self._headers.get(LABEL_HEADER, "")

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        steering = [(name, value) for name in STEERING_HEADERS for value in self._headers.getlist(name)]
        return [*credentials(self._headers), *steering]

    def remaining_s(self) -> float | None:
        text = self._headers.get(DEADLINE_HEADER)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DEADLINE_DIGITS):
            raise bad("bad_deadline", DEADLINE_HEADER, "must be a number of milliseconds")
        return (int(text) - (self._state.sources.now_ms() - self._received_ms)) / 1000

    async def request(self, tenant: str) -> pb.GenerateRequest:
        """Raises InvalidInput, DeadlineExceeded (`body_timeout`) or Cancelled."""
        self._check_type()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await self._body()
        except TimeoutError:
            raise DeadlineExceeded("body_timeout", f"the body took longer than {BODY_TIMEOUT_S:.0f} s") from None
        self._body_read.set()
        self._ask = await self._read(body, tenant)
        self._answer = Answer(self._ask, self._served, self._created_s)
        return self._ask.request

    async def _read(self, body: bytes, tenant: str) -> Ask:
        """A long body on a thread, in its tenant's turn."""
        most = self._state.limits.context_tokens + MAX_VALUES

        def ask() -> Ask:
            return read_ask(self._kind, parse_object(body, most), self.label, self._served.shows_tools)

        if len(body) <= INLINE_BYTES:
            return ask()
        return await self._state.pool.run(tenant, ask)

    async def write(self, message: pb.GenerateResponse) -> None:
        assert self._ask is not None
        assert self._answer is not None
        if not self._ask.stream:
            self._answer.add(message)
            return
        await self._events([event(chunk) for chunk in self._answer.chunks(message)])

    async def finish(self) -> None:
        """Every answer is whole."""
        assert self._ask is not None
        assert self._answer is not None
        if self._ask.stream:
            await self._events([*(event(chunk) for chunk in self._answer.last_chunks()), DONE], more=False)
        else:
            await self._respond(200, encode(self._answer.whole()), {})

    async def fail(self, error: GenlockError) -> None:
        """The request ends with `error`; a stream that has begun stays without its end."""
        if isinstance(error, InvalidInput):
            error = in_api_words(error, self._ask.names if self._ask is not None else {})
        if self._begun:
            await self._events([event(error_object(error), "error")])
        else:
            await self._respond(http_status(error), encode(error_object(error)), error_headers(error))

    async def gone(self) -> None:
        """Returns when the client has left. Before the body is here, `request` notices."""
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _check_type(self) -> None:
        # A page of another site can send forms and plain text without asking, but not JSON.
        kind = self._headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise InvalidInput("bad_content_type", "send content-type: application/json", field="content-type")
        if self._headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidInput("bad_content_type", "bodies are taken uncompressed", field="content-encoding")

    async def _body(self) -> bytes:
        limit = self._state.message_bytes
        length = self._headers.get("content-length", "0")
        # h11 has checked that it is a number.
        size = int(length)
        parts: list[bytes] = []
        received, more = 0, True
        while more and max(size, received) <= limit:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("cancelled", "the client left before its request was complete")
            parts.append(message.get("body", b""))
            received += len(parts[-1])
            more = message.get("more_body", False)
        if max(size, received) > limit:
            raise InvalidInput("body_too_large", f"the body is over {limit} bytes", field="body")
        return b"".join(parts)

    async def _events(self, events: list[bytes], *, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await self._start(200, EVENT_STREAM)
        if events or not more:
            await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": more})

    async def _respond(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._begun = True
        await self._start(status, {"content-type": "application/json", "content-length": str(len(body)), **headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        if self._answer is not None and self._answer.server_id:
            headers = {**headers, "x-request-id": self._answer.server_id}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def credentials(headers: Headers) -> Iterable[tuple[str, str | bytes]]:
    """The one header that says who calls."""
    return [("authorization", value) for value in headers.getlist("authorization")]
