"""Every kind of transfer fault does what it says, on the memory engine and around a real one alike."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvstore.errors import InvalidInput, TransferError
from kvstore.transfer.base import PagePair, Peer, Transfer, TransferEngine, TransferState
from kvstore.transfer.common import slots_of, tags_of
from kvstore.transfer.faults import (
    KINDS,
    NO_FAULTS,
    BitFlip,
    Ending,
    FaultHooks,
    FaultRates,
    SeededPlan,
    TransferFaults,
    TransferInfo,
)
from kvstore.transfer.faulty import FaultyEngine
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from kvstore.transfer.select import available_engines, make_engine
from kvstore.transfer.shm import ShmEngine

SLOTS, SLOT_BYTES = 8, 192
PAIRS = [PagePair(1, 5), PagePair(4, 0), PagePair(2, 2)]
DONE, FAILED, TIMED_OUT = TransferState.DONE, TransferState.FAILED, TransferState.TIMED_OUT


@dataclass
class Rig:
    """A source, a reader whose transfers have faults, and the way to let late bytes land."""

    source: TransferEngine
    reader: TransferEngine
    land: Callable[[Transfer], None]
    plan: list[TransferFaults]  # consumed one a transfer; then no faults
    hooks: FaultHooks
    close: Callable[[], None]
    infos: list[TransferInfo] = field(default_factory=list)
    peer: Peer = field(init=False)

    def open(self) -> None:
        self.source_buffer = self.source.allocate(SLOTS, SLOT_BYTES)
        self.buffer = self.reader.allocate(SLOTS, SLOT_BYTES)
        export = self.source.publish(11, "layout")
        self.reader.publish(12, "layout")
        self.from_slots = slots_of(self.source_buffer, SLOTS, SLOT_BYTES)
        self.slots = slots_of(self.buffer, SLOTS, SLOT_BYTES)
        rng = np.random.default_rng(1)
        self.from_slots[:] = rng.integers(1, 256, self.from_slots.shape, dtype=np.uint8)
        self.slots[:] = rng.integers(1, 256, self.slots.shape, dtype=np.uint8)
        self.before = self.slots.copy()
        self.peer = self.reader.connect(export)

    def start(self, faults: TransferFaults = NO_FAULTS, pairs: list[PagePair] = PAIRS) -> Transfer:
        self.plan.append(faults)
        return self.reader.read_pages(self.peer, pairs)

    def assert_landed(self, sources: dict[int, int] | None = None) -> None:
        """Our slot -> the source's page that it must hold; every other slot is untouched."""
        expected = self.before.copy()
        for local, remote in (
            {p.local_page_id: p.remote_page_id for p in PAIRS} if sources is None else sources
        ).items():
            expected[local] = self.from_slots[remote]
        np.testing.assert_array_equal(self.slots, expected)


class _Hooks:
    """Hooks that a test sets after the engines were made."""

    def __init__(self) -> None:
        self.before_copy: Callable[[object], None] = lambda pairs: None
        self.between_halves: Callable[[PagePair], None] = lambda pair: None

    def as_hooks(self) -> FaultHooks:
        return FaultHooks(self._before, self._between)

    def _before(self, pairs: object) -> None:
        self.before_copy(pairs)

    def _between(self, pair: PagePair) -> None:
        self.between_halves(pair)


def _make(kind: str) -> Rig:
    hooks, faults = _Hooks(), []

    def plan(info: TransferInfo) -> TransferFaults:
        rig.infos.append(info)
        return faults.pop(0) if faults else NO_FAULTS

    if kind == "memory":
        fabric = MemoryFabric(plan, hooks.as_hooks())
        source, reader = MemoryEngine(fabric, "source"), MemoryEngine(fabric, "reader")
        rig = Rig(source, reader, lambda transfer: fabric.land_all(), faults, hooks, reader.close)
    else:
        gate = threading.Event()
        source, reader = ShmEngine(), FaultyEngine(ShmEngine(), plan, hooks.as_hooks(), gate, "reader")

        def land(transfer: Transfer) -> None:
            gate.set()
            deadline = time.monotonic() + 10
            while not transfer.quiesced() and time.monotonic() < deadline:
                time.sleep(0.001)

        rig = Rig(source, reader, land, faults, hooks, reader.close)
    rig.open()
    return rig


