"""Engine over mooncake-transfer-engine: TCP anywhere, RDMA and NVLink where the library and the host have them.

The library is optional and imported late; `MooncakeEngine.available()` tells why it cannot be used.

What shapes this file (measured, and read in the library's TCP transport):

- A batch of several descriptors is told of by the state of its first one: it is failed, or completed, while its rest
  still lands (of 64 pages 50 came after a failure; of an owner that died the rest never came after "completed"). It has
  a time-out of the library's own (30 s). So every descriptor is a batch of its own: it can be polled without blocking,
  our deadline holds, and each one proves its own end. Submitting one by one costs no more than the library's batch.
- Neighbouring pages that land in neighbouring slots are one descriptor.
- At most `WINDOW` descriptors are under way to one peer; beyond about 1,000 the library's queue refuses.
- Over TCP a descriptor that failed, alone in its batch, has ended too: the library reports it only from the handler of
  its last socket operation. For other protocols only success counts as an end; what has not ended is unquiesced until
  `close`, and a worker whose engine keeps such transfers must replace the engine (and its pool) to get the pages back.
- The library has no authentication and listens on all interfaces, also where MC_TCP_BIND_ADDRESS names one (that is
  only what it tells its peers): whoever reaches its ports can read and write registered memory. Deployments must fence
  these ports off; tags, digests and prefix keys catch what is damaged.
- Opening a peer holds a lock of the library for up to 60 s, so a peer is probed in a thread of its own first.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from kvstore.errors import InvalidInput, TransferError, TransferTimeout, Unavailable
from kvstore.json_text import parse_json
from kvstore.transfer.base import PoolExport, Transfer, tag_table_bytes
from kvstore.transfer.common import (
    CLOSE_TIMEOUT_MS,
    CONNECT_TIMEOUT_MS,
    I64,
    U8,
    ClockMs,
    Ids,
    PageDigester,
    PolledTransfer,
    PoolEngine,
    monotonic_ms,
    refuse_stuck,
    refusing_address,
    runs_of,
    tags_of,
    wait_for_tags,
)
from kvstore.transfer.lent import Lent

R = TypeVar("R")

WINDOW = 512
MAX_DESCRIPTOR_BYTES = 64 << 20
MAX_PROBES = 16
POLL_AHEAD = 8  # descriptors asked per turn; they end roughly in the order of their submission

_PENDING, _COMPLETED, _FAILED = 0, 1, -1


@dataclass(frozen=True)
class MooncakeAddress:
    """`session` is host:port of the peer's handshake server; `base` the address of its buffer in its process."""

    session: str
    protocol: str
    base: int

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def parse_address(text: str) -> MooncakeAddress:
    """Raises InvalidInput (field export.address) for text that is no address of this engine."""
    with refusing_address("mooncake"):
        address = MooncakeAddress(**parse_json(text))
        host, _, port = address.session.rpartition(":")
        if not host or not 1 <= int(port) <= 65535 or type(address.base) is not int or not 0 < address.base < 1 << 63:
            raise ValueError("session or base out of range")
        return address


def load_library() -> Any:
    """The library's TransferEngine class. Raises ImportError or OSError (a missing shared library)."""
    from mooncake.engine import TransferEngine as Library  # optional dependency

    return Library


