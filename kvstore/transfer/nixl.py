"""Engine over NIXL with UCX: CMA between processes of one host, RDMA where there is some, TCP else.

    region: [ pool buffer (base.py) | pad to 4096 B | life page 4096 B | cells 64 B x CELLS ]
    life page: magic u64 | nonce 16 bytes | zeros

What shapes this file (measured with nixl-cu12 1.5.1; the library's own traits are in nixl_agent.py):

- Memory that its owner has deregistered can still be read with metadata from before. So the owner writes a nonce
  into a life page and zeros it at `close`; a reader reads that page before the pages of a transfer
  and together with the tags. What changes in between is caught by the tags, as with every engine.
- A read has no time-out of the library's: with a stopped peer it stays RUNNING over TCP for ever (over CMA it
  succeeds). Our deadline ends the wait; what was posted may still land, and `quiesced` says when it no longer can.
- Over CMA a post copies before it returns. So batches are small, and the deadline is looked at between two of them.
- One failed row closes the connection to the peer, which the next `connect` loads anew. But the library reports
  the state of a request's last row only: one that lost a row in its middle is DONE, and what is posted after it
  fails (seen 240 times of 240). So a transfer is DONE after another look at the life page.
- Over TCP the owner's own thread reads its memory: an owner that unmaps it is killed by a reader. The region is
  unmapped after the agent is gone, never before.
- What remains over TCP: UCX takes some losses of a reader for fatal. A reader that closes waits for what it has under
  way (nixl_agent.py); one that is killed cannot. An owner that was stopped (SIGSTOP) in the middle of a read, and whose
  reader has left, is aborted when it goes on (4 times of 4). One that runs on a quiet host outlived 40 readers that
  were killed in the middle of reads. Over CMA owners take no part in reads and outlived all of this.
- TCP and CMA know no authentication: whoever reaches UCX's ports (or runs as the same user) can read registered
  memory. Deployments must fence these ports off.

Shape suffixes: S slots, n pages of one batch, U8 bytes.
"""

from __future__ import annotations

import base64
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidInput, TransferError, Unavailable
from kvstore.transfer.base import PoolExport, Transfer, pool_bytes, tag_table_bytes
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
    runs_of,
    tags_of,
    wait_for_tags,
)
from kvstore.transfer.devices import addresses_of, devices_here, fabric_here, ucx_devices
from kvstore.transfer.nixl_address import NONCE_BYTES, NixlAddress, metadata_sum, parse_address
from kvstore.transfer.nixl_agent import TRANSPORTS, Agent, ReadState, Rows, missing

CELL_BYTES = 64
CELLS = 1024  # transfers that have not quiesced
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH_ROWS = 512
WINDOW = 2  # batches under way: one moves while the other's pages are summed

_LIFE = struct.Struct("<Q16s")
_LIFE_PAGE_BYTES = 4096
_MAGIC = 0x4C58494E4C4E4547


