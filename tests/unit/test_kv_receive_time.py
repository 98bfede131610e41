"""Pulling pages while time passes: late bytes, moving sources, slots that may not be written, several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.checks import ALL_CHECKS
from kvstore.digest import Digester
from kvstore.errors import (
    CorruptPage,
    GenlockError,
    LifecycleError,
    NoCapacity,
    StalePage,
    TransferError,
    TransferTimeout,
)
from kvstore.ids import PageRef, Tag
from kvstore.lifecycle import SlotState
from kvstore.receipt import ExpectedPages, judge_source
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import PagePair, Peer, Transfer, TransferState
from kvstore.transfer.faults import Ending, TransferFaults
from kvstore.transfer.memory import MemoryEngine
from kvstore.transfer.shm import ShmEngine
from tests.support.kv_refusals import OTHERS, TOKENS, refused
from tests.support.kv_world import (
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    SECRET,
    T,
    World,
    fill,
    make_guard,
    make_keyer,
    seal_prompt,
    slot_bytes_of,
    values_of,
)

# --- time: between data, tags and adoption ----------------------------------------------------------------------------


class Between(MemoryEngine):
    """Something happens when the data has been judged and the live tags are about to be read, or have been."""

    before: Callable[[], None] = staticmethod(lambda: None)
    after: Callable[[], None] = staticmethod(lambda: None)

    def read_tags(self, peer: Peer, timeout_ms: int) -> npt.NDArray[np.int64]:
        self.before()
        tags = super().read_tags(peer, timeout_ms)
        self.after()
        return tags


def between_world() -> tuple[World, Between]:
    world = World()
    engine = Between(world.fabric, "decode-2")
    world.engine, world.sink = engine, make_guard(engine, 33)
    world.receiver = PageReceiver(world.sink, engine)
    world.peer = engine.connect(world.source.export)
    return world, engine


@pytest.mark.parametrize("how", ["retire", "condemn", "reuse"])
def test_a_source_page_that_moves_on_after_its_data_was_read(how: str) -> None:
    world, engine = between_world()
    descs = world.prompt(TOKENS)

    def move() -> None:
        if how == "condemn":
            world.source.condemn([descs[1].ref])
            return
        world.source.retire([descs[1].ref], OWNER)
        if how == "reuse":
            world.prompt(TOKENS[T : 2 * T])  # the very same bytes, in another life

    engine.before = move
    refused(world, descs, StalePage, "source_moved_on")


def test_live_tags_that_cannot_be_read_prove_nothing() -> None:
    world, engine = between_world()
    engine.before = lambda: world.fabric.kill("prefill")
    refused(world, world.prompt(TOKENS), TransferError, "peer_gone")
    desc = world.prompt(TOKENS)[0]
    for live in (None, {}, {desc.ref.page_id: Tag(0, 0)}, {desc.ref.page_id + 1: desc.ref.tag}):
        with pytest.raises(StalePage):
            judge_source(live, desc, ALL_CHECKS)
    judge_source({desc.ref.page_id: desc.ref.tag}, desc, ALL_CHECKS)


def test_a_short_table_of_live_tags_proves_nothing() -> None:
    world, engine = between_world()
    read_tags = engine.read_tags
    engine.read_tags = lambda peer, timeout_ms: read_tags(peer, timeout_ms)[:2]  # type: ignore[method-assign]
    refused(world, world.prompt(TOKENS), StalePage, "source_moved_on")


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", ["condemn", "retire"])
def test_adoption_is_all_or_nothing(which: int, how: str) -> None:
    """One of our own pages is taken away when all have been judged: none of the others is sealed."""
    world, engine = between_world()
    descs = world.prompt(TOKENS)
    local = world.sink.allocate(OWNER, 3)
    gone = [local[which]]
    engine.after = lambda: world.sink.retire(gone, OWNER) if how == "retire" else world.sink.condemn(gone)
    with pytest.raises(StalePage):
        world.pull(descs, TOKENS, local=local)
    rest = [r for r in local if r not in gone]
    assert all(world.sink.slot_state(r.page_id) is SlotState.OPEN for r in rest)
    world.sink.retire(rest, OWNER)
    assert world.sink.counts().free == 8


# --- landing slots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "error", "reason"), [
    ("foreign", LifecycleError, "not_owner"), ("sealed", LifecycleError, "not_open"),
    ("twice", LifecycleError, "page_busy"), ("stale", StalePage, "stale_ref"), ("beyond", StalePage, "stale_ref"),
    ("negative", StalePage, "stale_ref"), ("busy", LifecycleError, "page_busy"), ("free", StalePage, "stale_ref"),
])  # fmt: skip
def test_slots_that_may_not_be_written_receive_nothing(case: str, error: type[GenlockError], reason: str) -> None:
    world = World()
    descs = world.prompt(TOKENS)[:2]
    good, odd = world.sink.allocate(OWNER, 2)
    tag = odd.tag
    if case == "foreign":
        (odd,) = world.sink.allocate(NEIGHBOUR, 1)
    elif case == "sealed":
        world.sink.retire([odd], OWNER)
        odd = seal_prompt(world.sink, world.keyer, OTHERS[:T])[0].ref
    elif case == "busy":
        world.sink.hold([odd])
    elif case == "free":
        odd = PageRef(7, Tag(22, 2))
    elif case != "twice":
        odd = {"stale": PageRef(odd.page_id, Tag(22, tag.generation + 2)), "beyond": PageRef(8, tag),
               "negative": PageRef(odd.page_id - 8, tag)}[case]  # fmt: skip
    before = [slot_bytes_of(world.sink, i) for i in range(8)]
    started = world.fabric.next_number()
    with pytest.raises(error) as caught:
        world.pull(descs, TOKENS, local=[good, good if case == "twice" else odd])
    assert caught.value.reason == reason
    assert world.fabric.next_number() == started + 1, "a transfer was started"
    assert [slot_bytes_of(world.sink, i) for i in range(8)] == before
    world.pull(descs[:1], TOKENS, local=[good])  # the good slot is not on hold


def test_a_refused_start_ends_its_holds() -> None:
    world = World()
    descs = world.prompt(TOKENS)
    world.fabric.kill("prefill")
    refused(world, descs, TransferError, "peer_gone")


def test_late_bytes_never_meet_a_new_owner() -> None:
    """Early notice and time-outs alike: the slots stay out of use until every byte has landed."""
    for ending in (Ending.LATE, Ending.EARLY_NOTICE, Ending.ERROR_REST_LANDS):
        world = World(faults=TransferFaults(ending=ending, delay_ms=40), slots=3)
        descs = world.prompt(TOKENS)
        local = world.sink.allocate(OWNER, 3)
        with pytest.raises(GenlockError):
            world.pull(descs, TOKENS, local=local)
        with pytest.raises(LifecycleError) as caught:  # no second try into the same slots
            world.pull(descs, TOKENS, local=local)
        assert caught.value.reason == "page_busy"
        world.sink.retire(local, OWNER)
        assert (world.receiver.sweep(), world.sink.counts().quarantined) == (1, 3)
        with pytest.raises(NoCapacity):
            world.sink.allocate(NEIGHBOUR, 1)
        world.fabric.pump(39)
        assert (world.receiver.sweep(), world.sink.counts().quarantined) == (1, 3)
        world.fabric.pump(40)
        assert world.sink.counts().quarantined == 3, "time alone frees nothing"
        assert (world.receiver.sweep(), world.sink.counts().free) == (0, 3)
        assert all(set(slot_bytes_of(world.sink, r.page_id)) == {0} for r in world.sink.allocate(NEIGHBOUR, 3))


def test_what_an_earlier_read_left_behind_is_no_arrival() -> None:
    """Without scrubbing a slot can hold the very page that is asked for; an early notice must not find it there."""
    endings = iter([TransferFaults(swap=(1, 2)), TransferFaults(ending=Ending.EARLY_NOTICE, delay_ms=40)])
    world = World(plan=lambda info: next(endings), scrub=False, slots=3)
    descs = world.prompt(TOKENS)
    first = world.sink.allocate(OWNER, 3)
    with pytest.raises(StalePage):
        world.pull(descs, TOKENS, local=first)
    assert world.sink.landed_header(first[0]) == descs[0].header
    world.sink.retire(first, OWNER)
    second = world.sink.allocate(OWNER, 3)
    at = [r for r in second if r.page_id == first[0].page_id]
    with pytest.raises(StalePage) as caught:
        world.pull(descs[:1], TOKENS, local=at)
    assert caught.value.reason == "header_mismatch"
    assert world.sink.slot_state(at[0].page_id) is SlotState.OPEN


class StillWriting(Transfer):
    """Says DONE, and rightly so, but cannot prove that it has stopped."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.proved = False

    def wait(self, timeout_ms: int) -> TransferState:
        return self.inner.wait(timeout_ms)

    def quiesced(self) -> bool:
        return self.proved


