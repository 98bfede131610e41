"""What every engine does alike: checks, the buffer's layout, the table of connected peers.

Where the incarnation lives: `publish` stamps it into the first column of every row of the tag table, so a peer
that can read the table can tell which life of the pool it is looking at. `connect` reads the table once and
refuses the pool unless every row carries the export's incarnation. The owner of the pool keeps that column.

Shape suffixes: S slots, n pages of one batch, U8 slot bytes.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidInput, NoCapacity, TransferError, TransferTimeout, Unavailable
from kvstore.layout import SLOT_ALIGN_BYTES
from kvstore.transfer.base import (
    MAX_PAGES_PER_TRANSFER,
    PagePair,
    Peer,
    PoolExport,
    Transfer,
    TransferEngine,
    TransferState,
    pool_bytes,
    tag_table_bytes,
)

MAX_SLOTS = 1 << 24
MAX_SLOT_BYTES = 1 << 30
MAX_PEERS = 4096
MAX_ADDRESS_CHARS = 4096
CONNECT_TIMEOUT_MS = 5_000
CLOSE_TIMEOUT_MS = 10_000
# Spinning finishes small reads sooner; while much is under way, sleeping leaves the core to the library's thread.
SPIN_BYTES = 1 << 20
MAX_SPINS = 2_000
SLEEP_S = 50e-6

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Ids = tuple[int, ...]
ClockMs = Callable[[], int]


@contextlib.contextmanager
def refusing_address(engine: str) -> Iterator[None]:
    """What goes wrong while an address is read is the address's: InvalidInput (field export.address)."""
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:  # binascii.Error is a ValueError
        raise InvalidInput(
            "bad_address", f"export.address is no {engine} address: {error}", field="export.address"
        ) from error


class PageDigester(Protocol):
    """What an engine needs of `kvstore.digest.Digester` to sum pages while they move."""

    def copy_and_sum(self, src_SU8: U8, src_ids_n: I64, dst_SU8: U8, dst_ids_n: I64) -> U64:
        """Copies pages and returns the uint64 [n, 2] NH sums of the bodies that were stored."""
        ...

    def body_sums_many(self, storage_SU8: U8, page_ids_n: I64) -> U64:
        """The uint64 [n, 2] NH sums of the bodies of pages that have landed."""
        ...


def monotonic_ms() -> int:
    """The clock of workers and engines that run live."""
    return time.monotonic_ns() // 1_000_000


def tags_of(buffer: U8, slots: int) -> I64:
    """int64 [slots, 2] view of a pool buffer's tag table."""
    return buffer[: slots * 16].view(np.int64).reshape(slots, 2)


def slots_of(buffer: U8, slots: int, slot_bytes: int) -> U8:
    """uint8 [slots, slot_bytes] view of a pool buffer's slots."""
    start = tag_table_bytes(slots)
    return buffer[start : start + slots * slot_bytes].reshape(slots, slot_bytes)


def check_shape(slots: int, slot_bytes: int, prefix: str = "") -> None:
    """Raises InvalidInput naming `slots` or `slot_bytes` when a pool of this shape cannot exist."""
    if not 1 <= slots <= MAX_SLOTS:
        raise InvalidInput("bad_pool", f"{prefix}slots must be 1..{MAX_SLOTS}, got {slots}", field=f"{prefix}slots")
    if not SLOT_ALIGN_BYTES <= slot_bytes <= MAX_SLOT_BYTES or slot_bytes % SLOT_ALIGN_BYTES:
        raise InvalidInput(
            "bad_pool",
            f"{prefix}slot_bytes must be a multiple of {SLOT_ALIGN_BYTES} up to {MAX_SLOT_BYTES}, got {slot_bytes}",
            field=f"{prefix}slot_bytes",
        )


def split_pairs(pairs: Sequence[PagePair]) -> tuple[Ids, Ids]:
    """Returns (remote ids, local ids). Raises InvalidInput for a batch that is no list of pairs of integers.

    Everything here and in the checks below runs in C over the whole batch: a line of Python per page would cost more
    than copying a small one.
    """
    if len(pairs) > MAX_PAGES_PER_TRANSFER:
        raise InvalidInput(
            "too_many_pages", f"{len(pairs)} pages, at most {MAX_PAGES_PER_TRANSFER} a transfer", field="pairs"
        )
    if not pairs:
        return (), ()
    try:
        remote, local = zip(*pairs, strict=True)
        return tuple(map(operator.index, remote)), tuple(map(operator.index, local))
    except (TypeError, ValueError) as error:
        raise InvalidInput("bad_pairs", f"pairs must hold (remote, local) page ids: {error}", field="pairs") from error


