"""The pools that a decode worker is connected to, by the life that each of them is, and whether each has proved itself.

connect ─► engine connects ─► prover pulls one marked page and judges it ─► the peer may be pulled from
a read fails by itself ─► the peer is forgotten, and connected anew by the next handoff
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.errors import GenlockError
from kvstore.registry import IncarnationRegistry
from kvstore.transfer.base import Peer, PoolExport, TransferEngine

MAX_PEERS = 1024


@dataclass(frozen=True)
class PeerVerdict:
    """What came of the last try to reach one worker's pool. `incarnation` is 0 when the worker told none."""

    worker: str
    incarnation: int
    passed: bool
    reason: str = ""
    detail: str = ""


@dataclass
class _Turn:
    """Whoever connects to one worker waits for nobody but those who do so too."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0


class PeerTable:
    """Connected pools by worker name. A name that comes back with a new incarnation is a new peer.

    `prove` is called with each newly connected peer and raises unless a page arrives as it was sealed; a peer is in
    the table only after that. Without it every connected peer counts as proved: for worlds that have no beacons.
    Called from several threads; one connects to a worker at a time, so that no peer is connected twice and one
    forgotten, and a worker that hangs keeps only its own callers waiting.
    """

    def __init__(
        self, engine: TransferEngine, registry: IncarnationRegistry, prove: Callable[[Peer], None] | None = None
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._prove = prove
        self._peers: dict[int, Peer] = {}
        self._verdicts: dict[str, PeerVerdict] = {}
        self._turns: dict[str, _Turn] = {}
        self._met: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def proves(self) -> bool:
        """Whether a peer must pass an exchange before it is used."""
        return self._prove is not None

    @property
    def verdicts(self) -> tuple[PeerVerdict, ...]:
        """The last one of each worker, newest last."""
        with self._lock:
            return tuple(self._verdicts.values())

    @property
    def untried(self) -> int:
        """Workers whose first exchange is under way: they are known, and there is no verdict yet."""
        with self._lock:
            return sum(name not in self._verdicts for name in self._met)

    @contextmanager
    def meeting(self, name: str) -> Iterator[None]:
        """While a worker is asked for its pool and proved."""
        with self._lock:
            self._met[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._met[name] -= 1
                if not self._met[name]:
                    del self._met[name]

    def connect(self, name: str, export: PoolExport) -> Peer:
        """Raises StalePage for a dead incarnation, Unavailable or InvalidInput where the engine refuses, Unavailable
        ('peer_not_proved') or LayoutMismatch where the exchange of a page did not pass; then the next call tries
        again."""
        with self._turn(name):
            try:
                peer = self._connect(name, export)
            except GenlockError as error:
                self.note(PeerVerdict(name, export.incarnation, False, error.reason, error.message))
                raise
            self.note(PeerVerdict(name, export.incarnation, True))
            return peer

    def lost(self, peer: Peer) -> None:
        """A read from this peer failed by itself, not by what it brought: the connection may be broken while both
        workers live. The next handoff connects and proves anew; else the pair would fail until one of them restarts."""
        with self._lock:
            if self._peers.get(peer.export.incarnation) is peer:
                self._drop(peer.export.incarnation)

    def note(self, verdict: PeerVerdict) -> None:
        """Keeps a verdict; also those of peers that could not even be asked for their pool."""
        with self._lock:
            self._verdicts.pop(verdict.worker, None)
            self._verdicts[verdict.worker] = verdict
            while len(self._verdicts) > MAX_PEERS:
                self._verdicts.pop(next(iter(self._verdicts)))

    def _connect(self, name: str, export: PoolExport) -> Peer:
        with self._lock:
            former = self._registry.see(name, export.incarnation)
            if former is not None:
                self._drop(former)
            known = self._peers.get(export.incarnation)
            if known is not None:
                if known.export == export:
                    return known
                self._drop(export.incarnation)
        peer = self._engine.connect(export)
        try:
            if self._prove is not None:
                self._prove(peer)
        except BaseException:
            self._engine.disconnect(peer)
            raise
        with self._lock:
            if len(self._peers) >= MAX_PEERS:
                self._drop(next(iter(self._peers)))
            self._peers[export.incarnation] = peer
        return peer

    def _drop(self, incarnation: int) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            self._engine.disconnect(peer)

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        with self._lock:
            turn = self._turns.setdefault(name, _Turn())
            turn.users += 1
        try:
            with turn.lock:
                yield
        finally:
            with self._lock:
                turn.users -= 1
                if not turn.users:
                    del self._turns[name]
