"""Carries out planned faults on an arena, and heals each one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from cluster.chaos.arena import Arena
from cluster.chaos.plan import Fault, PlannedFault
from cluster.chaos.pressure import Pressure
from cluster.chaos.registry import RegistryServer
from cluster.chaos.worker import Switch

# Requests that the plan's load already holds; nothing more is to be done.
_IN_THE_LOAD = frozenset({Fault.CANCEL_STORM, Fault.SLOW_READERS, Fault.SAME_IDS})


class Link(Protocol):
    """What can be done to the link between two hosts: to the traffic of these ports of either, and to no other."""

    def fault(
        self, near_ports: Sequence[int], far_ports: Sequence[int], kbit_per_s: int
    ) -> AbstractAsyncContextManager[None]:
        """Carries so much, or nothing at all for 0, until it is left."""


class Saboteur:
    """`done` counts the faults by kind; `errors` are those that could not be carried out or healed."""

    def __init__(self, arena: Arena, link: Link | None, registry: RegistryServer | None = None) -> None:
        self._arena = arena
        self._link = link
        self._registry = registry
        self._registry_turn = asyncio.Lock()  # a server that is down cannot be flushed or killed again
        self._pressure = Pressure()
        self.done: Counter[str] = Counter()
        self.kills = 0
        self.errors: list[str] = []
        self._holds: Counter[str] = Counter()  # faults that hold a worker now

    @property
    def broken(self) -> set[str]:
        """Workers that are under a fault now."""
        return {name for name, count in self._holds.items() if count}

    @property
    def balloon_mib(self) -> int:
        """The most memory that one fault took."""
        return self._pressure.most_mib

    async def carry_out(self, fault: PlannedFault) -> None:
        """Waits for the fault's time, breaks, waits, heals. Never raises for what the cluster answers."""
        await asyncio.sleep(fault.at_ms / 1000)
        held = {fault.target, fault.peer} - {""}
        self._holds.update(held)
        try:
            await self._work(fault)
            self.done[fault.kind.value] += 1
        except Exception as error:
            self.errors.append(f"{fault.kind.value} of {fault.target or 'all'}: {error!r}"[:300])
        finally:
            self._holds.subtract(held)

    async def _work(self, fault: PlannedFault) -> None:
        if fault.kind in _IN_THE_LOAD:
            return
        work: dict[Fault, Callable[[PlannedFault], Awaitable[None]]] = {
            Fault.KILL: self._kill,
            Fault.SMALL_POOL: self._kill,
            Fault.STOP: self._stop,
            Fault.DISK_FULL: self._switch,
            Fault.CLOCK_JUMP: self._switch,
            Fault.FOREIGN_PAGE: self._switch,
            Fault.GATEWAY_RESTART: lambda _fault: self._arena.restart_gateway(),
            Fault.REGISTRY_KILL: self._kill_registry,
            Fault.REGISTRY_FLUSH: lambda _fault: self._flush_registry(),
            Fault.LINK_CUT: self._link_fault,
            Fault.LINK_SLOW: self._link_fault,
            Fault.MEMORY_PRESSURE: lambda fault: self._pressure.squeeze(fault.amount, fault.for_ms / 1000),
        }
        await work[fault.kind](fault)

    async def _kill(self, fault: PlannedFault) -> None:
        self.kills += 1
        await self._arena.kill(fault.target, fault.for_ms / 1000, fault.amount)

    async def _stop(self, fault: PlannedFault) -> None:
        self._arena.halt(fault.target)
        try:
            await asyncio.sleep(fault.for_ms / 1000)
        finally:
            self._arena.go_on(fault.target)

    async def _switch(self, fault: PlannedFault) -> None:
        switch = {
            Fault.DISK_FULL: Switch.DISK_FULL,
            Fault.CLOCK_JUMP: Switch.CLOCK_SHIFT_MS,
            Fault.FOREIGN_PAGE: Switch.FOREIGN_PAGES,
        }[fault.kind]
        board = self._arena.board(fault.target)
        board.set(switch, fault.amount or 1)
        try:
            await asyncio.sleep(fault.for_ms / 1000)
        finally:
            board.set(switch, 0)

    @property
    def _the_registry(self) -> RegistryServer:
        assert self._registry is not None, "planned only where there is a server"
        return self._registry

    async def _kill_registry(self, fault: PlannedFault) -> None:
        async with self._registry_turn:
            self._the_registry.kill()
            try:
                await asyncio.sleep(fault.for_ms / 1000)
            finally:
                await self._the_registry.start()

    async def _flush_registry(self) -> None:
        async with self._registry_turn:
            await self._the_registry.flush()

    async def _link_fault(self, fault: PlannedFault) -> None:
        assert self._link is not None, "planned only where there is a link"
        near_ports, far_ports = self._arena.pair_ports(fault.target, fault.peer)
        async with self._link.fault(near_ports, far_ports, fault.amount):
            await asyncio.sleep(fault.for_ms / 1000)
