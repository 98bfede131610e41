"""Reading from peers so that only typed errors come out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from kvstore.errors import Cancelled
from wire.errors import error_of_call, from_rpc

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ResponseStream(Protocol[T_co]):
    """The part of a unary-stream or stream-stream call that `responses` uses."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def cancel(self) -> bool: ...

    async def code(self) -> grpc.StatusCode: ...

    async def details(self) -> str: ...

    async def trailing_metadata(self) -> Any: ...


async def responses(call: ResponseStream[T]) -> AsyncIterator[T]:
    """Yields what the peer streams. Raises GenlockError for every failure of the call.

    grpc raises CancelledError also when it was the peer that answered CANCELLED; here CancelledError means that this
    task was cancelled, and nothing else. Leaving the loop early cancels the call.
    """
    try:
        async for message in call:
            yield message
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    except asyncio.CancelledError:
        if _own_task_is_cancelled():
            raise
        raise await error_of_call(call) from None
    finally:
        # No effect on a call that has ended.
        call.cancel()


async def answer(call: Awaitable[T]) -> T:
    """Awaits a unary call. Raises GenlockError for every failure; CancelledError only when this task was cancelled."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    except asyncio.CancelledError:
        if _own_task_is_cancelled():
            raise
        raise Cancelled("cancelled", "the peer cancelled the call") from None


def _own_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