def test_a_page_is_not_adopted_while_its_engine_may_still_write_it() -> None:
    world = World()
    started: list[StillWriting] = []
    read_pages = world.engine.read_pages

    def start(peer: Peer, pairs: Sequence[PagePair]) -> Transfer:
        started.append(StillWriting(read_pages(peer, pairs)))
        return started[-1]

    world.engine.read_pages = start  # type: ignore[method-assign]
    local = world.sink.allocate(OWNER, 3)
    with pytest.raises(TransferError) as caught:
        world.pull(world.prompt(TOKENS), TOKENS, local=local)
    assert caught.value.reason == "not_quiet"
    world.sink.retire(local, OWNER)
    assert world.sink.counts().quarantined == 3
    started[0].proved = True
    assert world.receiver.sweep() == 0
    assert world.sink.counts().free == 8


def test_sweeping_from_many_threads_proves_once() -> None:
    world = World(faults=TransferFaults(ending=Ending.LATE, delay_ms=1), slots=24)
    descs = world.prompt(TOKENS)
    for owner in range(1, 8):
        local = world.sink.allocate(owner, 3)
        with pytest.raises(TransferTimeout):
            world.receiver.pull(
                world.peer, [PageOrder(d, r) for d, r in zip(descs, local, strict=True)], owner,
                world.expected(TOKENS), 10,
            )  # fmt: skip
        world.sink.retire(local, owner)
    assert world.receiver.unproved_transfers == 7
    world.fabric.land_all()
    failures: list[BaseException] = []

    def sweep() -> None:
        try:
            for _ in range(20):
                world.receiver.sweep()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sweep) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert world.receiver.unproved_transfers == 0
    assert world.sink.counts().free == 24