def _life_offset(slots: int, slot_bytes: int) -> int:
    return -(-pool_bytes(slots, slot_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class Batch:
    """One request: what goes where, row by row, and the places of its pages in the transfer."""

    local_rows: Rows
    remote_rows: Rows
    first: int = 0
    pages: int = 0

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self.local_rows)


@dataclass
class _Remote:
    """A loaded peer agent, shared by all connections to it. Guarded by the engine's lock."""

    agent: str
    users: int = 0
    reads: int = 0
    gone: bool = False


class _Source:
    """A connected peer: how its agent is named, what its life page must hold, and where its tags land."""

    def __init__(self, export: PoolExport, address: NixlAddress, remote: _Remote) -> None:
        self.export = export
        self.base = address.base
        self.remote = remote
        self.life = _LIFE.pack(_MAGIC, bytes.fromhex(address.nonce))
        self.life_addr = address.base + _life_offset(export.slots, export.slot_bytes)
        self.tags_lock = threading.Lock()
        self.tags_buffer = np.frombuffer(mmap.mmap(-1, tag_table_bytes(export.slots) + CELL_BYTES), dtype=np.uint8)
        self.tags_read: NixlTransfer | None = None


class NixlTransfer(PolledTransfer[Batch]):
    """A look at the peer's life page, batches of pages, and another look."""

    def __init__(
        self,
        engine: NixlEngine,
        source: _Source,
        look: Batch | None,
        batches: list[Batch],
        local_ids_n: I64 | None = None,
    ) -> None:
        # A batch of one row tells of its own failure.
        again = look is not None and any(len(batch.local_rows) > 1 for batch in batches)
        looks = [look] if look else []
        super().__init__(engine, [*looks, *batches, *(looks if again else [])], local_ids_n)
        self._engine = engine
        self._source = source
        self._look = look
        self._cell_U8 = engine.cell(look.local_rows[0][0]) if look is not None else None
        self.start()

    def _ended(self) -> None:
        if self._cell_U8 is not None and self._still:
            self._engine.give_cell(self._cell_U8)
            self._cell_U8 = None

    def _advance(self) -> bool:
        moved = self._poll()
        while self._waiting and not self._failed and self._may_post(self._waiting[0]):
            batch = self._waiting.popleft()
            if batch is self._look and self._cell_U8 is not None:
                self._cell_U8[:] = 0
            handle, state = self._engine.post(self._source.remote, batch)
            if state is ReadState.RUNNING:
                self._posted(handle, batch)
            else:
                self._judge(batch, state)
                return True  # over CMA this is where time goes by: the deadline comes first
        return moved

    def _may_post(self, batch: Batch) -> bool:
        """Nothing runs beside a look."""
        if batch is self._look:
            return not self._under_way
        return len(self._under_way) < WINDOW and all(other is not self._look for other in self._under_way.values())

    def _poll(self) -> bool:
        moved = False
        for handle in list(self._under_way):
            state = self._engine.poll(self._source.remote, handle)
            if state is not ReadState.RUNNING:
                self._judge(self._taken_back(handle), state)
                moved = True
        return moved

    def _judge(self, batch: Batch, state: ReadState) -> None:
        if state is not ReadState.DONE:
            self._failed = True
            self._unproved |= state is ReadState.FAILED
        elif batch is self._look:
            self._failed |= self._cell_U8 is None or self._cell_U8[: _LIFE.size].tobytes() != self._source.life
        else:
            self._sum(batch)


def devices_for(host: str, transport: str = "auto") -> str:
    """What UCX may listen on for a worker at `host`; "" for all."""
    if not host:
        return ""
    return ucx_devices(addresses_of(host), devices_here(), fabric_here() if transport == "auto" else ())


class NixlEngine(PoolEngine[_Source]):
    """`transport` auto or tcp (nixl_agent.py). `host`: the address whose network device it keeps to; empty, or one that
    is no device's, as 0.0.0.0: all. An operator's UCX_NET_DEVICES goes before. Raises Unavailable (library_missing,
    library_failed)."""

    name = "nixl"

    def __init__(
        self,
        transport: str = "auto",
        digester: PageDigester | None = None,
        clock_ms: ClockMs = monotonic_ms,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        host: str = "",
    ) -> None:
        super().__init__(connect_timeout_ms)
        if transport not in TRANSPORTS:
            raise InvalidInput(
                "unknown_transport", f"nixl_transport must be one of {', '.join(TRANSPORTS)}", field="nixl_transport"
            )
        self.digester = digester
        self.clock_ms = clock_ms
        self._nonce = os.urandom(NONCE_BYTES)
        self._agent = Agent(f"genlock-{self._nonce.hex()}", transport, devices_for(host, transport))
        self._region_U8: U8 | None = None
        self._cells: list[int] = []
        self._remotes: dict[str, _Remote] = {}
        self._loading = threading.Lock()
        self._late: list[_Source] = []  # disconnected, but bytes may still land in their tags' buffers

    @staticmethod
    def available() -> str | None:
        """None when the library loads, else the reason why not."""
        return missing()

    @property
    def agent(self) -> Agent:
        """The library's agent, for measurements of the library alone."""
        return self._agent

    @property
    def stopped(self) -> bool:
        """True once the library's agent is gone and nothing can land any more."""
        return self._agent.stopped

    def regions(self) -> int:
        return self._agent.regions  # what is registered, not what should be

    # -- what transfers use ------------------------------------------------------------------------------------------

    def cell(self, address: int) -> U8:
        """The landing place uint8 [CELL_BYTES] at an address that `_take_cell` gave."""
        region_U8 = self._region_U8
        assert region_U8 is not None  # a transfer needs a pool
        at = address - region_U8.ctypes.data
        return region_U8[at : at + CELL_BYTES]

    def give_cell(self, cell_U8: U8) -> None:
        with self._lock:
            self._cells.append(cell_U8.ctypes.data)

    def post(self, remote: _Remote, batch: Batch) -> tuple[int, ReadState]:
        """Starts a batch. Keeps count of what runs at a peer, so that it is not unloaded before."""
        with self._lock:
            if remote.gone:
                return 0, ReadState.GONE
            remote.reads += 1
        handle, state = self._agent.post(remote.agent, batch.local_rows, batch.remote_rows)
        self._note(remote, state)
        return handle, state

    def poll(self, remote: _Remote, handle: int) -> ReadState:
        state = self._agent.poll(handle)
        self._note(remote, state)
        return state

    def _note(self, remote: _Remote, state: ReadState) -> None:
        if state is ReadState.RUNNING:
            return
        with self._lock:
            if state is ReadState.GONE:
                remote.gone = True
            if state is not ReadState.FAILED:  # what is not proved to have ended keeps the peer loaded
                remote.reads -= 1
            self._drop_if_idle(remote)

    def _drop_if_idle(self, remote: _Remote) -> None:
        """Called with the lock held: it keeps a `connect` from loading the peer between look and unload."""
        if remote.reads or (remote.users and not remote.gone):
            return
        if self._remotes.get(remote.agent) is remote:
            del self._remotes[remote.agent]
            self._agent.forget(remote.agent)

    # -- PoolEngine --------------------------------------------------------------------------------------------------

    def _map(self, nbytes: int) -> U8:
        life_at = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        cells_at = life_at + _LIFE_PAGE_BYTES
        region_U8 = np.frombuffer(mmap.mmap(-1, cells_at + CELLS * CELL_BYTES), dtype=np.uint8)
        base = region_U8.ctypes.data
        self._agent.register(region_U8)
        self._region_U8 = region_U8
        self._cells = [base + cells_at + i * CELL_BYTES for i in range(CELLS)]
        return region_U8[:nbytes]

    def _register(self, incarnation: int) -> str:
        region_U8 = self._region_U8
        assert region_U8 is not None  # publish checked it
        life = _LIFE.pack(_MAGIC, self._nonce)
        at = _life_offset(self._slots, self._slot_bytes)
        region_U8[at : at + len(life)] = np.frombuffer(life, np.uint8)
        metadata = self._agent.metadata()
        return NixlAddress(
            agent=self._agent.name,
            base=region_U8.ctypes.data,
            nonce=self._nonce.hex(),
            metadata=base64.b64encode(metadata).decode(),
            sum=metadata_sum(self._agent.name, metadata),
        ).text()

    def _attach(self, export: PoolExport) -> _Source:
        self._sweep()
        address = parse_address(export.address)
        source = _Source(export, address, self._load(address))
        try:
            self._agent.register(source.tags_buffer)
        except BaseException:
            self._leave(source.remote)
            raise
        return source

    def _load(self, address: NixlAddress) -> _Remote:
        with self._loading:  # one at a time: the first connection to a peer takes tens of milliseconds
            with self._lock:
                remote = self._remotes.get(address.agent)
                if remote is not None and remote.gone:
                    raise Unavailable("peer_gone", "reads over a broken connection to the peer have not ended yet")
                if remote is not None:
                    remote.users += 1
                    return remote
            loaded = self._agent.load(base64.b64decode(address.metadata))
            with self._lock:
                if loaded != address.agent:
                    if loaded not in self._remotes:
                        self._agent.forget(loaded)
                    raise Unavailable("peer_gone", "the peer's nixl metadata names another agent")
                remote = self._remotes[loaded] = _Remote(loaded, users=1)
                return remote

    def _leave(self, remote: _Remote) -> None:
        with self._lock:
            remote.users -= 1
            self._drop_if_idle(remote)

    def _detach(self, source: _Source) -> None:
        with self._lock:
            self._late.append(source)
        self._sweep()
        self._leave(source.remote)

    def _sweep(self) -> None:
        """Deregisters the tags' buffers of disconnected peers, once nothing can land in them any more."""
        with self._lock:
            late, self._late = self._late, []
        for source in late:
            if source.tags_read is None or source.tags_read.quiesced():
                self._agent.deregister(source.tags_buffer)
            else:
                with self._lock:
                    self._late.append(source)

    def _start(self, source: _Source, remote_ids: Ids, local_ids: Ids) -> Transfer:
        batches = list(self._batches(source, remote_ids, local_ids))
        with self._lock:
            if not self._cells:
                raise TransferError("too_many_transfers", f"{CELLS} transfers have not ended yet")
            cell = self._cells.pop()
        look = Batch([(cell, CELL_BYTES, 0)], [(source.life_addr, CELL_BYTES, 0)])
        return NixlTransfer(self, source, look, batches, np.array(local_ids, np.int64))

    def _batches(self, source: _Source, remote_ids: Ids, local_ids: Ids) -> Iterator[Batch]:
        """Neighbouring pages are one row; a batch is as many rows as its limits allow, in the order of the pages."""
        size = source.export.slot_bytes
        local_base = self.slots_SU8.ctypes.data
        remote_base = source.base + tag_table_bytes(source.export.slots)
        most = max(1, MAX_BATCH_BYTES // size)
        local_rows, remote_rows = Rows(), Rows()
        start = 0
        for first, pages, remote, local in runs_of(remote_ids, local_ids, most):
            if local_rows and (len(local_rows) == MAX_BATCH_ROWS or first + pages - start > most):
                yield Batch(local_rows, remote_rows, start, first - start)
                local_rows, remote_rows, start = Rows(), Rows(), first
            local_rows.append((local_base + local * size, pages * size, 0))
            remote_rows.append((remote_base + remote * size, pages * size, 0))
        yield Batch(local_rows, remote_rows, start, len(remote_ids) - start)

    def _live_tags(self, source: _Source, timeout_ms: int) -> I64:
        with source.tags_lock:
            refuse_stuck(source.tags_read)
            slots, landing = source.export.slots, source.tags_buffer
            life_at = tag_table_bytes(slots)
            landing[life_at:] = 0
            base = landing.ctypes.data
            # The table is last: of a request's rows only that one tells of its failure; the life page shows its own.
            table = Batch(
                [(base + life_at, CELL_BYTES, 0), (base, slots * 16, 0)],
                [(source.life_addr, CELL_BYTES, 0), (source.base, slots * 16, 0)],
            )
            read = source.tags_read = NixlTransfer(self, source, None, [table])
            wait_for_tags(read, timeout_ms)
            found = landing[life_at : life_at + _LIFE.size].tobytes()
            if found != source.life:
                raise TransferError("peer_gone", "the peer's pool was closed, or another one took its place")
            return tags_of(landing, slots).copy()

    def _tear_down(self) -> None:
        region_U8 = self._region_U8
        if region_U8 is not None:
            # The first thing: from here on readers that still reach the memory refuse it.
            at = _life_offset(self._slots, self._slot_bytes)
            region_U8[at : at + _LIFE.size] = 0
        self._agent.destroy(CLOSE_TIMEOUT_MS)
        self._region_U8 = None