@pytest.fixture(params=["memory", "faulty"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = _make(request.param)
    yield made
    made.reader.close()
    made.source.close()


def test_without_faults_pages_land(rig: Rig) -> None:
    transfer = rig.start()
    assert transfer.wait(5_000) is DONE
    assert transfer.quiesced()
    rig.assert_landed()


def test_drop_never_completes_and_is_proved_only_by_teardown(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.DROP))
    assert transfer.wait(20) is TIMED_OUT
    if isinstance(rig.reader, MemoryEngine):
        rig.land(transfer)
    assert not transfer.quiesced()
    rig.assert_landed({})
    rig.reader.close()
    assert transfer.quiesced()
    assert transfer.wait(20) is TIMED_OUT


def test_early_notice_says_done_before_bytes_land(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.EARLY_NOTICE))
    assert transfer.wait(5_000) is DONE
    assert not transfer.quiesced()
    rig.assert_landed({})
    rig.land(transfer)
    assert transfer.quiesced()
    rig.assert_landed()


def test_late_bytes_land_after_a_time_out(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.LATE))
    assert transfer.wait(5_000) is TIMED_OUT
    assert not transfer.quiesced()
    rig.assert_landed({})
    rig.land(transfer)
    assert transfer.quiesced()
    rig.assert_landed()
    assert transfer.wait(5_000) is TIMED_OUT


def test_closing_the_engine_stops_late_bytes(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.LATE))
    assert transfer.wait(5_000) is TIMED_OUT
    rig.reader.close()
    assert transfer.quiesced()
    if isinstance(rig.reader, MemoryEngine):
        rig.reader.fabric.land_all()
    rig.assert_landed({})


def test_an_error_while_the_rest_still_lands(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.ERROR_REST_LANDS, landed_pages=1))
    assert transfer.wait(5_000) is FAILED
    assert not transfer.quiesced()
    rig.assert_landed({5: 1})
    rig.land(transfer)
    assert transfer.quiesced()
    rig.assert_landed()
    assert transfer.wait(5_000) is FAILED


def test_peer_loss_fails_everything_until_the_next_connect(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.PEER_LOSS, landed_pages=2))
    assert transfer.wait(5_000) is FAILED
    assert transfer.quiesced()
    rig.assert_landed({5: 1, 0: 4})
    with pytest.raises(TransferError):
        rig.start()
    with pytest.raises(TransferError):
        rig.reader.read_tags(rig.peer, 100)
    rig.plan.clear()
    rig.peer = rig.reader.connect(rig.peer.export)
    assert rig.start().wait(5_000) is DONE


def test_a_delay_within_the_time_out_is_waited_for(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(delay_ms=20))
    assert transfer.wait(5_000) is DONE
    rig.assert_landed()


def test_a_delay_beyond_the_time_out_lands_late(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(delay_ms=60))
    assert transfer.wait(10) is TIMED_OUT
    assert not transfer.quiesced()
    rig.assert_landed({})
    rig.land(transfer)
    assert transfer.quiesced()
    rig.assert_landed()
    assert transfer.wait(5_000) is TIMED_OUT


@pytest.mark.parametrize(("page", "short"), [(None, (0, 1, 2)), (1, (1,))])
def test_short_pages_end_in_zeros(rig: Rig, page: int | None, short: tuple[int, ...]) -> None:
    transfer = rig.start(TransferFaults(short_tail_bytes=70, short_page=page))
    assert transfer.wait(5_000) is DONE
    for place, pair in enumerate(PAIRS):
        expected = rig.from_slots[pair.remote_page_id].copy()
        if place in short:
            expected[-70:] = 0
        np.testing.assert_array_equal(rig.slots[pair.local_page_id], expected)
    assert transfer.body_sums is None


def test_a_torn_page_has_halves_of_two_times(rig: Rig) -> None:
    first, seen = rig.from_slots[4].copy(), []

    def overwrite(pair: PagePair) -> None:
        seen.append(pair)
        rig.from_slots[4] ^= 0xFF

    rig.hooks.between_halves = overwrite
    transfer = rig.start(TransferFaults(torn_page=1))
    assert transfer.wait(5_000) is DONE
    assert seen == [PagePair(4, 0)]
    half = SLOT_BYTES // 2
    np.testing.assert_array_equal(rig.slots[0, :half], first[:half])
    np.testing.assert_array_equal(rig.slots[0, half:], first[half:] ^ 0xFF)
    np.testing.assert_array_equal(rig.slots[5], rig.from_slots[1])


