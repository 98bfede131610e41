"""Reading from peers so that only typed errors come out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from kvstore.errors import Cancelled
from wire.errors import from_rpc

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ResponseStream(Protocol[T_co]):
    """The part of a unary-stream or stream-stream call that `responses` uses."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def cancel(self) -> bool: ...


async def responses(call: ResponseStream[T]) -> AsyncIterator[T]:
    """Yields what the peer streams. Raises GenlockError for every failure of the call.

    grpc raises CancelledError also when somebody else here cancelled the call; from this CancelledError means that the
    reading task was cancelled, and nothing else. Leaving the loop early cancels the call.
    """
    try:
        async for message in call:
            yield message
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    except asyncio.CancelledError:
        if _own_task_is_cancelled():
            raise
        raise _cancelled() from None
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
        raise _cancelled() from None


def _cancelled() -> Cancelled:
    return Cancelled("cancelled", "the call was cancelled on this side")


def _own_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