def test_one_transfer_that_cannot_be_asked_does_not_keep_the_others_waiting() -> None:
    world = World(faults=TransferFaults(ending=Ending.LATE, delay_ms=1))
    descs = world.prompt(TOKENS)
    local = world.sink.allocate(OWNER, 3)
    for desc, ref in zip(descs, local, strict=True):
        with pytest.raises(TransferTimeout):
            world.pull([desc], TOKENS, local=[ref])
    world.sink.retire(local, OWNER)
    world.fabric.land_all()
    broken = world.receiver._unproved[0][0]
    broken.quiesced = lambda: 1 // 0  # type: ignore[method-assign]
    for _ in range(2):
        assert world.receiver.sweep() == 1
        assert world.sink.counts().quarantined == 1
        assert world.receiver.unproved_transfers == 1
    assert world.sink.counters["quiesced_failed"] == 2
    del broken.quiesced
    assert world.receiver.sweep() == 0
    assert world.sink.counts().free == 8


# --- the same over shared memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [True, False])
def test_shared_memory_delivers_and_is_judged_alike(sums: bool) -> None:
    digester = Digester(SECRET, LAYOUT.slot_bytes) if sums else None
    source_engine, sink_engine = ShmEngine(digester), ShmEngine(digester)
    try:
        source, sink = make_guard(source_engine, 11), make_guard(sink_engine, 22)
        receiver, peer = PageReceiver(sink, sink_engine), sink_engine.connect(source.export)
        keyer = make_keyer()
        descs = seal_prompt(source, keyer, TOKENS)
        expected = ExpectedPages(len(TOKENS), T, keyer.chain("t", TOKENS, T))

        def pull() -> None:
            local = sink.allocate(OWNER, 3)
            try:
                orders = [PageOrder(d, r) for d, r in zip(descs, local, strict=True)]
                receiver.pull(peer, orders, OWNER, expected, 5000)
                assert values_of(sink, local[1].page_id) == TOKENS[T : 2 * T]
            finally:
                sink.retire(local, OWNER)

        pull()
        fill(source, descs[1].ref, [14, 15, 16, 99])
        with pytest.raises(CorruptPage):
            pull()
        fill(source, descs[1].ref, TOKENS[T : 2 * T])
        pull()
        source.condemn([descs[2].ref])
        with pytest.raises(StalePage):
            pull()
        source_engine.close()
        with pytest.raises(TransferError):
            pull()
        assert sink.counts().free == 8
        assert receiver.unproved_transfers == 0
    finally:
        source_engine.close()
        sink_engine.close()