def test_the_copy_can_be_held_back(rig: Rig) -> None:
    seen = []

    def reuse(pairs: object) -> None:
        seen.append(pairs)
        rig.from_slots[1] = 9
        tags_of(rig.source_buffer, SLOTS)[1, 1] += 2

    rig.hooks.before_copy = reuse
    transfer = rig.start()
    assert transfer.wait(5_000) is DONE
    assert seen == [PAIRS]
    assert (rig.slots[5] == 9).all()
    assert rig.reader.read_tags(rig.peer, 1_000)[1, 1] == 2


def test_swap_exchanges_two_pages(rig: Rig) -> None:
    assert rig.start(TransferFaults(swap=(0, 2))).wait(5_000) is DONE
    rig.assert_landed({5: 2, 0: 4, 2: 1})


def test_duplicate_stands_in_for_another_page(rig: Rig) -> None:
    assert rig.start(TransferFaults(duplicate=(0, 2))).wait(5_000) is DONE
    rig.assert_landed({5: 1, 0: 4, 2: 1})


def test_order_changes_nothing_that_lands(rig: Rig) -> None:
    transfer = rig.start(TransferFaults(Ending.ERROR_REST_LANDS, landed_pages=1, reverse_order=True))
    assert transfer.wait(5_000) is FAILED
    rig.assert_landed({2: 2})
    rig.land(transfer)
    rig.assert_landed()


def test_one_bit_flips(rig: Rig) -> None:
    assert rig.start(TransferFaults(bit_flips=(BitFlip(2, 100, 3),))).wait(5_000) is DONE
    rig.slots[2, 100] ^= 8
    rig.assert_landed()


def test_reads_beyond_the_pool_wrap_only_on_request(rig: Rig) -> None:
    beyond = [PagePair(SLOTS + 3, 0)]
    with pytest.raises(InvalidInput) as caught:
        rig.start(TransferFaults(delay_ms=1), beyond)
    assert caught.value.field == "remote_page_id"
    assert rig.start(TransferFaults(wrap_out_of_range=True), beyond).wait(5_000) is DONE
    rig.assert_landed({0: 3})
    with pytest.raises(InvalidInput) as caught:
        rig.start(TransferFaults(wrap_out_of_range=True), [PagePair(0, SLOTS)])
    assert caught.value.field == "local_page_id"


def test_faults_strike_one_transfer_and_the_plan_knows_which(rig: Rig) -> None:
    assert rig.start(TransferFaults(swap=(0, 1))).wait(5_000) is DONE
    assert rig.start().wait(5_000) is DONE
    rig.assert_landed()
    assert [(i.sequence, i.reader, i.pages) for i in rig.infos] == [(0, "reader", 3), (1, "reader", 3)]
    assert rig.infos[0].source.incarnation == 11


# -- the memory engine's own time ------------------------------------------------------------------------------------


def test_pump_lands_what_is_due_in_order_of_time() -> None:
    rig = _make("memory")
    fabric = rig.reader.fabric
    slow = rig.start(TransferFaults(Ending.LATE, delay_ms=30), [PagePair(1, 1)])
    fast = rig.start(TransferFaults(delay_ms=10), [PagePair(2, 2)])
    assert (slow.due_ms, fast.due_ms) == (30, 10)
    assert fabric.pending == 2
    assert fabric.pump(9) == 0
    assert fast.state is TransferState.RUNNING
    assert fabric.pump(10) == 1
    assert fast.state is DONE
    assert fast.wait(0) is DONE
    rig.assert_landed({2: 2})
    assert slow.wait(1_000) is TIMED_OUT
    assert fabric.pump(100) == 1
    rig.assert_landed({1: 1, 2: 2})
    assert fabric.pending == 0
    assert fabric.now_ms == 100
    assert fabric.pump(50) == 0
    assert fabric.now_ms == 100  # time does not run backwards
    rig.reader.close()


