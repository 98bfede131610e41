"""Prefill times decode, over page size, tensor parallelism and pool size: each pair carries right pages, or is refused
with the differing field named. A worker is one rank; one of several is refused, on either side."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest

from decode.handoff import Accepted, HandoffReceiver, HandoffState
from kvstore.checks import ALL_CHECKS
from kvstore.errors import InvalidInput, LayoutMismatch
from kvstore.header import PageHeader
from kvstore.layout import HEADER_BYTES, PageLayout
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import PoolExport
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from tests.support.kv_world import LAYOUT, OWNER, fill, make_guard, make_keyer, slot_bytes_of

TICKET, HANDOFF = b"t" * 16, b"h" * 16
TOKENS = tuple(range(1, 74))


class Side(NamedTuple):
    page_tokens: int
    tp: int
    slots: int

    def layout(self) -> PageLayout:
        return replace(LAYOUT, page_tokens=self.page_tokens, tp_size=self.tp, tp_rank=self.tp - 1)


SIDES = [Side(*shape) for shape in itertools.product((8, 16, 32), (1, 2, 4), (64, 100))]


def outcome(prefill: Side, decode: Side) -> str:
    """`right`, or where the pair was refused and by which field."""
    fabric = MemoryFabric()
    engine = MemoryEngine(fabric, "decode")
    try:
        sink = make_guard(engine, 22, decode.layout(), decode.slots)
    except InvalidInput as error:
        return f"start {error.field}"
    peer = MemoryEngine(fabric, "prefill")
    if prefill.tp == 1:
        source = make_guard(peer, 11, prefill.layout(), prefill.slots)
        export = source.export
    else:  # no worker of ours; what it says of itself must be enough
        export = PoolExport(
            "memory", 11, prefill.layout().canonical(), prefill.slots, prefill.layout().slot_bytes, "elsewhere"
        )
    layout = decode.layout()
    keyer = make_keyer(layout)
    expected = ExpectedPages(len(TOKENS), layout.page_tokens, keyer.chain("t", TOKENS, layout.page_tokens))
    local = sink.allocate(OWNER, expected.count)
    rules: HandoffReceiver[int] = HandoffReceiver(TICKET, layout, expected, local, ALL_CHECKS)
    try:
        rules.on_event(Accepted(HANDOFF, TICKET, export, 1000))
    except LayoutMismatch as error:
        assert rules.state is HandoffState.FAILED
        return f"handshake {error.field}"
    descs = []
    for index, ref in enumerate(source.allocate(OWNER, expected.count)):
        rows = TOKENS[index * layout.page_tokens : (index + 1) * layout.page_tokens]
        fill(source, ref, rows)
        header = PageHeader(ref.tag, layout.fingerprint, index * layout.page_tokens, len(rows), expected.keys[index])
        descs.append(source.seal(ref, OWNER, header, index))
    orders = [PageOrder(desc, ref) for desc, ref in zip(descs, local, strict=True)]
    PageReceiver(sink, engine).pull(engine.connect(export), orders, OWNER, expected, 100)
    for order in orders:
        ours, theirs = (slot_bytes_of(sink, order.local.page_id), slot_bytes_of(source, order.desc.ref.page_id))
        assert ours[HEADER_BYTES:] == theirs[HEADER_BYTES:]
    return "right"


@pytest.mark.parametrize("decode", SIDES)
def test_each_pair_carries_right_pages_or_is_refused_by_the_field_that_differs(decode: Side):
    for prefill in SIDES:
        if decode.tp != 1:
            wanted = {"start layout.tp_size"}
        elif prefill.tp != 1 or prefill.page_tokens != decode.page_tokens:
            ours, theirs = vars_of(decode), vars_of(prefill)
            wanted = {f"handshake layout.{name}" for name in ours if ours[name] != theirs[name]}
        else:
            wanted = {"right"}
        assert outcome(prefill, decode) in wanted, (prefill, decode)


def vars_of(side: Side) -> dict[str, object]:
    layout = side.layout()
    return {name: getattr(layout, name) for name in ("page_tokens", "tp_rank", "tp_size")}


def test_all_three_outcomes_are_in_the_matrix():
    """324 cells: 12 that work, whatever the two pools' sizes."""
    found = Counter(outcome(prefill, decode).split()[0] for prefill in SIDES for decode in SIDES)
    assert found == {"right": 12, "handshake": 96, "start": 216}


def test_the_first_rank_of_several_is_refused_by_name():
    with pytest.raises(InvalidInput) as caught:
        make_guard(MemoryEngine(MemoryFabric(), "w"), 11, replace(LAYOUT, tp_size=4, tp_rank=0))
    assert (caught.value.reason, caught.value.field) == ("ranks_not_built", "layout.tp_size")
