"""Same-host engine: the embedded default.

A pool lives in a Linux memfd. Peers open it through `/proc/<pid>/fd/<fd>` and map it read-only, so that the memory
goes away with its last user: a killed worker leaks nothing, and there is no name that a stranger could take.

    memfd: [ pool buffer (base.py) | pad to 4096 B | trailer 4096 B ]
    trailer: magic u64 | nonce 16 bytes | incarnation i64 | zeros

The trailer is zeroed when the owner closes its engine; a reader looks at it, and at whether the owner lives, before
every copy. Pages are copied by the thread that waits, one at a time, together with the digest of their bodies when
a digester was given: the page is summed while it is in cache.

Shape suffixes: S slots, n pages of one batch, U8 slot bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import select
import struct
import threading
from dataclasses import asdict, dataclass

import numpy as np

from kvstore.errors import TransferError, TransferTimeout, Unavailable
from kvstore.json_text import parse_json
from kvstore.transfer.base import PoolExport, Transfer, TransferState, pool_bytes
from kvstore.transfer.common import (
    CLOSE_TIMEOUT_MS,
    I64,
    U8,
    U64,
    ClockMs,
    Ids,
    PageDigester,
    PoolEngine,
    monotonic_ms,
    refusing_address,
    runs_of,
    slots_of,
    tags_of,
)

_TRAILER = struct.Struct("<Q16sq")
_TRAILER_BYTES = 4096
_MAGIC = 0x4D48534B4C4E4547
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; the fcntl module of Python 3.11 does not name it
MEMFD_NAME = "genlock-pool"
NONCE_BYTES = 16
CHUNK_BYTES = 8 << 20  # the deadline is looked at once per so many bytes

_REMEDY = (
    "workers that use the shm engine need one host, one PID namespace and one user; "
    "share the PID namespace or set transfer.engine to mooncake"
)


@dataclass(frozen=True)
class ShmAddress:
    """Where a memfd can be found, and what tells that it is still the same one."""

    pid: int
    fd: int
    start_ticks: int  # field 22 of /proc/<pid>/stat: guards against a reused pid
    pid_namespace: str
    boot_id: str
    nonce: str  # hex

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def parse_address(text: str) -> ShmAddress:
    """Raises InvalidInput (field export.address) for text that is no address of this engine."""
    with refusing_address("shm"):
        raw = parse_json(text)
        address = ShmAddress(**raw)
        limits = ((address.pid, 1 << 31), (address.fd, 1 << 31), (address.start_ticks, 1 << 63))
        if any(type(n) is not int or not 0 <= n < limit for n, limit in limits) or address.pid == 0:
            raise ValueError("a number is missing or out of range")
        if len(bytes.fromhex(address.nonce)) != NONCE_BYTES:
            raise ValueError("nonce of another length")
        return address


def start_ticks_of(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _total_bytes(slots: int, slot_bytes: int) -> int:
    size = pool_bytes(slots, slot_bytes)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + _TRAILER_BYTES


class _Owner:
    """Watches the process that owns a pool. A pidfd names one process for ever and costs one poll to ask."""

    def __init__(self, address: ShmAddress) -> None:
        self._address = address
        # A poll object may be asked by one thread at a time, and a closed descriptor's number may be reused.
        self._lock = threading.Lock()
        self._poll: select.poll | None = None
        self._fd = -1
        with contextlib.suppress(OSError):  # no pidfd (old kernel, seccomp): /proc is asked instead
            self._fd = os.pidfd_open(address.pid)
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)

    def started_as_told(self) -> bool:
        return start_ticks_of(self._address.pid) == self._address.start_ticks

    def alive(self) -> bool:
        with self._lock:
            if self._poll is not None:
                return not self._poll.poll(0)
        return self.started_as_told()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._poll = -1, None


class _Source:
    """A peer's pool, mapped read-only."""

    def __init__(self, export: PoolExport, address: ShmAddress, owner: _Owner, mapping: mmap.mmap) -> None:
        self.export = export
        self._owner = owner
        self._expected = _TRAILER.pack(_MAGIC, bytes.fromhex(address.nonce), export.incarnation)
        self._mapping = mapping
        self._trailer_at = len(mapping) - _TRAILER_BYTES
        buffer = np.frombuffer(mapping, dtype=np.uint8)
        self.pages_SU8 = slots_of(buffer, export.slots, export.slot_bytes)
        self.tags_S2 = tags_of(buffer, export.slots)

    def trailer_matches(self) -> bool:
        return self._mapping[self._trailer_at : self._trailer_at + _TRAILER.size] == self._expected

    def alive(self) -> bool:
        return self._owner.alive() and self.trailer_matches()

    def close(self) -> None:
        self._owner.close()
        # The mapping goes away with the last array over it; a copy under way in another thread keeps it.