def test_a_killed_peer_fails_what_had_not_landed() -> None:
    rig = _make("memory")
    transfer = rig.start(TransferFaults(delay_ms=5))
    rig.reader.fabric.kill("source")
    assert transfer.wait(100) is FAILED
    assert transfer.quiesced()
    rig.assert_landed({})


@pytest.mark.parametrize("follow", [False, True])
def test_a_restarted_peer_is_read_only_by_an_engine_that_follows(follow: bool) -> None:
    rig = _make("memory")
    fabric = rig.reader.fabric
    transfer = rig.start(TransferFaults(follow_restart=follow, delay_ms=5))
    rig.source.close()
    restarted = MemoryEngine(fabric, "source")
    slots_of(restarted.allocate(SLOTS, SLOT_BYTES), SLOTS, SLOT_BYTES)[:] = 77
    restarted.publish(99, "layout")
    assert transfer.wait(100) is (DONE if follow else FAILED)
    if follow:
        assert (rig.slots[[5, 0, 2]] == 77).all()
        assert (rig.reader.read_tags(rig.peer, 100)[:, 0] == 99).all()  # and the tags give it away
    else:
        rig.assert_landed({})


def test_a_real_engine_cannot_be_told_to_follow_restarts() -> None:
    rig = _make("faulty")
    with pytest.raises(InvalidInput) as caught:
        rig.start(TransferFaults(follow_restart=True))
    assert caught.value.field == "faults.follow_restart"
    rig.reader.close()
    rig.source.close()


# -- plans from seeds ------------------------------------------------------------------------------------------------

RATES = FaultRates(**dict.fromkeys(KINDS, 0.08), delay=0.3)


def _drawn(seed: int, reader: str, count: int) -> list[TransferFaults]:
    rig = _make("memory")
    plan, export = SeededPlan(seed, RATES), rig.peer.export
    return [plan(TransferInfo(sequence, reader, export, 4)) for sequence in range(count)]


def test_a_seed_decides_everything() -> None:
    assert _drawn(7, "a", 200) == _drawn(7, "a", 200)
    assert _drawn(7, "a", 200) != _drawn(8, "a", 200)
    assert _drawn(7, "a", 200) != _drawn(7, "b", 200)


def test_every_kind_is_drawn_at_about_its_rate() -> None:
    drawn = _drawn(1, "a", 3000)
    found = {ending: sum(f.ending is ending for f in drawn) for ending in Ending}
    for ending in Ending:
        if ending is not Ending.HONEST:
            assert 180 < found[ending] < 300, ending
    for kind in ("short_tail_bytes", "torn_page", "reverse_order", "duplicate", "swap", "bit_flips"):
        struck = [f for f in drawn if getattr(f, kind) != getattr(NO_FAULTS, kind)]
        assert 180 < len(struck) < 300, kind
    assert 200 < sum(f.honest for f in drawn) < 600
    for f in drawn:
        assert f.delay_ms > 0 or f.ending not in (Ending.EARLY_NOTICE, Ending.LATE, Ending.ERROR_REST_LANDS)


def test_no_rates_no_faults() -> None:
    plan, export = SeededPlan(3, FaultRates()), _make("memory").peer.export
    assert all(plan(TransferInfo(i, "a", export, 4)).honest for i in range(50))


def test_rates_are_checked() -> None:
    for bad in ({"drop": -0.1}, {"swap": 1.5}, {"delay": 2.0}, {"max_delay_ms": 0}, {"drop": 0.6, "late": 0.6}):
        with pytest.raises(InvalidInput):
            FaultRates(**bad)


# -- engines by name -------------------------------------------------------------------------------------------------


def test_engines_by_name() -> None:
    assert [choice.name for choice in available_engines()] == ["shm", "mooncake", "nixl"]
    engine = make_engine("shm")
    assert engine.name == "shm"
    engine.close()
    for name, reason in (("memory", "unknown_engine"), ("", "unknown_engine")):
        with pytest.raises(InvalidInput) as caught:
            make_engine(name)
        assert (caught.value.field, caught.value.reason) == ("transfer.engine", reason)


def test_records_are_values() -> None:
    assert replace(TransferFaults(swap=(1, 2)), swap=None) == NO_FAULTS
