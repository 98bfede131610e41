"""In-process engine for tests and the simulator: moves real bytes between pools that share one `MemoryFabric`.

Time is the fabric's: `pump(now_ms)` lands what is due and nothing ever sleeps or starts a thread. A transfer that
is due within the time-out given to `wait` lands at once, as if the caller had slept until then; otherwise it is
TIMED_OUT and its bytes land when the fabric is pumped. A simulator that wants other events to happen in between
pumps up to `MemoryTransfer.due_ms` itself and then waits 0 ms.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidInput, TransferError, Unavailable
from kvstore.transfer.base import PagePair, Peer, PoolExport, Transfer, TransferState
from kvstore.transfer.common import I64, U8, Ids, PoolEngine, check_ids, slots_of, tags_of
from kvstore.transfer.faults import (
    LANDS_LATER,
    Ending,
    FaultHooks,
    FaultPlan,
    Step,
    TransferFaults,
    TransferInfo,
    damage,
    is_torn,
    no_faults,
    steps_of,
)


@dataclass(frozen=True)
class _Pool:
    """A published pool. Identity is the life: a restarted engine publishes another object."""

    buffer: U8
    slots: int
    slot_bytes: int


@dataclass
class _Source:
    """One connection to a pool."""

    export: PoolExport
    pool: _Pool
    lost: bool = False
    follows_restart: bool = False


class MemoryFabric:
    """What the engines of one simulated network share: pools by address, the clock, copies that are under way."""

    def __init__(self, plan: FaultPlan = no_faults, hooks: FaultHooks | None = None) -> None:
        self.plan = plan
        self.hooks = hooks or FaultHooks()
        self.now_ms = 0
        self.lock = threading.RLock()
        self._pools: dict[str, _Pool] = {}
        self._pending: dict[int, MemoryTransfer] = {}
        self._numbers = itertools.count()

    @property
    def pending(self) -> int:
        """Transfers with bytes that may still land."""
        return len(self._pending)

    @property
    def pools(self) -> int:
        return len(self._pools)

    def pump(self, now_ms: int) -> int:
        """Moves the clock to `now_ms` and lands what is due, in order of due time. Returns how many transfers."""
        with self.lock:
            self.now_ms = max(self.now_ms, now_ms)
            return self._land([t for t in self._pending.values() if t.due_ms is not None and t.due_ms <= now_ms])

    def land_all(self) -> int:
        """Lands everything that ever will, whatever its due time. Dropped transfers stay pending."""
        with self.lock:
            return self._land([t for t in self._pending.values() if t.due_ms is not None])

    def kill(self, address: str) -> None:
        """The process that owns the pool at `address` dies: its pool is gone. Unknown addresses are ignored."""
        with self.lock:
            self._pools.pop(address, None)

    def find(self, address: str) -> _Pool | None:
        return self._pools.get(address)

    def add_pool(self, address: str, pool: _Pool) -> None:
        with self.lock:
            self._pools[address] = pool

    def remove_pool(self, address: str, pool: _Pool | None) -> None:
        """Removes the pool if it is still the one that lives at `address`."""
        with self.lock:
            if pool is not None and self._pools.get(address) is pool:
                del self._pools[address]

    def next_number(self) -> int:
        return next(self._numbers)

    def enlist(self, transfer: MemoryTransfer) -> None:
        self._pending[transfer.number] = transfer

    def forget(self, transfer: MemoryTransfer) -> None:
        self._pending.pop(transfer.number, None)

    def abandon(self, engine: MemoryEngine) -> None:
        """Drops the copies into the pool of an engine that is being torn down."""
        for transfer in [t for t in self._pending.values() if t.engine is engine]:
            transfer.abandon()

    def _land(self, due: list[MemoryTransfer]) -> int:
        due.sort(key=lambda t: (t.due_ms, t.number))
        for transfer in due:
            transfer.land()
        return len(due)


class MemoryTransfer(Transfer):
    """One batch. `due_ms` is when its bytes land, None for never."""

    def __init__(
        self, engine: MemoryEngine, source: _Source, steps: list[Step], faults: TransferFaults, number: int
    ) -> None:
        self.number = number
        self.due_ms: int | None = None if faults.ending is Ending.DROP else engine.fabric.now_ms + faults.delay_ms
        self.engine = engine
        self._source = source
        self._faults = faults
        self._steps = steps
        self._count = len(steps)
        self._begun = False
        self._state = TransferState.RUNNING

    @property
    def state(self) -> TransferState:
        """RUNNING or the end state, without waiting."""
        return self._state

    def wait(self, timeout_ms: int) -> TransferState:
        fabric = self.engine.fabric
        with fabric.lock:
            if self._state is not TransferState.RUNNING:
                return self._state
            ending = self._faults.ending
            if ending is Ending.EARLY_NOTICE:
                self._state = TransferState.DONE
            elif ending is Ending.LATE:
                self._state = TransferState.TIMED_OUT
            elif ending in (Ending.ERROR_REST_LANDS, Ending.PEER_LOSS):
                self._fail_midway()
            elif self.due_ms is not None and self.due_ms - fabric.now_ms <= timeout_ms:
                self.land()
            else:
                self._state = TransferState.TIMED_OUT
            return self._state

    def quiesced(self) -> bool:
        return not self._steps

    def land(self) -> None:
        """Copies what has not been copied yet. The caller holds the fabric's lock."""
        self._copy(len(self._steps))
        if self._state is TransferState.RUNNING and self._faults.ending not in LANDS_LATER:
            self._state = TransferState.DONE

    def abandon(self) -> None:
        """The reader's engine was torn down: nothing lands any more."""
        self._steps = []
        if self._state is TransferState.RUNNING:
            self._state = TransferState.FAILED
        self.engine.fabric.forget(self)

    def _fail_midway(self) -> None:
        self._copy(min(self._faults.landed_pages, len(self._steps)))
        if self._faults.ending is Ending.PEER_LOSS:
            self._source.lost = True
            self.abandon()
        self._state = TransferState.FAILED

    def _copy(self, pages: int) -> None:
        hooks = self.engine.fabric.hooks
        if hooks.before_copy is not None and not self._begun:
            self._begun = True
            hooks.before_copy([PagePair(s.remote_page_id, s.local_page_id) for s in self._steps])
        remote = self.engine.reach(self._source)
        if remote is None:
            self.abandon()
            return
        remote_SU8 = slots_of(remote.buffer, remote.slots, remote.slot_bytes)
        local_SU8 = self.engine.slots_SU8
        for step in self._steps[:pages]:
            source_U8, page_U8 = remote_SU8[step.remote_page_id], local_SU8[step.local_page_id]
            half = page_U8.size // 2
            page_U8[:half] = source_U8[:half]
            if is_torn(self._faults, step.place, self._count) and hooks.between_halves is not None:
                hooks.between_halves(PagePair(step.remote_page_id, step.local_page_id))
            page_U8[half:] = source_U8[half:]
            damage(self._faults, step.place, self._count, page_U8)
        self._steps = self._steps[pages:]
        if not self._steps:
            self.engine.fabric.forget(self)


