"""Connections between the parts of a cluster: plain, or with certificates on both sides."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from kvstore.errors import Unauthenticated
from wire.errors import abort_with
from wire.options import MAX_MESSAGE_BYTES, channel_options
from wire.tls import PART_NAME, TlsSource

MAX_CHANNELS = 1024
# Channels of earlier certificates: calls that run on them go on.
MAX_RETIRED = 64


class Dialer:
    """How parts reach each other and listen for each other. `tls` None: plain."""

    def __init__(self, tls: TlsSource | None = None) -> None:
        self._tls = tls

    @property
    def generation(self) -> int:
        """Moves when the certificates do: then new calls belong on new channels."""
        return 0 if self._tls is None else self._tls.current().generation

    @property
    def secure(self) -> bool:
        return self._tls is not None

    def open(self, endpoint: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
        """A channel to another part of the cluster; connects at the first call."""
        options: list[tuple[str, Any]] = list(channel_options(max_message_bytes))
        if self._tls is None:
            return grpc.aio.insecure_channel(endpoint, options=options)
        options.append(("grpc.ssl_target_name_override", PART_NAME))
        return grpc.aio.secure_channel(endpoint, self._tls.channel_credentials(), options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Listens at `host:port` for parts of the cluster and returns the port. Raises RuntimeError like grpc."""
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.server_credentials(ask_peers=True))

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor[Any, Any], ...]:
        """What a server for parts of the cluster checks of its callers."""
        return () if self._tls is None else (PartsOnly(),)


class PartsOnly(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the class is generic in stubs only
    """A certificate of the CA is not enough: its holder must be a part of the cluster, not a client of it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        return handler if handler is None else _guarded(handler)


def _is_part(context: Any) -> bool:
    names = context.auth_context().get("x509_subject_alternative_name", ())
    return PART_NAME.encode() in names


async def _refuse(context: Any) -> None:
    await abort_with(
        context,
        Unauthenticated("peer_not_a_part", f"the caller's certificate does not carry the name {PART_NAME}"),
    )


def _guarded(handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler behind the check; all our services are coroutines or async generators."""
    # grpc keeps the four kinds of methods in four fields, of which one is set.
    plain = handler.unary_unary or handler.stream_unary
    streaming = handler.unary_stream or handler.stream_stream
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    coders = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }

    async def call(request: Any, context: Any) -> Any:
        if not _is_part(context):
            await _refuse(context)
        return await plain(request, context)

    if not handler.response_streaming:
        return _typed(make(call, **coders))
    if not inspect.isasyncgenfunction(streaming):

        async def writing(request: Any, context: Any) -> None:
            if not _is_part(context):
                await _refuse(context)
            await streaming(request, context)

        return _typed(make(writing, **coders))

    async def generating(request: Any, context: Any) -> Any:
        if not _is_part(context):
            await _refuse(context)
        async for message in streaming(request, context):
            yield message

    return _typed(make(generating, **coders))


def _typed(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    return handler


class Channels:
    """One channel to each endpoint; the one that was used longest ago goes when there are too many."""

    def __init__(self, dialer: Dialer | None = None, limit: int = MAX_CHANNELS) -> None:
        self._dialer = dialer or Dialer()
        self._limit = limit
        self._generation = self._dialer.generation
        self._open: dict[str, grpc.aio.Channel] = {}
        self._retired: deque[grpc.aio.Channel] = deque()

    def __len__(self) -> int:
        return len(self._open) + len(self._retired)

    async def get(self, endpoint: str) -> grpc.aio.Channel:
        generation = self._dialer.generation
        if generation != self._generation:
            self._generation = generation
            self._retired.extend(self._open.values())
            self._open.clear()
        channel = self._open.pop(endpoint, None) or self._dialer.open(endpoint)
        self._open[endpoint] = channel
        if len(self._open) > self._limit:
            await self._open.pop(next(iter(self._open))).close(None)
        while len(self._retired) > MAX_RETIRED:
            await self._retired.popleft().close(None)
        return channel

    async def close(self) -> None:
        channels = [*self._open.values(), *self._retired]
        self._open.clear()
        self._retired.clear()
        for channel in channels:
            await channel.close(None)