def check_ids(ids: Ids, slots: int, field: str) -> None:
    """Raises InvalidInput naming `field` if an id lies outside 0..slots-1."""
    if ids and (min(ids) < 0 or max(ids) >= slots):
        bad = next(i for i in ids if not 0 <= i < slots)
        raise InvalidInput("page_out_of_range", f"{field} {bad} is not in 0..{slots - 1}", field=field)


def check_local_ids(local_ids: Ids, slots: int) -> None:
    """Raises InvalidInput if a batch's target lies outside our pool or is named twice."""
    check_ids(local_ids, slots, "local_page_id")
    if len(set(local_ids)) != len(local_ids):
        raise InvalidInput("slot_twice", "two pages of one batch name one local slot", field="local_page_id")


def runs_of(remote_ids: Ids, local_ids: Ids, limit: int) -> list[tuple[int, int, int, int]]:
    """Joins pages that are neighbours on both sides: [(first place, pages, remote id, local id)], pages <= `limit`."""
    runs: list[tuple[int, int, int, int]] = []
    first, count = 0, len(remote_ids)
    for place in range(1, count + 1):
        if (
            place == count
            or place - first == limit
            or remote_ids[place] != remote_ids[place - 1] + 1
            or local_ids[place] != local_ids[place - 1] + 1
        ):
            runs.append((first, place - first, remote_ids[first], local_ids[first]))
            first = place
    return runs


class EndedTransfer(Transfer):
    """A transfer that needs no work: an empty batch."""

    def __init__(self, state: TransferState = TransferState.DONE) -> None:
        self._state = state

    def wait(self, timeout_ms: int) -> TransferState:
        return self._state

    def quiesced(self) -> bool:
        return True


