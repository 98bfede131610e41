"""Faults around any real engine, for tests and drills on a live cluster.

`FaultyEngine` wraps an engine and carries the record of faults.py out with real copies, real time and real threads:
it changes which pages the inner engine pulls, when, and what is in our slots afterwards. Without a fault a transfer
is the inner engine's own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from kvstore.errors import InvalidInput, TransferError, TransferTimeout
from kvstore.transfer.base import PagePair, Peer, PoolExport, Transfer, TransferEngine, TransferState
from kvstore.transfer.common import (
    CLOSE_TIMEOUT_MS,
    I64,
    U8,
    ClockMs,
    check_ids,
    check_local_ids,
    monotonic_ms,
    slots_of,
    split_pairs,
)
from kvstore.transfer.faults import (
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

LANDING_TIMEOUT_MS = 60_000
GATE_POLL_S = 0.005


class FaultyTransfer(Transfer):
    """One batch with faults. Its bytes land in `wait`, or later from a thread of their own."""

    def __init__(self, engine: FaultyEngine, peer: Peer, steps: list[Step], faults: TransferFaults) -> None:
        self._engine = engine
        self._peer = peer
        self._steps = steps
        self._count = len(steps)
        self._faults = faults
        self._inner: list[Transfer] = []
        self._late: threading.Thread | None = None
        self._state = TransferState.RUNNING
        self._lock = threading.Lock()

    def wait(self, timeout_ms: int) -> TransferState:
        with self._lock:
            if self._state is TransferState.RUNNING:
                self._state = self._end(timeout_ms)
            return self._state

    def quiesced(self) -> bool:
        if self._engine.stopped:
            return True
        if self._late is not None and self._late.is_alive():
            return False
        return not self._steps and self._state is not TransferState.RUNNING and all(t.quiesced() for t in self._inner)

    def _end(self, timeout_ms: int) -> TransferState:
        faults, engine = self._faults, self._engine
        match faults.ending:
            case Ending.DROP:
                engine.closing.wait(timeout_ms / 1000)
                return TransferState.TIMED_OUT
            case Ending.EARLY_NOTICE:
                self._land_later()
                return TransferState.DONE
            case Ending.LATE:
                self._land_later()
                return TransferState.TIMED_OUT
            case Ending.ERROR_REST_LANDS:
                self._land(min(faults.landed_pages, self._count), timeout_ms)
                self._land_later()
                return TransferState.FAILED
            case Ending.PEER_LOSS:
                self._land(min(faults.landed_pages, self._count), timeout_ms)
                self._steps = []
                engine.lose(self._peer)
                return TransferState.FAILED
            case Ending.HONEST:
                engine.closing.wait(min(faults.delay_ms, timeout_ms) / 1000)
                if faults.delay_ms > timeout_ms:
                    self._land_later(faults.delay_ms - timeout_ms)
                    return TransferState.TIMED_OUT
                return self._land(self._count, timeout_ms - faults.delay_ms)

    def _land_later(self, delay_ms: int | None = None) -> None:
        after_ms = self._faults.delay_ms if delay_ms is None else delay_ms
        self._late = self._engine.start_thread(lambda: self._land_when_allowed(after_ms))

    def _land_when_allowed(self, delay_ms: int) -> None:
        if self._engine.await_landing(delay_ms):
            self._land(len(self._steps), LANDING_TIMEOUT_MS)

    def _land(self, pages: int, timeout_ms: int) -> TransferState:
        """Pulls the next `pages` steps through the inner engine and damages them. Keeps the rest."""
        steps, self._steps = self._steps[:pages], self._steps[pages:]
        if not steps:
            return TransferState.DONE
        hooks, slots_SU8 = self._engine.hooks, self._engine.slots_SU8
        deadline_ms = self._engine.clock_ms() + timeout_ms
        if hooks.before_copy is not None:
            hooks.before_copy([PagePair(s.remote_page_id, s.local_page_id) for s in steps])
        torn = [s for s in steps if is_torn(self._faults, s.place, self._count)]
        state = self._pull([s for s in steps if s not in torn], deadline_ms)
        for step in torn:
            if state is TransferState.DONE:
                state = self._pull_torn(step, slots_SU8[step.local_page_id], deadline_ms)
        if state is TransferState.DONE:
            for step in steps:
                damage(self._faults, step.place, self._count, slots_SU8[step.local_page_id])
        return state

    def _pull_torn(self, step: Step, page_U8: U8, deadline_ms: int) -> TransferState:
        """The page's first half as it was before the hook, its second half as it is after it."""
        state = self._pull([step], deadline_ms)
        if state is not TransferState.DONE:
            return state
        half = page_U8.size // 2
        first_half = page_U8[:half].copy()
        if self._engine.hooks.between_halves is not None:
            self._engine.hooks.between_halves(PagePair(step.remote_page_id, step.local_page_id))
        state = self._pull([step], deadline_ms)
        if state is TransferState.DONE:
            page_U8[:half] = first_half
        return state

    def _pull(self, steps: list[Step], deadline_ms: int) -> TransferState:
        if not steps:
            return TransferState.DONE
        pairs = [PagePair(s.remote_page_id, s.local_page_id) for s in steps]
        try:
            transfer = self._engine.inner.read_pages(self._peer, pairs)
        except TransferError:
            return TransferState.FAILED
        self._inner.append(transfer)
        return transfer.wait(max(0, deadline_ms - self._engine.clock_ms()))


