"""The table of peers: lives, limits, threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from decode import peers
from decode.peers import PeerTable
from kvstore.errors import InvalidInput, StalePage, Unavailable
from kvstore.registry import IncarnationRegistry
from kvstore.transfer.base import Peer, PoolExport
from tests.support.kv_world import LAYOUT


def export(incarnation: int, address: str = "") -> PoolExport:
    return PoolExport("fake", incarnation, LAYOUT.canonical(), 8, LAYOUT.slot_bytes, address)


class FakeEngine:
    """Counts what is connected; connecting may take its time."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.open: list[Peer] = []
        self.connected = 0
        self.refuse = False
        self._gate = gate

    def connect(self, wanted: PoolExport) -> Peer:
        if self.refuse:
            raise Unavailable("peer_gone", "nobody there")
        if self._gate is not None:
            self._gate.wait(10)
        self.connected += 1
        peer = Peer(wanted, self.connected)
        self.open.append(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        self.open.remove(peer)


def table(engine: FakeEngine | None = None) -> tuple[PeerTable, FakeEngine]:
    engine = engine or FakeEngine()
    return PeerTable(engine, IncarnationRegistry()), engine


def test_one_life_is_connected_once():
    peers_, engine = table()
    first = peers_.connect("prefill-0", export(11))
    assert peers_.connect("prefill-0", export(11)) is first
    assert engine.connected == 1


def test_a_new_life_takes_the_place_of_the_former_which_is_dead_for_good():
    peers_, engine = table()
    peers_.connect("prefill-0", export(11))
    second = peers_.connect("prefill-0", export(12))
    assert engine.open == [second]
    with pytest.raises(StalePage) as caught:
        peers_.connect("prefill-0", export(11))
    assert caught.value.reason == "incarnation_dead"
    with pytest.raises(StalePage):
        peers_.connect("prefill-1", export(11))
    assert peers_.connect("prefill-0", export(12)) is second


def test_a_connection_that_broke_is_made_anew_while_both_live():
    peers_, engine = table()
    first = peers_.connect("prefill-0", export(11))
    peers_.lost(first)
    assert engine.open == []
    again = peers_.connect("prefill-0", export(11))
    assert again is not first
    # Late news about the former connection does not end the present one.
    peers_.lost(first)
    assert peers_.connect("prefill-0", export(11)) is again
    assert engine.open == [again]


def test_two_names_may_not_be_one_life():
    peers_, _ = table()
    peers_.connect("prefill-0", export(11))
    with pytest.raises(StalePage) as caught:
        peers_.connect("prefill-1", export(11))
    assert caught.value.reason == "incarnation_taken"


def test_an_export_that_changed_is_connected_anew():
    """Same life at another address, or with other facts: what was known of it is not believed any more."""
    peers_, engine = table()
    peers_.connect("prefill-0", export(11))
    moved = peers_.connect("prefill-0", export(11, "elsewhere"))
    assert engine.open == [moved]
    assert moved.export == export(11, "elsewhere")
    grown = peers_.connect("prefill-0", replace(export(11, "elsewhere"), slots=9))
    assert engine.open == [grown]


@pytest.mark.parametrize("incarnation", [0, -1, 1 << 63])
def test_what_is_no_incarnation_is_refused(incarnation):
    peers_, engine = table()
    with pytest.raises(InvalidInput):
        peers_.connect("prefill-0", export(incarnation))
    assert engine.connected == 0


def test_a_peer_that_refused_may_be_tried_again():
    peers_, engine = table()
    engine.refuse = True
    with pytest.raises(Unavailable):
        peers_.connect("prefill-0", export(11))
    engine.refuse = False
    peers_.connect("prefill-0", export(11))
    assert engine.connected == 1


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(peers, "MAX_PEERS", 3)
    peers_, engine = table()
    for i in range(10):
        peers_.connect(f"prefill-{i}", export(11 + i))
    assert len(engine.open) == 3


def test_threads_that_come_at_once_connect_once():
    """Without the lock each of them finds the table empty and connects; all but one are forgotten, and leak."""
    gate = threading.Event()
    peers_, engine = table(FakeEngine(gate))
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(peers_.connect, "prefill-0", export(11)) for _ in range(4)]
        gate.set()
        found = {id(f.result(10)) for f in futures}
    assert (engine.connected, len(found), len(engine.open)) == (1, 1, 1)
