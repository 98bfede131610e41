"""Pulling pages: whatever a peer, a wire or an engine does, a page is proved or nobody reads it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from kvstore.checks import ALL_CHECKS
from kvstore.descriptor import PageDescriptor
from kvstore.errors import (
    CorruptPage,
    GenlockError,
    LayoutMismatch,
    StalePage,
    TransferError,
    TransferTimeout,
)
from kvstore.ids import PageRef, Tag
from kvstore.lifecycle import SlotState
from kvstore.transfer.base import PagePair
from kvstore.transfer.faults import BitFlip, Ending, FaultHooks, TransferFaults
from tests.support.kv_refusals import OTHERS, TOKENS, refused
from tests.support.kv_world import (
    HEADER_BYTES,
    LAYOUT,
    NEIGHBOUR,
    OWNER,
    T,
    World,
    body,
    fill,
    seal_prompt,
    slot_bytes_of,
    values_of,
)

# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [TransferFaults(), TransferFaults(reverse_order=True), TransferFaults(delay_ms=90)])
def test_pages_arrive_full_ones_sealed_the_partial_one_open(faults: TransferFaults) -> None:
    world = World(faults=faults)
    descs = world.prompt(TOKENS)
    refs = world.pull(descs, TOKENS)
    states = [world.sink.slot_state(r.page_id) for r in refs]
    assert states == [SlotState.SEALED, SlotState.SEALED, SlotState.OPEN]
    for ref, desc in zip(refs, descs, strict=True):
        theirs = slot_bytes_of(world.source, desc.ref.page_id)
        assert body(slot_bytes_of(world.sink, ref.page_id)) == body(theirs)
        assert world.sink.landed_header(ref) == replace(desc.header, tag=ref.tag)
    assert world.sink.counters["pages_received"] == 3
    assert world.sink.counters["receipt_digest/ok"] == 3
    assert world.receiver.unproved_transfers == 0
    assert [world.sink.describe(r, i).header.valid_rows for i, r in enumerate(refs[:2])] == [T, T]


def test_an_empty_pull_does_nothing() -> None:
    world = World()
    world.pull([], TOKENS)
    assert world.sink.counters == {}


def test_pages_of_one_handoff_may_come_in_several_pulls() -> None:
    world = World()
    descs = world.prompt(TOKENS)
    local = world.sink.allocate(OWNER, 3)
    for i in (2, 0, 1):
        world.pull([descs[i]], TOKENS, local=[local[i]])
    assert [values_of(world.sink, r.page_id)[:2] for r in local] == [[10, 11], [14, 15], [18, 19]]


# --- descriptors that lie ---------------------------------------------------------------------------------------------


def changed_ref(desc: PageDescriptor, page_id: int = 0, incarnation: int = 0, generation: int = 0) -> PageDescriptor:
    tag = Tag(desc.ref.tag.incarnation + incarnation, desc.ref.tag.generation + generation)
    return replace(desc, ref=PageRef(desc.ref.page_id + page_id, tag))


Lie = Callable[[PageDescriptor], PageDescriptor]
LIES: dict[str, list[tuple[Lie, type[GenlockError], str]]] = {
    "ref": [
        (lambda d: changed_ref(d, page_id=1), StalePage, "header_mismatch"),
        (lambda d: changed_ref(d, page_id=3), StalePage, "header_mismatch"),  # a free slot
        (lambda d: changed_ref(d, page_id=8), CorruptPage, "page_out_of_bounds"),
        (lambda d: changed_ref(d, page_id=-1 - d.ref.page_id), CorruptPage, "page_out_of_bounds"),
        (lambda d: changed_ref(d, page_id=1 << 62), CorruptPage, "page_out_of_bounds"),
        (lambda d: changed_ref(d, incarnation=1), StalePage, "stale_incarnation"),
        (lambda d: changed_ref(d, generation=2), StalePage, "header_mismatch"),
        (lambda d: changed_ref(d, generation=-2), StalePage, "header_mismatch"),
        (lambda d: replace(d, ref=PageRef(d.ref.page_id, Tag(0, 0))), StalePage, "stale_incarnation"),
    ],
    "logical_index": [
        (lambda d: replace(d, logical_index=1), StalePage, "page_misplaced"),
        (lambda d: replace(d, logical_index=3), StalePage, "page_not_expected"),
        (lambda d: replace(d, logical_index=-1), StalePage, "page_not_expected"),
        (lambda d: replace(d, logical_index=1, first_position=T), StalePage, "foreign_prefix_key"),
    ],
    "first_position": [
        (lambda d: replace(d, first_position=T), StalePage, "page_misplaced"),
        (lambda d: replace(d, first_position=-T), StalePage, "page_misplaced"),
        (lambda d: replace(d, first_position=1 << 62), StalePage, "page_misplaced"),
    ],
    "valid_rows": [
        (lambda d, n=n: replace(d, valid_rows=n), StalePage, "page_misplaced") for n in (-1, 0, 3, 5, 1 << 40)
    ],
    "byte_length": [
        (lambda d, n=n: replace(d, byte_length=n), LayoutMismatch, "descriptor_length")
        for n in (0, LAYOUT.slot_bytes - 64, LAYOUT.slot_bytes + 64, -1)
    ],
    "layout_fingerprint": [
        (lambda d: replace(d, layout_fingerprint=d.layout_fingerprint ^ 1), LayoutMismatch, "descriptor_layout")
    ],
    "prefix_key": [
        (lambda d: replace(d, prefix_key=bytes(32)), StalePage, "foreign_prefix_key"),
        (lambda d: replace(d, prefix_key=b""), StalePage, "foreign_prefix_key"),
        (lambda d: replace(d, prefix_key=d.prefix_key[::-1]), StalePage, "foreign_prefix_key"),
    ],
    "digest": [
        (lambda d: replace(d, digest=d.digest ^ 1), CorruptPage, "digest_mismatch"),
        (lambda d: replace(d, digest=-1), CorruptPage, "digest_mismatch"),
        (lambda d: replace(d, digest=0), CorruptPage, "digest_mismatch"),
    ],
}


def test_every_field_of_a_descriptor_is_lied_about() -> None:
    assert set(LIES) == {f.name for f in fields(PageDescriptor)}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize(
    ("lie", "error", "reason"), [c for cs in LIES.values() for c in cs],
    ids=[f"{name}-{i}" for name, cs in LIES.items() for i in range(len(cs))],
)  # fmt: skip
def test_a_lie_about_one_page_adopts_none(lie: Lie, error: type[GenlockError], reason: str, place: int) -> None:
    world = World()
    descs = world.prompt(TOKENS)
    order = [descs[0], descs[1]]
    order.insert(place, descs[2])
    at = order.index(descs[0])
    order[at] = lie(order[at])
    refused(world, order, error, reason)


def test_a_descriptor_of_a_former_life_of_its_slot() -> None:
    world = World()
    old = world.prompt(TOKENS)
    world.source.retire([d.ref for d in old], OWNER)
    new = world.prompt(TOKENS)
    assert {d.ref.page_id for d in old} == {d.ref.page_id for d in new}
    refused(world, old, StalePage, "header_mismatch")
    world.pull(new, TOKENS)


# --- bytes that are not what was sealed -------------------------------------------------------------------------------

HEADER_FIELDS = {
    "magic": 0, "version": 4, "format": 6, "incarnation": 8, "generation": 16, "fingerprint": 24,
    "first_position": 32, "valid_rows": 40, "pad": 44, "prefix_key": 48, "prefix_key_end": 79, "zeros": 80, "end": 127,
}  # fmt: skip


@pytest.mark.parametrize("name", list(HEADER_FIELDS))
def test_a_header_that_was_altered_on_the_way(name: str) -> None:
    world = World(faults=TransferFaults(bit_flips=(BitFlip(1, HEADER_FIELDS[name], 0),)))
    refused(world, world.prompt(TOKENS), StalePage, "header_mismatch")


@pytest.mark.parametrize("name", list(HEADER_FIELDS))
def test_the_digest_covers_the_header_too(name: str) -> None:
    checks = ALL_CHECKS.without("header", "prefix_key")
    world = World(checks, TransferFaults(bit_flips=(BitFlip(1, HEADER_FIELDS[name], 0),)))
    refused(world, world.prompt(TOKENS), CorruptPage, "digest_mismatch")


def test_any_altered_byte_of_a_body_is_seen() -> None:
    rng = random.Random(5)
    offsets = {rng.randrange(HEADER_BYTES, LAYOUT.slot_bytes) for _ in range(40)} | {
        HEADER_BYTES,
        LAYOUT.slot_bytes - 1,
    }
    for offset in sorted(offsets):
        world = World(faults=TransferFaults(bit_flips=(BitFlip(0, offset, rng.randrange(8)),)))
        refused(world, world.prompt(TOKENS), CorruptPage, "digest_mismatch")


@pytest.mark.parametrize(("faults", "error", "reason"), [
    (TransferFaults(short_tail_bytes=LAYOUT.slot_bytes), StalePage, "header_mismatch"),
    (TransferFaults(short_tail_bytes=140, short_page=0), CorruptPage, "digest_mismatch"),
    (TransferFaults(swap=(0, 1)), StalePage, "header_mismatch"),
    (TransferFaults(duplicate=(0, 1)), StalePage, "header_mismatch"),
    (TransferFaults(ending=Ending.LATE, delay_ms=5), TransferTimeout, "transfer_timeout"),
    (TransferFaults(ending=Ending.DROP), TransferTimeout, "transfer_timeout"),
    (TransferFaults(ending=Ending.EARLY_NOTICE, delay_ms=5), StalePage, "header_mismatch"),
    (TransferFaults(ending=Ending.ERROR_REST_LANDS, landed_pages=1, delay_ms=5), TransferError, "transfer_failed"),
    (TransferFaults(ending=Ending.PEER_LOSS, landed_pages=2), TransferError, "transfer_failed"),
    (TransferFaults(delay_ms=101), TransferTimeout, "transfer_timeout"),
], ids=lambda x: getattr(x, "__name__", None) if isinstance(x, type) else None)  # fmt: skip
def test_transfers_that_go_wrong(faults: TransferFaults, error: type[GenlockError], reason: str) -> None:
    world = World(faults=faults)
    if faults.ending is Ending.DROP:
        return dropped_for_ever(world)
    refused(world, world.prompt(TOKENS), error, reason)
    return None


def dropped_for_ever(world: World) -> None:
    """Nothing but the engine's end proves that a dropped transfer will not land."""
    local = world.sink.allocate(OWNER, 3)
    with pytest.raises(TransferTimeout):
        world.pull(world.prompt(TOKENS), TOKENS, local=local)
    world.sink.retire(local, OWNER)
    for now_ms in (1, 10_000, 10**9):
        world.fabric.pump(now_ms)
        assert world.receiver.sweep() == 1
    assert world.sink.counts().quarantined == 3
    world.engine.close()
    assert world.receiver.sweep() == 0
    assert world.sink.counts().free == 8


def test_a_page_torn_by_its_next_content() -> None:
    def tear(pair: PagePair) -> None:
        fill(world.source, descs[0].ref, OTHERS[:T])

    world = World(faults=TransferFaults(torn_page=0), hooks=FaultHooks(between_halves=tear))
    descs = world.prompt(TOKENS)
    refused(world, descs, CorruptPage, "digest_mismatch")


def test_a_page_recycled_in_the_middle_of_its_copy() -> None:
    def recycle(pair: PagePair) -> None:
        world.source.retire([descs[0].ref], OWNER)
        seal_prompt(world.source, world.keyer, OTHERS[:T], NEIGHBOUR)

    world = World(faults=TransferFaults(torn_page=0), hooks=FaultHooks(between_halves=recycle), scrub=False)
    descs = world.prompt(TOKENS)
    refused(world, descs, CorruptPage, "digest_mismatch")


def test_a_page_that_rots_in_the_sources_memory() -> None:
    world = World()
    descs = world.prompt(TOKENS)
    fill(world.source, descs[1].ref, [14, 15, 16, 99])
    refused(world, descs, CorruptPage, "digest_mismatch")
