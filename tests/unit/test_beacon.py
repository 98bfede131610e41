"""The start-up self-test: a beacon crosses the engine and is judged; no fault of the path passes, no load takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode.peers import PeerTable
from kvstore.beacon import BEACON_SLOTS, LANDING_SLOTS, PeerProver, light_beacon
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.digest import Digester
from kvstore.errors import GenlockError, LayoutMismatch, NoCapacity, Unavailable
from kvstore.guard import Guard
from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.layout import HEADER_BYTES
from kvstore.receive import PageReceiver
from kvstore.registry import IncarnationRegistry
from kvstore.transfer.base import PagePair
from kvstore.transfer.faults import BitFlip, Ending, FaultHooks, TransferFaults
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from tests.support.kv_world import LAYOUT, SECRET, make_keyer

SLOTS = 6


def flip(byte: int) -> TransferFaults:
    return TransferFaults(bit_flips=(BitFlip(0, byte, 3),))


class World:
    """One decode pool and prefill pools by name, all on one fabric; `faults` hit every transfer from `hit`."""

    def __init__(self, checks: Checks = ALL_CHECKS, hooks: FaultHooks | None = None) -> None:
        self.faults = TransferFaults()
        self.hit = ""
        plan = lambda info: self.faults if info.source.address == self.hit else TransferFaults()  # noqa: E731
        self.fabric = MemoryFabric(plan, hooks or FaultHooks())
        self.keyer = make_keyer()
        engine = MemoryEngine(self.fabric, "decode")
        digester = Digester(SECRET, LAYOUT.slot_bytes)
        self.sink = Guard(LAYOUT, SLOTS, engine, 22, digester, checks=checks, spares=LANDING_SLOTS)
        self.receiver = PageReceiver(self.sink, engine)
        self.prover = PeerProver(self.sink, self.receiver, self.keyer, 100)
        self.peers = PeerTable(engine, IncarnationRegistry(), self.prover)
        self.engine = engine

    def prefill(self, name: str, incarnation: int, *, keyer: PrefixKeyer | None = None, secret: bytes = SECRET,
                layout=LAYOUT) -> Guard:  # fmt: skip
        engine = MemoryEngine(self.fabric, name)
        digester = Digester(secret, layout.slot_bytes)
        guard = Guard(layout, SLOTS, engine, incarnation, digester, scrub=False, spares=BEACON_SLOTS)
        light_beacon(guard, keyer or self.keyer)
        return guard

    def refused(self, name: str, guard: Guard) -> GenlockError:
        with pytest.raises(GenlockError) as caught:
            self.peers.connect(name, guard.export)
        return caught.value

    def verdict(self, name: str):
        return next(v for v in self.peers.verdicts if v.worker == name)


def test_a_healthy_pair_is_proved_once_and_leaves_no_page_taken():
    world = World()
    guard = world.prefill("p0", 11)
    peer = world.peers.connect("p0", guard.export)
    assert world.peers.connect("p0", guard.export) is peer
    assert (world.verdict("p0").passed, world.verdict("p0").incarnation) == (True, 11)
    assert world.sink.counters["peer_proof/ok"] == 1
    assert (world.sink.counts().free, world.sink.free_spares) == (SLOTS, LANDING_SLOTS)


FAULTS = {
    "corrupt": (flip(HEADER_BYTES + 3), "digest_mismatch"),
    "corrupt header": (flip(40), "header_mismatch"),
    "short": (TransferFaults(short_tail_bytes=LAYOUT.slot_bytes // 2), "digest_mismatch"),
    "dropped": (TransferFaults(ending=Ending.DROP), "transfer_timeout"),
    "lost": (TransferFaults(ending=Ending.PEER_LOSS), "transfer_failed"),
    "early notice": (TransferFaults(ending=Ending.EARLY_NOTICE, delay_ms=50), "header_mismatch"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_path_that_does_not_carry_pages_is_not_used_and_others_are(name: str):
    world = World()
    sick, healthy = world.prefill("sick", 11), world.prefill("healthy", 12)
    world.hit, (world.faults, reason) = "sick", FAULTS[name]
    error = world.refused("sick", sick)
    assert (type(error), error.reason) == (Unavailable, "peer_not_proved")
    assert reason in error.message
    assert (world.verdict("sick").passed, reason in world.verdict("sick").detail) == (False, True)
    world.peers.connect("healthy", healthy.export)
    assert world.verdict("healthy").passed
    # The path is repaired: the next try finds out.
    world.faults = TransferFaults()
    world.peers.connect("sick", sick.export)
    assert world.verdict("sick").passed
    assert world.sink.counts().free == SLOTS


def test_without_the_exchange_every_one_of_these_paths_would_be_used():
    for faults, _reason in FAULTS.values():
        world = World()
        world.peers = PeerTable(world.engine, IncarnationRegistry())
        world.hit, world.faults = "p0", faults
        assert world.peers.connect("p0", world.prefill("p0", 11).export)


def test_stale_bytes_and_another_page_do_not_pass():
    """What lies in the slot is a sealed page of the same pool, whole and intact: only not the beacon."""
    world = World()
    guard = world.prefill("p0", 11)
    other = guard.export.beacon
    assert other is not None
    slots = guard._pool.slots_SU8
    beacon_id, slots[0] = other.ref.page_id, slots[other.ref.page_id]
    slots[beacon_id, HEADER_BYTES:] ^= 1  # what an earlier life left there
    assert "digest_mismatch" in world.refused("p0", guard).message
    slots[beacon_id] = 0
    assert "header_mismatch" in world.refused("p0", guard).message


def test_another_life_under_the_same_name_is_proved_again():
    world = World()
    world.peers.connect("p0", world.prefill("p0", 11).export)
    second = world.prefill("p0", 12)
    world.hit, world.faults = "p0", TransferFaults(short_tail_bytes=LAYOUT.slot_bytes // 2)
    assert world.refused("p0", second).reason == "peer_not_proved"
    world.faults = TransferFaults()
    world.peers.connect("p0", second.export)
    assert (world.verdict("p0").incarnation, world.verdict("p0").passed) == (12, True)


def test_the_beacon_of_another_life_does_not_prove_this_one():
    world = World()
    first, second = world.prefill("p0", 11), world.prefill("p0", 12)
    error = world.refused("p0", _with_beacon(second, first.export.beacon))
    assert "stale_incarnation" in error.message


def _with_beacon(guard: Guard, beacon: object) -> Guard:
    guard.export = replace(guard.export, beacon=beacon)  # type: ignore[arg-type]
    return guard


def test_a_pool_without_a_beacon_is_not_proved():
    world = World()
    assert "no_beacon" in world.refused("p0", _with_beacon(world.prefill("p0", 11), None)).message


def test_another_secret_is_not_this_cluster():
    world = World()
    stranger = PrefixKeyer(b"another cluster's secret", PrefixIdentity("rev", "tok", LAYOUT.fingerprint))
    assert "foreign_prefix_key" in world.refused("p0", world.prefill("p0", 11, keyer=stranger)).message
    wrong_digests = world.prefill("p1", 12, secret=b"another cluster's secret")
    assert "digest_mismatch" in world.refused("p1", wrong_digests).message


def test_another_layout_is_named_by_its_field():
    world = World()
    layout = replace(LAYOUT, model="another")
    error = world.refused("p0", world.prefill("p0", 11, layout=layout))
    assert (type(error), error.field) == (LayoutMismatch, "layout.model")


@pytest.mark.parametrize("pressure", ["decode", "prefill", "both"])
def test_full_pools_can_prove_and_the_beacon_stays(pressure: str):
    world = World()
    guard = world.prefill("p0", 11)
    for pool in {"decode": [world.sink], "prefill": [guard], "both": [world.sink, guard]}[pressure]:
        refs = pool.allocate(1, SLOTS)
        with pytest.raises(NoCapacity):
            pool.allocate(1, 1)
        assert guard.export.beacon is not None
        assert guard.export.beacon.ref.page_id not in {r.page_id for r in refs if pool is guard}
    world.peers.connect("p0", guard.export)
    counts = guard.counts()
    assert counts.free + counts.open + counts.sealed + counts.quarantined == guard.slots == SLOTS
    assert (guard.spares, guard.free_spares, guard.export.slots) == (1, 0, SLOTS + 1)


def test_an_exchange_that_may_still_write_keeps_its_landing_place_and_no_more():
    """Each hung exchange holds one spare until the engine proves that it stopped; requests' pages are not touched."""
    world = World()
    guards = [world.prefill(f"p{i}", 11 + i) for i in range(LANDING_SLOTS + 2)]
    world.faults = TransferFaults(ending=Ending.LATE, delay_ms=500)
    for i in range(LANDING_SLOTS):
        world.hit = f"p{i}"
        assert "transfer_timeout" in world.refused(f"p{i}", guards[i]).message
    assert (world.sink.free_spares, world.sink.counts().free) == (0, SLOTS)
    world.hit = ""
    assert "no_spares" in world.refused("p5", guards[-1]).message
    world.fabric.pump(1000)
    world.peers.connect("p5", guards[-1].export)
    assert world.sink.free_spares == LANDING_SLOTS


def test_a_beacon_that_is_overwritten_while_it_is_read_does_not_pass():
    """The tag moves before anything may overwrite the page; it is read after the data."""
    guards: list[Guard] = []

    def recycle(pairs: Sequence[PagePair]) -> None:
        assert guards[0].export.beacon is not None
        guards[0].condemn([guards[0].export.beacon.ref])

    world = World(hooks=FaultHooks(before_copy=recycle))
    guards.append(world.prefill("p0", 11))
    assert "source_moved_on" in world.refused("p0", guards[0]).message


@pytest.mark.parametrize(
    ("check", "fault"),
    [("digest", flip(HEADER_BYTES + 3)), ("header", flip(30))],
)
def test_a_check_that_is_off_lets_the_fault_pass(check: str, fault: TransferFaults):
    """So it is the receipt's own checks that refuse above."""
    off = (check,) if check == "digest" else ("header", "digest", "prefix_key")
    checks = ALL_CHECKS
    for name in off:
        checks = checks.without(name)
    world = World(checks)
    world.hit, world.faults = "p0", fault
    world.peers.connect("p0", world.prefill("p0", 11).export)