class MemoryEngine(PoolEngine[_Source]):
    """`address` names the pool on its fabric; a restarted process takes its predecessor's address over."""

    name = "memory"

    def __init__(self, fabric: MemoryFabric, address: str) -> None:
        super().__init__()
        if not address:
            raise InvalidInput("bad_address", "a memory engine needs a non-empty address", field="address")
        self.fabric = fabric
        self._address = address
        self._pool: _Pool | None = None

    def reach(self, source: _Source) -> _Pool | None:
        """The pool that a read over this connection touches; None when the peer is gone."""
        living = self.fabric.find(source.export.address)
        if source.lost or living is None:
            return None
        same_shape = (living.slots, living.slot_bytes) == (source.pool.slots, source.pool.slot_bytes)
        return living if living is source.pool or (source.follows_restart and same_shape) else None

    def _map(self, nbytes: int) -> U8:
        return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)

    def _register(self, incarnation: int) -> str:
        assert self._buffer is not None  # publish checked it
        self._pool = _Pool(self._buffer, self._slots, self._slot_bytes)
        self.fabric.add_pool(self._address, self._pool)
        return self._address

    def _attach(self, export: PoolExport) -> _Source:
        pool = self.fabric.find(export.address)
        if pool is None:
            raise Unavailable("peer_gone", f"no pool lives at {export.address!r}")
        if (pool.slots, pool.slot_bytes) != (export.slots, export.slot_bytes):
            raise Unavailable("incarnation_changed", "the pool at this address has another shape than the export")
        return _Source(export, pool)

    def _detach(self, source: _Source) -> None:
        pass

    def _check_remote(self, peer: Peer, remote_ids: Ids) -> None:
        """Left to `_start`: the transfer's faults may switch the check off."""

    def _start(self, source: _Source, remote_ids: Ids, local_ids: Ids) -> Transfer:
        fabric = self.fabric
        with fabric.lock:
            number = fabric.next_number()
            faults = fabric.plan(TransferInfo(number, self._address, source.export, len(remote_ids)))
            if faults.wrap_out_of_range:
                remote_ids = tuple(i % source.export.slots for i in remote_ids)
            check_ids(remote_ids, source.export.slots, "remote_page_id")
            source.follows_restart |= faults.follow_restart
            if self.reach(source) is None:
                raise TransferError("peer_gone", "the peer's pool is gone")
            steps = steps_of(faults, remote_ids, local_ids)
            transfer = MemoryTransfer(self, source, steps, faults, number)
            fabric.enlist(transfer)
            return transfer

    def _live_tags(self, source: _Source, timeout_ms: int) -> I64:
        with self.fabric.lock:
            pool = self.reach(source)
            if pool is None:
                raise TransferError("peer_gone", "the peer's pool is gone")
            return tags_of(pool.buffer, pool.slots).copy()

    def _tear_down(self) -> None:
        with self.fabric.lock:
            self.fabric.abandon(self)
            self.fabric.remove_pool(self._address, self._pool)
