"""Reading from peers so that only typed errors come out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
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
        with _typed_errors():
            async for message in call:
                yield message
    finally:
        # No effect on a call that has ended.
        call.cancel()


async def answer(call: Awaitable[T]) -> T:
    """Awaits a unary call. Raises GenlockError for every failure; CancelledError only when this task was cancelled."""
    with _typed_errors():
        return await call


@contextlib.contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc(error) from error
    except asyncio.CancelledError:
        if _own_task_is_cancelled():
            raise
        raise Cancelled("cancelled", "the call was cancelled on this side") from None


def _own_task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
