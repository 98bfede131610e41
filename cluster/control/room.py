"""Keeps the nodes fitting to the fleet, where the controller owns them: one loop beside the controller's turns.

It holds no state of its own: each look starts from the rows and from what there is. A failure changes nothing, is told
once, and is tried again at the next look.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from cluster.control.hands import Need, Room
from cluster.control.needs import needs_of
from cluster.control.state import State
from cluster.registry.base import Registry
from cluster.roles import Role
from kvstore.errors import GenlockError, Unavailable
from wire.errors import surprise

log = logging.getLogger(__name__)

# The least time between two looks, whatever happens.
PAUSE_S = 0.2


class RoomKeeper:
    """`look`: the controller's present state, None once a later life of it decides; `tell`: writes an event."""

    def __init__(
        self,
        room: Room,
        registry: Registry,
        look: Callable[[], State | None],
        tell: Callable[[str], None],
        every_ms: int,
    ) -> None:
        self.room = room
        # Why the last look failed; empty: it did not.
        self.error = ""
        self._registry = registry
        self._look = look
        self._tell = tell
        self._every_s = every_ms / 1000
        self._wake = asyncio.Event()
        # Whether the first turn has told which workers there are. Until then all nodes would look empty.
        self.awake = False

    def wake(self) -> None:
        """The rows have changed. The first look waits for it."""
        self.awake = True
        self._wake.set()

    async def turn(self) -> None:
        if not self.awake:
            await self._wake.wait()
        self._wake.clear()
        await self._fit()
        await asyncio.sleep(PAUSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._every_s):
                await self._wake.wait()

    async def _fit(self) -> None:
        if self._look() is None:
            return
        error = ""
        try:
            for change in await self.room.fit(self._needs):
                self._tell(change)
                self._wake.set()  # whether that was enough, the next look tells
        except GenlockError as failure:
            error = f"{failure.reason}: {failure.message}"
        except Exception as unexpected:
            error = surprise(unexpected, "a look at the nodes").message
        if error != self.error:
            self._tell(f"nodes do not follow the fleet: {error}" if error else "nodes follow the fleet again")
        self.error = error

    async def _needs(self) -> Mapping[Role, Need]:
        records = await self._registry.workers()
        state = self._look()
        if state is None:
            raise Unavailable("superseded", "a later life of the controller decides")
        return needs_of(state, records)
