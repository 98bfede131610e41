"""The contract of a transfer engine.

A pool is one contiguous buffer: `[tag table: int64 [slots, 2], padded to 4096 B | slots * slot_bytes]`. The engine
allocates it (so that it may choose memory that peers can reach), publishes how to reach it, and reads a peer's
pages into our own slots. Reads are pulls: nobody but the owner ever writes into a pool.

Rules that every engine keeps (contract suite: tests/contract/):

1. `wait` returns DONE only when all bytes have been stored; anything else is FAILED or TIMED_OUT, and is final.
2. After FAILED or TIMED_OUT late bytes may still land. `quiesced()` is True only by proof (the engine reached an
   end state, or was torn down); never because time went by.
3. `read_tags` is ordered after every page read that was waited for before it.
4. Page pairs outside the peer's or our own pool are refused before anything moves.
5. `connect` refuses an export whose incarnation the buffer no longer has; a restarted peer is another peer.
   `publish` stamps the incarnation into column 0 of every row of the tag table, and the owner keeps it there.
6. An engine may be called from several threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.descriptor import PageDescriptor

TAG_TABLE_ALIGN_BYTES = 4096
MAX_PAGES_PER_TRANSFER = 65_536


class PagePair(NamedTuple):
    """One page to pull: the source's slot and the slot of ours that receives it."""

    remote_page_id: int
    local_page_id: int


@dataclass(frozen=True)
class PoolExport:
    """How a peer reaches a pool. `address` is engine-specific text and comes only from servers, never from clients."""

    engine: str
    incarnation: int
    layout: str  # PageLayout.canonical()
    slots: int
    slot_bytes: int
    address: str
    # A sealed page that is there as long as the pool, for peers to prove an exchange with (kvstore/beacon.py).
    beacon: PageDescriptor | None = None


class TransferState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class Transfer(ABC):
    """One batch of page reads. End states are final."""

    @abstractmethod
    def wait(self, timeout_ms: int) -> TransferState:
        """Blocks up to `timeout_ms`. TIMED_OUT ends our interest; bytes may still land until `quiesced()`."""

    @abstractmethod
    def quiesced(self) -> bool:
        """True once it is proved that no byte of this batch can still land in our slots."""

    @property
    def body_sums(self) -> npt.NDArray[np.uint64] | None:
        """uint64 [pages, 2] NH sums of the page bodies (digest.py), if the engine computed them while copying."""
        return None


@dataclass(frozen=True)
class Peer:
    """A connected pool. Made by `connect` only."""

    export: PoolExport
    handle: int


def tag_table_bytes(slots: int) -> int:
    return -(-slots * 16 // TAG_TABLE_ALIGN_BYTES) * TAG_TABLE_ALIGN_BYTES


def pool_bytes(slots: int, slot_bytes: int) -> int:
    """Size of a pool's buffer: tag table, then slots."""
    return tag_table_bytes(slots) + slots * slot_bytes


class TransferEngine(ABC):
    """One engine instance owns at most one local pool and any number of peers."""

    name: str

    @abstractmethod
    def allocate(self, slots: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns the zeroed, page-aligned buffer uint8 [pool_bytes] that the local pool lives in. Called once."""

    @abstractmethod
    def publish(self, incarnation: int, layout: str) -> PoolExport:
        """Registers the allocated buffer and returns its export. Called once, after `allocate`."""

    @abstractmethod
    def connect(self, export: PoolExport) -> Peer:
        """Raises Unavailable (reason peer_gone / incarnation_changed) or InvalidInput (another engine's export)."""

    @abstractmethod
    def read_pages(self, peer: Peer, pairs: Sequence[PagePair]) -> Transfer:
        """Starts pulling whole slots. Raises InvalidInput (a slot out of range) or TransferError (it cannot start)."""

    @abstractmethod
    def read_tags(self, peer: Peer, timeout_ms: int) -> npt.NDArray[np.int64]:
        """int64 [slots, 2]: the peer's live tags now. Raises TransferError / TransferTimeout."""

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Forgets a peer; unknown peers are ignored."""

    def regions(self) -> int:
        """Memory regions that the engine has registered or attached now: its own pool's, one for each connection to a
        peer, and those of former connections in which bytes may still land. 0 after `close`, and from an engine that
        cannot tell."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Tears the engine down; afterwards every transfer is quiesced and the buffer is unregistered. Idempotent."""
