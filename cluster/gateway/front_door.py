"""What the gRPC door does before a request is a request: who calls, and then its message, within a time and a size.

grpc by itself reads and parses a call's message before any handler can say that it does not want it. Here a call is
looked at when its headers are there; whoever is refused has sent a message for nothing, and none of it is kept.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from cluster.gateway.admission import MAX_VALUES
from cluster.gateway.places import Places
from cluster.gateway.pool import INLINE_BYTES
from cluster.gateway.state import GatewayState
from kvstore.errors import DeadlineExceeded, GenlockError, InvalidInput
from wire.errors import abort_with
from wire.shape import check_fields

Handler = Any
Parse = Callable[[bytes], Any]
PACKAGE = "/genlock."
# As long as a body of the HTTP door may take.
MESSAGE_TIMEOUT_S = 20.0
# Health and reflection, which ask nobody who he is: their messages are a few bytes that come with the headers.
STRANGER_TIMEOUT_S = 5.0
# A reflection client asks and leaves.
STRANGER_STREAM_S = 60.0
MAX_STRANGERS = 256
# Messages that are read for one tenant beyond the requests that it may have running.
SPARE_MESSAGES = 8


class FrontDoor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the class is generic in stubs only
    """The outermost interceptor. `on_refused(method, error)` hears of calls that reached no handler."""

    def __init__(
        self,
        state: GatewayState,
        services: tuple[ServiceDescriptor, ...],
        on_refused: Callable[[str, GenlockError], None],
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
    ) -> None:
        self._state = state
        self._on_refused = on_refused
        self._timeout_s = message_timeout_s
        self._inputs: dict[str, Descriptor] = {
            f"/{service.full_name}/{method.name}": method.input_type
            for service in services
            for method in service.methods
        }
        # Messages that are on their way, by tenant; "" for those who need not say who they are.
        self._reading = Places("messages of this caller are being read", state.config.api.retry_after_ms)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if not method.startswith(PACKAGE):
            if handler.request_streaming:
                return _brief(handler)
            return self._received(handler, method, "", MAX_STRANGERS, min(STRANGER_TIMEOUT_S, self._timeout_s))
        try:
            caller = self._state.authenticator.caller(handler_call_details.invocation_metadata or ())
        except GenlockError as error:
            self._on_refused(method, error)
            return _refusing(error)
        most = self._state.most_running(caller) + SPARE_MESSAGES
        return self._received(handler, method, caller.tenant, most, self._timeout_s)

    def _received(self, handler: Handler, method: str, tenant: str, most: int, limit_s: float) -> Handler:
        """The handler of one message as one of a stream of messages, of which it reads one: grpc leaves reading those
        to the handler."""
        parse: Parse = handler.request_deserializer or bytes

        async def message(context: Any) -> Any:
            try:
                with self._reading.held(tenant, most):
                    data = await _read(context, limit_s)
                    if len(data) <= INLINE_BYTES:
                        return parse(data)
                    return await self._state.pool.run(tenant, lambda: self._parsed(data, method, parse))
            except GenlockError as error:
                self._on_refused(method, error)
                await abort_with(context, error)

        behavior = handler.unary_stream or handler.unary_unary
        if inspect.isasyncgenfunction(behavior):

            async def generating(_messages: Any, context: Any) -> AsyncIterator[Any]:
                async for reply in behavior(await message(context), context):
                    yield reply

            return grpc.stream_stream_rpc_method_handler(generating, None, handler.response_serializer)

        async def calling(_messages: Any, context: Any) -> Any:
            return await behavior(await message(context), context)

        make = grpc.stream_stream_rpc_method_handler if handler.unary_stream else grpc.stream_unary_rpc_method_handler
        return make(calling, None, handler.response_serializer)

    def _parsed(self, data: bytes, method: str, parse: Parse) -> Any:
        kind = self._inputs.get(method)
        if kind is not None:
            check_fields(data, kind, self._state.limits.context_tokens + MAX_VALUES)
        return parse(data)


async def _read(context: Any, limit_s: float) -> bytes:
    try:
        async with asyncio.timeout(limit_s):
            data = await context.read()
    except TimeoutError:
        raise DeadlineExceeded("body_timeout", f"the request's message took longer than {limit_s:.0f} s") from None
    if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
        raise InvalidInput("malformed_request", "the call carries no message", field="request")
    return bytes(data)


def _refusing(error: GenlockError) -> Handler:
    """Reads no message."""

    async def refuse(_messages: Any, context: Any) -> None:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _brief(handler: Handler) -> Handler:
    """A stream of messages both ways, for a while."""
    behavior = handler.stream_stream
    if behavior is None or not inspect.isasyncgenfunction(behavior):
        return handler

    async def brief(messages: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with asyncio.timeout(STRANGER_STREAM_S):
                async for reply in behavior(messages, context):
                    yield reply
        except TimeoutError:
            await abort_with(
                context, DeadlineExceeded("deadline_exceeded", f"a call of this kind has {STRANGER_STREAM_S:.0f} s")
            )

    return grpc.stream_stream_rpc_method_handler(brief, handler.request_deserializer, handler.response_serializer)