def hush_library() -> None:
    """Silences the library's log below FATAL; failures reach the caller as errors. Without its logger: no effect.

    The library offers only environment variables for this, which would also reach every child process.
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libglog" in line}
        for path in paths:
            ctypes.c_int.in_dll(ctypes.CDLL(path), "_ZN3fLI17FLAGS_minloglevelE").value = 3


@dataclass(frozen=True)
class Descriptor:
    """One contiguous read. `first` and `pages` are its places in the batch (0, 0 for a tag table)."""

    local_addr: int
    remote_addr: int
    nbytes: int
    first: int = 0
    pages: int = 0


class _Source:
    """A connected peer: where it is, how many descriptors are under way to it, and where its tags land."""

    def __init__(self, export: PoolExport, address: MooncakeAddress) -> None:
        self.export = export
        self.address = address
        self.tags_lock = threading.Lock()
        self.tags_buffer = np.frombuffer(mmap.mmap(-1, tag_table_bytes(export.slots)), dtype=np.uint8)
        self.tags_read: MooncakeTransfer | None = None
        self._lock = threading.Lock()
        self._under_way = 0

    def take(self) -> bool:
        with self._lock:
            if self._under_way >= WINDOW:
                return False
            self._under_way += 1
            return True

    def give(self) -> None:
        with self._lock:
            self._under_way -= 1


class MooncakeTransfer(PolledTransfer[Descriptor]):
    """One batch of descriptors."""

    def __init__(
        self, engine: MooncakeEngine, source: _Source, descriptors: list[Descriptor], local_ids_n: I64 | None = None
    ) -> None:
        super().__init__(engine, descriptors, local_ids_n)
        self._engine = engine
        self._source = source
        self.start()

    def _advance(self) -> bool:
        landed = self._engine.call(self._turn)
        if landed is None:
            self._failed = True
            return False
        for descriptor in landed:
            self._sum(descriptor)
        return bool(landed)

    def _turn(self, library: Any) -> list[Descriptor]:
        landed = self._poll(library)
        self._submit(library)
        return landed

    def _poll(self, library: Any) -> list[Descriptor]:
        landed: list[Descriptor] = []
        for batch_id in list(itertools.islice(self._under_way, POLL_AHEAD)):
            status = library.transfer_check_status(batch_id)
            if status == _PENDING:
                continue
            if status not in (_COMPLETED, _FAILED):  # the library gave up, but has not ended it
                self._failed = True
                continue
            descriptor = self._taken_back(batch_id)
            self._source.give()
            if status == _COMPLETED:
                landed.append(descriptor)
            else:
                self._failed = True
                self._unproved |= not self._engine.failure_is_end
        return landed

    def _submit(self, library: Any) -> None:
        session = self._source.address.session
        while self._waiting and not self._failed and self._source.take():
            d = self._waiting[0]
            batch_id = library.batch_transfer_async_read(session, [d.local_addr], [d.remote_addr], [d.nbytes])
            if not batch_id:
                self._source.give()
                self._failed = True
                return
            self._waiting.popleft()
            self._posted(batch_id, d)


class MooncakeEngine(PoolEngine[_Source]):
    """`host` is the address by which peers reach us; `protocol` tcp or rdma, `device` a NIC name filter for rdma.

    Raises Unavailable (library_missing, library_failed) when the library cannot be loaded or started.
    """

    name = "mooncake"

    def __init__(
        self,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        digester: PageDigester | None = None,
        clock_ms: ClockMs = monotonic_ms,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
    ) -> None:
        super().__init__(connect_timeout_ms)
        try:
            library = load_library()()
        except (ImportError, OSError) as error:
            raise Unavailable("library_missing", f"the mooncake library cannot be loaded: {error}") from error
        hush_library()
        if library.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise Unavailable("library_failed", f"the mooncake library cannot start on {host!r} with {protocol!r}")
        hush_library()
        self.digester = digester
        self.clock_ms = clock_ms
        self.failure_is_end = protocol == "tcp"
        self._host, self._protocol = host, protocol
        self._library = Lent(library)
        self._probes = threading.BoundedSemaphore(MAX_PROBES)
        self._late_buffers: list[U8] = []
        self._register_tried = False

    @staticmethod
    def available() -> str | None:
        """None when the library loads, else the reason why not."""
        try:
            load_library()
        except (ImportError, OSError) as error:
            return f"mooncake-transfer-engine cannot be loaded: {error}"
        return None

    @property
    def stopped(self) -> bool:
        """True once the library's engine is gone and nothing can land any more."""
        return self._library.gone

    def call(self, use: Callable[[Any], R]) -> R | None:
        """Runs `use` on the library's engine, which lives until it returns. None after `close`."""
        return self._library.call(use)

    def regions(self) -> int:
        with self._lock:
            return 0 if self._closed else super().regions() + len(self._late_buffers)

    def _map(self, nbytes: int) -> U8:
        return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)

    def _register(self, incarnation: int) -> str:
        assert self._buffer is not None  # publish checked it
        base = self._buffer.ctypes.data
        self._register_tried = True  # whatever comes of it: a call that raises may have registered
        self._register_region(self._buffer)
        port = self.call(lambda library: library.get_rpc_port())
        if port is None:
            raise TransferError("engine_closed", "the engine is closed")
        return MooncakeAddress(f"{self._host}:{port}", self._protocol, base).text()

    def _attach(self, export: PoolExport) -> _Source:
        address = parse_address(export.address)
        if address.protocol != self._protocol:
            raise InvalidInput(
                "other_protocol",
                f"the peer speaks {address.protocol!r} and we {self._protocol!r}",
                field="export.address",
            )
        self._probe(address.session)
        source = _Source(export, address)
        if self._protocol != "tcp":  # over tcp our own side of a read needs no registration, so nobody gets at it
            self._register_region(source.tags_buffer)
        return source

    def _register_region(self, region: U8) -> None:
        if self.call(lambda library: library.register_memory(region.ctypes.data, region.size)) != 0:
            raise TransferError("register_failed", "the mooncake library cannot register memory")

    def _probe(self, session: str) -> None:
        """Raises Unavailable unless the peer answers in time. A probe that hangs ends with the library's time-out."""
        if not self._probes.acquire(blocking=False):
            raise Unavailable("too_many_probes", f"{MAX_PROBES} peers already hang while being probed")
        answers: list[int] = []

        def ask() -> None:
            try:
                answer = self.call(lambda library: library.send_probe(session))
                answers.append(-1 if answer is None else answer)
            finally:
                self._probes.release()

        thread = threading.Thread(target=ask, name="mooncake-probe", daemon=True)
        thread.start()
        thread.join(self._connect_timeout_ms / 1000)
        if not answers or answers[0]:
            raise Unavailable("peer_gone", f"nothing answers at {session}")

    def _detach(self, source: _Source) -> None:
        read = source.tags_read
        if read is not None and not read.quiesced():
            with self._lock:
                self._late_buffers.append(source.tags_buffer)  # bytes may land there until the engine is torn down
        elif self._protocol != "tcp":
            self.call(lambda library: library.unregister_memory(source.tags_buffer.ctypes.data))

    def _start(self, source: _Source, remote_ids: Ids, local_ids: Ids) -> Transfer:
        size, slots_SU8 = source.export.slot_bytes, self.slots_SU8
        local_base = slots_SU8.ctypes.data
        remote_base = source.address.base + tag_table_bytes(source.export.slots)
        descriptors = [
            Descriptor(local_base + local * size, remote_base + remote * size, pages * size, first, pages)
            for first, pages, remote, local in runs_of(remote_ids, local_ids, max(1, MAX_DESCRIPTOR_BYTES // size))
        ]
        return MooncakeTransfer(self, source, descriptors, np.array(local_ids, np.int64))

    def _live_tags(self, source: _Source, timeout_ms: int) -> I64:
        with source.tags_lock:
            refuse_stuck(source.tags_read)
            slots = source.export.slots
            table = Descriptor(source.tags_buffer.ctypes.data, source.address.base, slots * 16)
            read = source.tags_read = MooncakeTransfer(self, source, [table])
            wait_for_tags(read, timeout_ms)
            return tags_of(source.tags_buffer, slots).copy()

    def _tear_down(self) -> None:
        if not self._library.take_down(CLOSE_TIMEOUT_MS, self._let_go):
            raise TransferTimeout("close_timeout", f"a library call has not returned within {CLOSE_TIMEOUT_MS} ms")

    def _let_go(self, library: Any) -> None:
        if self._register_tried and self._buffer is not None:
            library.unregister_memory(self._buffer.ctypes.data)