class ShmTransfer(Transfer):
    """One batch, copied by the thread that waits. It has stopped as soon as `wait` returns."""

    def __init__(self, engine: ShmEngine, source: _Source, remote_ids: Ids, local_ids: Ids) -> None:
        self._engine = engine
        self._source = source
        self._remote_ids = remote_ids
        self._local_ids = local_ids
        self._waiting = threading.Lock()
        self._state = TransferState.RUNNING
        self._sums_n2: U64 | None = None

    @property
    def body_sums(self) -> U64 | None:
        return self._sums_n2 if self._state is TransferState.DONE else None

    def wait(self, timeout_ms: int) -> TransferState:
        with self._waiting:
            if self._state is TransferState.RUNNING:
                self._state = self._copy(timeout_ms)
            return self._state

    def quiesced(self) -> bool:
        return self._state is not TransferState.RUNNING or self._engine.stopped

    def _copy(self, timeout_ms: int) -> TransferState:
        local_SU8 = self._engine.begin_copy()
        if local_SU8 is None:
            return TransferState.FAILED
        try:
            return self._copy_chunks(local_SU8, self._engine.clock_ms() + timeout_ms if timeout_ms > 0 else -1)
        finally:
            self._engine.end_copy()

    def _copy_chunks(self, local_SU8: U8, deadline_ms: int) -> TransferState:
        engine, source = self._engine, self._source
        chunk = max(1, CHUNK_BYTES // local_SU8.shape[1])
        sums: list[U64] = []
        for first in range(0, len(self._remote_ids), chunk):
            if engine.closing or not source.alive():
                return TransferState.FAILED
            if engine.clock_ms() > deadline_ms:
                return TransferState.TIMED_OUT
            remote, local = self._remote_ids[first : first + chunk], self._local_ids[first : first + chunk]
            if engine.digester is None:
                # numpy lets other threads run during each copy.
                for _, pages, page, target in runs_of(remote, local, chunk):
                    np.copyto(local_SU8[target : target + pages], source.pages_SU8[page : page + pages])
            else:
                remote_n, local_n = np.array(remote, np.int64), np.array(local, np.int64)
                sums.append(engine.digester.copy_and_sum(source.pages_SU8, remote_n, local_SU8, local_n))
        if sums:
            self._sums_n2 = sums[0] if len(sums) == 1 else np.concatenate(sums)
        return TransferState.DONE


class ShmEngine(PoolEngine[_Source]):
    """`digester` sums the pages' bodies while they are copied; `clock_ms` is monotonic."""

    name = "shm"

    def __init__(self, digester: PageDigester | None = None, clock_ms: ClockMs = monotonic_ms) -> None:
        super().__init__()
        self.digester = digester
        self.clock_ms = clock_ms
        self._fd = -1
        self._mapping: mmap.mmap | None = None
        self._copies = 0
        self._idle = threading.Condition(self._lock)

    @property
    def closing(self) -> bool:
        """True from the start of `close` on: copies end at their next chunk."""
        return self._closed

    @property
    def stopped(self) -> bool:
        """True once the engine is closed and no thread copies any more."""
        with self._lock:
            return self._closed and not self._copies

    def begin_copy(self) -> U8 | None:
        """Our slots uint8 [S, slot_bytes]; holds `close` back until `end_copy`. None when closed."""
        with self._lock:
            if self._closed:
                return None
            self._copies += 1
            return self.slots_SU8

    def end_copy(self) -> None:
        with self._lock:
            self._copies -= 1
            self._idle.notify_all()

    def _map(self, nbytes: int) -> U8:
        total = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE + _TRAILER_BYTES
        fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, total)
            try:
                # Without this a full host would answer a later store with SIGBUS instead of an error here.
                os.posix_fallocate(fd, 0, total)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
            mapping = mmap.mmap(fd, total, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            _seal(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._mapping = fd, mapping
        return np.frombuffer(mapping, dtype=np.uint8)[:nbytes]

    def _register(self, incarnation: int) -> str:
        assert self._mapping is not None  # publish checked it
        nonce = os.urandom(NONCE_BYTES)
        start_ticks = start_ticks_of(os.getpid())
        if start_ticks is None:
            raise TransferError("no_proc", "the shm engine needs /proc")
        at = len(self._mapping) - _TRAILER_BYTES
        self._mapping[at : at + _TRAILER.size] = _TRAILER.pack(_MAGIC, nonce, incarnation)
        return ShmAddress(os.getpid(), self._fd, start_ticks, _pid_namespace(), _boot_id(), nonce.hex()).text()

    def _attach(self, export: PoolExport) -> _Source:
        address = parse_address(export.address)
        if address.boot_id != _boot_id():
            raise Unavailable("other_host", f"the peer's pool is on another host; {_REMEDY}")
        if address.pid_namespace != _pid_namespace():
            raise Unavailable("other_pid_namespace", f"the peer is in another PID namespace; {_REMEDY}")
        owner = _Owner(address)
        try:
            if not owner.started_as_told():
                raise Unavailable("peer_gone", "the process that owned the pool has ended")
            source = _Source(export, address, owner, _open_mapping(address, export))
            if not source.trailer_matches():
                raise Unavailable("incarnation_changed", "the memory at this address is not the export's pool")
            return source
        except BaseException:
            owner.close()
            raise

    def _detach(self, source: _Source) -> None:
        source.close()

    def _start(self, source: _Source, remote_ids: Ids, local_ids: Ids) -> Transfer:
        return ShmTransfer(self, source, remote_ids, local_ids)

    def _live_tags(self, source: _Source, timeout_ms: int) -> I64:
        if not source.alive():
            raise TransferError("peer_gone", "the process that owned the pool has ended or closed it")
        return source.tags_S2.copy()

    def _tear_down(self) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: not self._copies, CLOSE_TIMEOUT_MS / 1000):
                raise TransferTimeout("close_timeout", f"a copy has not stopped within {CLOSE_TIMEOUT_MS} ms")
        if self._mapping is not None:
            at = len(self._mapping) - _TRAILER_BYTES
            self._mapping[at : at + _TRAILER.size] = bytes(_TRAILER.size)
            os.close(self._fd)
        # The mapping goes away with the last array over it, which may be the caller's.
        self._fd, self._mapping = -1, None


def _seal(fd: int) -> None:
    """Fixes the size, so that no peer is killed by a shrunk mapping, and forbids further writable mappings."""
    size_seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_seals | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # kernels before 5.1 do not know the future-write seal
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size_seals | fcntl.F_SEAL_SEAL)


def _open_mapping(address: ShmAddress, export: PoolExport) -> mmap.mmap:
    """Maps a peer's memfd read-only. Raises Unavailable with the reason and, for lack of access, the remedy."""
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{MEMFD_NAME}"):
            raise Unavailable("peer_gone", "the descriptor at this address is no longer a pool")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise Unavailable("peer_gone", "the process that owned the pool has ended or closed it") from error
    except PermissionError as error:
        raise Unavailable("no_access", f"the peer's memory may not be opened: {error}; {_REMEDY}") from error
    except OSError as error:
        raise Unavailable("peer_gone", f"the peer's memory cannot be opened: {error}; {_REMEDY}") from error
    try:
        if os.fstat(fd).st_size != _total_bytes(export.slots, export.slot_bytes):
            raise Unavailable("incarnation_changed", "the pool at this address has another size than the export")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise Unavailable("not_sealed", "the memory at this address could shrink under its reader")
        return mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise Unavailable("no_memory", f"the peer's pool cannot be mapped: {error}") from error
    finally:
        os.close(fd)