class FaultyEngine(TransferEngine):
    """`plan` decides each transfer's faults; `reader` is the name by which it knows this engine.

    Bytes that land later wait for `landing_gate` when one is given, else for the fault's `delay_ms`. `close` ends
    them. The fault `follow_restart` is the memory engine's alone: a plan that asks for it here gets InvalidInput.
    """

    def __init__(
        self,
        inner: TransferEngine,
        plan: FaultPlan = no_faults,
        hooks: FaultHooks | None = None,
        landing_gate: threading.Event | None = None,
        reader: str = "",
        clock_ms: ClockMs = monotonic_ms,
    ) -> None:
        self.name = inner.name
        self.inner = inner
        self.plan = plan
        self.hooks = hooks or FaultHooks()
        self.clock_ms = clock_ms
        self.closing = threading.Event()
        self.stopped = False
        self._gate = landing_gate
        self._reader = reader
        self._numbers = itertools.count()
        self._lost: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._slots_SU8: U8 | None = None

    @property
    def slots_SU8(self) -> U8:
        if self._slots_SU8 is None:
            raise TransferError("no_local_pool", "the engine has no local pool")
        return self._slots_SU8

    def allocate(self, slots: int, slot_bytes: int) -> U8:
        buffer = self.inner.allocate(slots, slot_bytes)
        self._slots_SU8 = slots_of(buffer, slots, slot_bytes)
        return buffer

    def publish(self, incarnation: int, layout: str) -> PoolExport:
        return self.inner.publish(incarnation, layout)

    def connect(self, export: PoolExport) -> Peer:
        return self.inner.connect(export)

    def read_pages(self, peer: Peer, pairs: Sequence[PagePair]) -> Transfer:
        self._require_reachable(peer)
        if not pairs:
            return self.inner.read_pages(peer, pairs)
        faults = self.plan(TransferInfo(next(self._numbers), self._reader, peer.export, len(pairs)))
        if faults.honest and self.hooks.before_copy is None:
            return self.inner.read_pages(peer, pairs)
        if faults.follow_restart:
            raise InvalidInput(
                "fault_not_possible", "a real engine follows restarts or not", field="faults.follow_restart"
            )
        self.inner.read_pages(peer, [])  # refuses a peer that is not connected
        remote_ids, local_ids = split_pairs(pairs)
        if faults.wrap_out_of_range:
            remote_ids = tuple(i % peer.export.slots for i in remote_ids)
        check_ids(remote_ids, peer.export.slots, "remote_page_id")
        check_local_ids(local_ids, self.slots_SU8.shape[0])
        return FaultyTransfer(self, peer, steps_of(faults, remote_ids, local_ids), faults)

    def read_tags(self, peer: Peer, timeout_ms: int) -> I64:
        self._require_reachable(peer)
        return self.inner.read_tags(peer, timeout_ms)

    def disconnect(self, peer: Peer) -> None:
        self._lost.discard(peer.handle)
        self.inner.disconnect(peer)

    def regions(self) -> int:
        return self.inner.regions()

    def close(self) -> None:
        self.closing.set()
        deadline_ms = self.clock_ms() + CLOSE_TIMEOUT_MS
        for thread in self._threads:
            thread.join(max(0, deadline_ms - self.clock_ms()) / 1000)
            if thread.is_alive():
                raise TransferTimeout("close_timeout", f"late bytes have not ended within {CLOSE_TIMEOUT_MS} ms")
        self.inner.close()
        self._slots_SU8 = None
        self.stopped = True

    def lose(self, peer: Peer) -> None:
        """The connection is lost: reads over it fail until the peer is connected again."""
        self._lost.add(peer.handle)

    def start_thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="late-bytes", daemon=True)
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            thread.start()
        return thread

    def await_landing(self, delay_ms: int) -> bool:
        """Waits for the gate, or `delay_ms` without one. False when the engine closes first."""
        if self._gate is None:
            return not self.closing.wait(delay_ms / 1000)
        while not self._gate.wait(GATE_POLL_S):
            if self.closing.is_set():
                return False
        return not self.closing.is_set()

    def _require_reachable(self, peer: Peer) -> None:
        if peer.handle in self._lost:
            raise TransferError("peer_gone", "the connection to the peer is lost")