class Portion(Protocol):
    """What a library takes at once: `first` and `pages` are its places in the batch (0 pages: a table of tags)."""

    @property
    def first(self) -> int: ...

    @property
    def pages(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


class PollingEngine(Protocol):
    """What a `PolledTransfer` needs of its engine."""

    clock_ms: ClockMs
    digester: PageDigester | None

    @property
    def stopped(self) -> bool: ...

    @property
    def slots_SU8(self) -> U8: ...


P = TypeVar("P", bound=Portion)


class PolledTransfer(Transfer, Generic[P]):
    """One batch over a library that is asked how far it is: portions that wait, portions under way. Nothing happens
    but in `wait` and `quiesced`. Subclasses poll and post in `_advance` and call `start` once they are made.
    """

    def __init__(self, engine: PollingEngine, portions: Iterable[P], local_ids_n: I64 | None) -> None:
        self._waiting = collections.deque(portions)
        self._under_way: dict[int, P] = {}
        self._bytes_under_way = 0
        self._unproved = False  # something failed, and that does not prove that it has ended
        self._failed = False
        self._state = TransferState.RUNNING
        self._lock = threading.Lock()
        self._driver = engine
        self._local_ids_n = local_ids_n
        self._sums_n2: U64 | None = None
        if engine.digester is not None and local_ids_n is not None:
            self._sums_n2 = np.empty((local_ids_n.size, 2), np.uint64)

    @abstractmethod
    def _advance(self) -> bool:
        """Polls what is under way and posts what fits, with the lock held. True if something landed."""

    def _ended(self) -> None:
        """Called with the lock held after the end state, and again whenever something may have become quiet."""

    def start(self) -> None:
        with self._lock:
            self._advance()

    @property
    def body_sums(self) -> U64 | None:
        return self._sums_n2 if self._state is TransferState.DONE else None

    def wait(self, timeout_ms: int) -> TransferState:
        deadline_ms = self._driver.clock_ms() + timeout_ms
        spins = 0
        while True:
            with self._lock:
                if self._state is not TransferState.RUNNING:
                    return self._state
                landed = self._advance()
                if self._failed:
                    self._end(TransferState.FAILED)
                elif not self._waiting and not self._under_way:
                    self._end(TransferState.DONE)
                elif self._driver.clock_ms() >= deadline_ms:
                    self._end(TransferState.TIMED_OUT)
                busy = self._bytes_under_way > SPIN_BYTES
            if landed or self._state is not TransferState.RUNNING:
                continue
            spins += 1
            time.sleep(SLEEP_S if busy or spins > MAX_SPINS else 0)

    def quiesced(self) -> bool:
        if self._driver.stopped:
            return True
        with self._lock:
            if self._state is not TransferState.RUNNING:
                self._advance()
                self._ended()
            return self._still

    @property
    def _still(self) -> bool:
        return not self._waiting and not self._under_way and not self._unproved

    def _end(self, state: TransferState) -> None:
        self._state = state
        self._waiting.clear()
        self._ended()

    def _posted(self, handle: int, portion: P) -> None:
        self._under_way[handle] = portion
        self._bytes_under_way += portion.nbytes

    def _taken_back(self, handle: int) -> P:
        """The portion of a handle that is not under way any more."""
        portion = self._under_way.pop(handle)
        self._bytes_under_way -= portion.nbytes
        return portion

    def _sum(self, portion: P) -> None:
        """Sums pages that have landed: while the next ones are on their way, and these are in cache."""
        digester, ids_n = self._driver.digester, self._local_ids_n
        if self._state is TransferState.RUNNING and digester and ids_n is not None and self._sums_n2 is not None:
            places = slice(portion.first, portion.first + portion.pages)
            self._sums_n2[places] = digester.body_sums_many(self._driver.slots_SU8, ids_n[places])


def refuse_stuck(earlier: Transfer | None) -> None:
    """Raises TransferTimeout (tags_stuck) while an earlier read of tags may still land where the next one would."""
    if earlier is not None and not earlier.quiesced():
        raise TransferTimeout("tags_stuck", "an earlier read of the peer's tags has not ended")


def wait_for_tags(read: Transfer, timeout_ms: int) -> None:
    """Raises TransferTimeout (tags_timeout), TransferError (peer_gone)."""
    state = read.wait(timeout_ms)
    if state is TransferState.TIMED_OUT:
        raise TransferTimeout("tags_timeout", f"the peer's tags did not arrive within {timeout_ms} ms")
    if state is not TransferState.DONE:
        raise TransferError("peer_gone", "the peer's tags cannot be read")


S = TypeVar("S")


class PoolEngine(TransferEngine, Generic[S]):
    """Base of the engines. `S` is what an engine keeps for one connected peer (its source).

    Subclasses give memory (`_map`), an address (`_register`), a source (`_attach`, `_detach`), page copies
    (`_start`), live tags (`_live_tags`) and a teardown (`_tear_down`).
    """

    def __init__(self, connect_timeout_ms: int = CONNECT_TIMEOUT_MS) -> None:
        self._connect_timeout_ms = connect_timeout_ms
        self._lock = threading.RLock()
        self._buffer: U8 | None = None
        self._slots_SU8: U8 | None = None
        self._slots = 0
        self._slot_bytes = 0
        self._published = False
        self._closed = False
        self._peers: dict[int, tuple[Peer, S]] = {}
        self._handles = itertools.count(1)

    @abstractmethod
    def _map(self, nbytes: int) -> U8:
        """Zeroed page-aligned uint8 [nbytes]."""

    @abstractmethod
    def _register(self, incarnation: int) -> str:
        """Makes the buffer reachable; returns the export's address."""

    @abstractmethod
    def _attach(self, export: PoolExport) -> S:
        """Reaches a peer's pool. Raises Unavailable, or InvalidInput for an address that cannot be parsed."""

    @abstractmethod
    def _detach(self, source: S) -> None: ...

    @abstractmethod
    def _start(self, source: S, remote_ids: Ids, local_ids: Ids) -> Transfer:
        """Starts a checked, non-empty batch."""

    @abstractmethod
    def _live_tags(self, source: S, timeout_ms: int) -> I64:
        """A copy of the peer's live tags, int64 [slots, 2]."""

    @abstractmethod
    def _tear_down(self) -> None: ...

    @property
    def slots_SU8(self) -> U8:
        """uint8 [S, slot_bytes]: our own slots. Raises TransferError before `allocate` and after `close`."""
        slots_SU8 = self._slots_SU8
        if slots_SU8 is None:
            raise TransferError("no_local_pool", "the engine has no local pool")
        return slots_SU8

    def allocate(self, slots: int, slot_bytes: int) -> U8:
        check_shape(slots, slot_bytes)
        with self._lock:
            self._require_open()
            if self._slots:
                raise TransferError("already_allocated", "an engine owns at most one pool")
            try:
                buffer = self._map(pool_bytes(slots, slot_bytes))
            except (OSError, MemoryError, ValueError) as error:
                raise NoCapacity(
                    "no_memory", f"cannot allocate a pool of {slots} x {slot_bytes} bytes: {error}", field="slots"
                ) from error
            self._buffer, self._slots, self._slot_bytes = buffer, slots, slot_bytes
            self._slots_SU8 = slots_of(buffer, slots, slot_bytes)
            return buffer

    def publish(self, incarnation: int, layout: str) -> PoolExport:
        if not 1 <= incarnation < 1 << 63:
            raise InvalidInput("bad_incarnation", "incarnation must be in 1..2^63-1", field="incarnation")
        with self._lock:
            self._require_open()
            if self._buffer is None:
                raise TransferError("no_local_pool", "allocate comes before publish")
            if self._published:
                raise TransferError("already_published", "a pool is published once")
            tags_of(self._buffer, self._slots)[:, 0] = incarnation
            address = self._register(incarnation)
            self._published = True
            return PoolExport(self.name, incarnation, layout, self._slots, self._slot_bytes, address)

    def connect(self, export: PoolExport) -> Peer:
        self._check_export(export)
        source = self._attach(export)
        try:
            tags_S2 = self._live_tags(source, self._connect_timeout_ms)
            if not (tags_S2[:, 0] == export.incarnation).all():
                raise Unavailable(
                    "incarnation_changed", "the pool at this address is another life than the export names"
                )
            with self._lock:
                self._require_open()
                if len(self._peers) >= MAX_PEERS:
                    raise NoCapacity("too_many_peers", f"at most {MAX_PEERS} peers", field="peer")
                peer = Peer(export, next(self._handles))
                self._peers[peer.handle] = (peer, source)
                return peer
        except TransferError as error:
            self._detach(source)
            raise Unavailable("peer_gone", f"the peer's tag table cannot be read: {error.message}") from error
        except BaseException:
            self._detach(source)
            raise

    def read_pages(self, peer: Peer, pairs: Sequence[PagePair]) -> Transfer:
        source = self._source(peer)
        remote_ids, local_ids = split_pairs(pairs)
        self._check_remote(peer, remote_ids)
        check_local_ids(local_ids, self._slots)
        if not remote_ids:
            return EndedTransfer()
        return self._start(source, remote_ids, local_ids)

    def read_tags(self, peer: Peer, timeout_ms: int) -> I64:
        # A copying engine ends `wait` by releasing this lock and `_source` takes it: on weakly ordered processors
        # too, the tag loads then come after the page loads of every batch that was waited for.
        return self._live_tags(self._source(peer), timeout_ms)

    def disconnect(self, peer: Peer) -> None:
        with self._lock:
            known = self._peers.get(peer.handle)
            if known is None or known[0] != peer:
                return
            del self._peers[peer.handle]
        self._detach(known[1])

    def regions(self) -> int:
        with self._lock:
            return 0 if self._closed else int(self._published) + len(self._peers)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = [source for _, source in self._peers.values()]
            self._peers.clear()
        self._tear_down()
        for source in peers:
            self._detach(source)
        self._buffer = self._slots_SU8 = None

    def _check_remote(self, peer: Peer, remote_ids: Ids) -> None:
        check_ids(remote_ids, peer.export.slots, "remote_page_id")

    def _source(self, peer: Peer) -> S:
        with self._lock:
            self._require_open()
            if self._buffer is None:
                raise TransferError("no_local_pool", "allocate comes before reading")
            known = self._peers.get(peer.handle)
            if known is None or known[0] != peer:
                raise TransferError("unknown_peer", "the peer is not connected to this engine")
            return known[1]

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("engine_closed", "the engine is closed")

    def _check_export(self, export: PoolExport) -> None:
        if export.engine != self.name:
            raise InvalidInput(
                "other_engine",
                f"export.engine is {export.engine!r}, this engine is {self.name!r}",
                field="export.engine",
            )
        check_shape(export.slots, export.slot_bytes, "export.")
        if len(export.address) > MAX_ADDRESS_CHARS:
            raise InvalidInput("bad_address", "export.address is too long", field="export.address")
        with self._lock:
            self._require_open()
            if self._buffer is None:
                raise TransferError("no_local_pool", "allocate comes before connect")
        if export.slot_bytes != self._slot_bytes:
            raise InvalidInput(
                "slot_bytes_differ",
                f"export.slot_bytes is {export.slot_bytes}, ours are {self._slot_bytes}",
                field="export.slot_bytes",
            )
