"""A gateway that finds its workers in the registry.

The registry says who there is; whether a worker can be used says its own answer to this gateway's poll. So losing the
registry, or all that is in it, takes no worker away that still answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from cluster.gateway.fleet import NOT_ASKED, Fleet, WorkerState
from cluster.gateway.fleet import WorkerRecord as Known
from cluster.gateway.state import GatewayState
from cluster.gateway.telling import Teller
from cluster.registry.base import Registry
from cluster.registry.records import Desired, WorkerRecord
from kvstore.errors import GenlockError
from wire.ending import end_tasks
from wire.loops import keep_going


@dataclass(frozen=True)
class View:
    """What was last read of the registry."""

    incarnations: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    revision: int = 0
    cordoned: frozenset[str] = frozenset()
    cordoned_lives: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    # As of the same revision: a role of which no worker is wanted, and then until a request can be served again.
    asleep: bool = False
    # When the controller last gave a registry that had lost it all what is wanted, Unix milliseconds; 0: never.
    refilled_ms: int = 0


@dataclass(frozen=True)
class Followed:
    """The fleet after one look, the endpoints where nobody of it is any more, and whether somebody is new."""

    fleet: Fleet
    view: View
    left: tuple[str, ...]
    news: bool


def follow(fleet: Fleet, last: View, records: Sequence[WorkerRecord], desired: Desired) -> Followed:
    """Pure. New workers come in, moved ones are taken anew, cordoned ones are marked, and those go that are neither in
    the registry nor answer. Cordons of a lower revision than one that was seen (the store was flushed, or a replica
    lags) are not believed."""
    before = {record.endpoint for record in fleet.workers.values()}
    for record in records:
        known = fleet.workers.get(record.worker_id)
        # The same endpoint with another incarnation is the poll's to judge: a record may be older than an answer.
        if known is None or known.endpoint != record.endpoint or known.role is not record.role:
            fleet = fleet.added(record.worker_id, record.role, record.endpoint)
    registered = {record.worker_id for record in records}
    for worker_id in [key for key, known in fleet.workers.items() if key not in registered and gone(known)]:
        fleet = fleet.removed(worker_id)
    if desired.revision >= last.revision:
        last = replace(
            last, revision=desired.revision, cordoned=desired.cordoned, cordoned_lives=desired.cordoned_lives,
            refilled_ms=desired.refilled_ms,
        )  # fmt: skip
    # After a flush nothing is wanted for a moment: that is no sleep, and does not end one.
    zero = desired.revision > 0 and min(desired.prefill, desired.decode) == 0
    last = replace(last, asleep=zero or (last.asleep and not fleet.serving()))
    incarnations = {record.worker_id: record.incarnation for record in records}
    news = any(last.incarnations.get(key) != incarnation for key, incarnation in incarnations.items())
    after = {record.endpoint for record in fleet.workers.values()}
    # Lives are remembered through an empty answer, so that it is no news when they are back.
    remembered = {key: value for key, value in last.incarnations.items() if key in fleet.workers}
    view = replace(last, incarnations=MappingProxyType({**remembered, **incarnations}))
    own = frozenset(record.worker_id for record in records if record.cordoned)
    lives = view.cordoned_lives.items() & view.incarnations.items()
    fleet = replace(fleet, cordoned=view.cordoned | own | {worker_id for worker_id, _life in lives})
    return Followed(fleet, view, tuple(sorted(before - after)), news)


def gone(known: Known) -> bool:
    """Whether this gateway itself knows that the worker is not there: it does not answer, or another one does."""
    if known.state is not WorkerState.UNREACHABLE or known.detail == NOT_ASKED:
        return False
    return known.status is None or known.status.worker_id != known.worker_id or known.status.role != known.role.value


@dataclass(frozen=True)
class WatchHealth:
    """How reading goes. Times are the gateway's, monotonic milliseconds."""

    reads: int = 0
    failing_since_ms: float | None = None
    error: str = ""

    def ok(self) -> WatchHealth:
        return WatchHealth(self.reads + 1)

    def failed(self, now_ms: float, error: str) -> WatchHealth:
        since_ms = now_ms if self.failing_since_ms is None else self.failing_since_ms
        return replace(self, failing_since_ms=since_ms, error=error[:256])

    def words(self, now_ms: float, skipped: int) -> str:
        if self.failing_since_ms is not None:
            rest = "serving with the last view" if self.reads else "there is no view yet"
            return f"unreachable for {max(0.0, now_ms - self.failing_since_ms) / 1000:.0f} s: {self.error}; {rest}"
        if not self.reads:
            return "not read yet"
        return f"ok; {skipped} records could not be read" if skipped else "ok"


class RegistryWatch:
    """Reads the registry again and again into a gateway's fleet."""

    def __init__(self, state: GatewayState, registry: Registry, unix_ms: Callable[[], int]) -> None:
        self._unix_ms = unix_ms
        self._state = state
        self._registry = registry
        self._task: asyncio.Task[None] | None = None
        self._view = View()
        self._teller = Teller(state, registry)
        self.health = WatchHealth()
        state.registry_health = self._words
        state.find_gateways = registry.gateways

    def start(self) -> None:
        self._task = asyncio.create_task(
            keep_going(self._again, "the registry watch", self._state.surprised), name="registry watch"
        )

    async def stop(self) -> None:
        """Closes the registry too."""
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
        await self._registry.close()

    def _words(self) -> str:
        words = self.health.words(self._state.sources.now_ms(), self._registry.skipped)
        if self._view.refilled_ms:
            words += f"; refilled {max(0, self._unix_ms() - self._view.refilled_ms) / 1000:.0f} s ago"
        untold = self._teller.error
        return f"{words}; does not take what this gateway tells: {untold}" if untold and self._reads else words

    @property
    def _reads(self) -> bool:
        return self.health.failing_since_ms is None

    async def look(self) -> None:
        """One look, and what came to the door is told; a registry that does not answer changes nothing but the
        health."""
        await self._read()
        await self._teller.tell()

    async def _read(self) -> None:
        state = self._state
        try:
            records = await self._registry.workers()
            desired = await self._registry.desired()
        except GenlockError as error:
            self.health = self.health.failed(state.sources.now_ms(), error.message)
            return
        except Exception as exc:
            # A surprise costs this look; the gateway serves on.
            self.health = self.health.failed(state.sources.now_ms(), f"{type(exc).__name__}: {exc}")
            return
        self.health = self.health.ok()
        done = follow(state.fleet, self._view, records, desired)
        self._view = done.view
        if done.fleet != state.fleet:
            state.set_fleet(done.fleet)
        state.set_asleep(done.view.asleep)
        for endpoint in done.left:
            state.retire_channel(endpoint)
        if done.news:
            state.look_again()

    async def _again(self) -> None:
        await self.look()
        await asyncio.sleep(self._state.config.registry.poll_ms / 1000)
