"""The controller as a detached Ray actor: Ray starts it again whenever its process or its node goes, for ever.

The actor's own thread runs the controller on an event loop of its own, from the first moment of each life: nobody has
to call anything after a restart. Its methods only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.errors import GenlockError
from wire.errors import surprise

ACTOR_NAME = "controller"
FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 30.0


class Service(Protocol):
    """A controller with its endpoint."""

    async def start(self) -> str:
        """Returns the endpoint. Raises a GenlockError; nothing is left then."""
        ...

    async def stop(self) -> None:
        """Ends the controller, not the workers."""
        ...


@dataclass(frozen=True)
class Pulse:
    """How the present life of the actor does. `endpoint` "": not serving, and `error` says why."""

    endpoint: str
    error: str
    pid: int
    # Attempts of this life to start.
    attempts: int
    # Of the settings that it was made with.
    label: str = ""


class ControllerActor:
    """`make` is called in the actor's process, once for each attempt; picklable."""

    def __init__(self, make: Callable[[], Service], label: str = "") -> None:
        self._make = make
        self._label = label
        self._pulse = Pulse("", "starting", os.getpid(), 0, label)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def pulse(self) -> Pulse:
        return self._pulse

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the controller in good order; the workers go on."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stopping.set)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        asyncio.run(self._keep())

    async def _keep(self) -> None:
        """Tries until it serves; a registry that is away is waited for."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        wait_s, attempts = FIRST_RETRY_S, 0
        while not self._stopping.is_set():
            attempts += 1
            error = await self._serve(attempts)
            if error:
                self._pulse = Pulse("", error, os.getpid(), attempts, self._label)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stopping.wait()
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    async def _serve(self, attempts: int) -> str:
        """Until the stop; "" then. What went wrong otherwise."""
        assert self._stopping is not None
        service: Service | None = None
        try:
            service = self._make()
            endpoint = await service.start()
            self._pulse = Pulse(endpoint, "", os.getpid(), attempts, self._label)
            await self._stopping.wait()
        except GenlockError as error:
            return error.message
        except Exception as unexpected:
            return surprise(unexpected, "the controller's start").message
        finally:
            if service is not None:
                await _quietly(service.stop())
        return ""


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception as unexpected:
        surprise(unexpected, "the controller's stop")
