"""The pools that a decode worker is connected to, by the life that each of them is."""

from __future__ import annotations

import threading

from kvstore.registry import IncarnationRegistry
from kvstore.transfer.base import Peer, PoolExport, TransferEngine

MAX_PEERS = 1024


class PeerTable:
    """Connected pools by worker name. A name that comes back with a new incarnation is a new peer.

    Called from the threads that pull; one connects at a time, so that no peer is connected twice and one forgotten.
    """

    def __init__(self, engine: TransferEngine, registry: IncarnationRegistry) -> None:
        self._engine = engine
        self._registry = registry
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()

    def connect(self, name: str, export: PoolExport) -> Peer:
        """Raises StalePage for a dead incarnation, Unavailable or InvalidInput where the engine refuses."""
        with self._lock:
            return self._connect(name, export)

    def _connect(self, name: str, export: PoolExport) -> Peer:
        former = self._registry.see(name, export.incarnation)
        if former is not None:
            self._drop(former)
        peer = self._peers.get(export.incarnation)
        if peer is None or peer.export != export:
            if peer is not None:
                self._drop(export.incarnation)
            if len(self._peers) >= MAX_PEERS:
                self._drop(next(iter(self._peers)))
            peer = self._peers[export.incarnation] = self._engine.connect(export)
        return peer

    def _drop(self, incarnation: int) -> None:
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            self._engine.disconnect(peer)
