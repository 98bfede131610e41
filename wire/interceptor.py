"""The server side of typed errors: handlers raise GenlockError, this turns it into a status.

A request that cannot be parsed (broken bytes, a string that is not UTF-8) is INVALID_ARGUMENT with reason
`malformed_request` instead of grpc's UNKNOWN. Anything else that a handler raises becomes reason `internal`, logged
by its class and never by its text, which may quote a prompt.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.errors import GenlockError, InvalidInput
from wire.errors import abort_with, as_genlock_error

log = logging.getLogger(__name__)


class _Malformed:
    """Stands for a request whose bytes are not a message."""


class TypedErrors(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the class is generic in stubs only
    """Wraps all handlers of one package. `on_refused(method, error)` hears of requests that reached no handler."""

    def __init__(
        self,
        package: str = "genlock.",
        on_refused: Callable[[str, GenlockError], None] = lambda _method, _error: None,
    ) -> None:
        self._package = package
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(f"/{self._package}"):
            return handler
        return self._wrapped(handler, method)

    def _wrapped(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        deserializer = _lenient(handler.request_deserializer)
        if handler.unary_unary is not None:
            call = self._coroutine(handler.unary_unary, method)
            return grpc.unary_unary_rpc_method_handler(call, deserializer, handler.response_serializer)
        if handler.unary_stream is not None:
            wrap = self._generator if inspect.isasyncgenfunction(handler.unary_stream) else self._coroutine
            call = wrap(handler.unary_stream, method)
            return grpc.unary_stream_rpc_method_handler(call, deserializer, handler.response_serializer)
        if handler.stream_stream is not None:
            wrap = self._generator if inspect.isasyncgenfunction(handler.stream_stream) else self._coroutine
            # A stream's requests are read by the handler, so a broken one surfaces there as an exception of grpc.
            call = wrap(handler.stream_stream, method)
            return grpc.stream_stream_rpc_method_handler(
                call, handler.request_deserializer, handler.response_serializer
            )
        raise TypeError(f"{method}: calls with streamed requests and one response are not used here")

    def _coroutine(self, behavior: Any, method: str) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                self._refuse_malformed(request, method)
                return await behavior(request, context)
            except Exception as exc:
                await self._abort(context, exc, method)

        return call

    def _generator(self, behavior: Any, method: str) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                self._refuse_malformed(request, method)
                async for message in behavior(request, context):
                    yield message
            except Exception as exc:
                await self._abort(context, exc, method)

        return call

    def _refuse_malformed(self, request: object, method: str) -> None:
        if isinstance(request, _Malformed):
            error = InvalidInput(
                "malformed_request", "the request is not a valid message: strings must be UTF-8", field="request"
            )
            self._on_refused(method, error)
            raise error

    async def _abort(self, context: Any, exc: Exception, method: str) -> None:
        if isinstance(exc, grpc.aio.AbortError):
            raise exc
        error = as_genlock_error(exc)
        if error.reason == "internal":
            where = exc.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "?"
            log.error("internal error in %s: %s at %s", method, type(exc).__name__, line)
        await abort_with(context, error)


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except (DecodeError, UnicodeDecodeError):
            return _Malformed()

    return parse
