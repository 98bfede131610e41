"""Single faults of bytes: scales that are lost, pages that are cut at any length, types that differ."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kvstore import formats
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import CorruptPage, LayoutMismatch, StalePage
from kvstore.guard import Guard
from kvstore.layout import HeadOrder, KvFormat, PageLayout, require_same_layout
from kvstore.transfer.faults import TransferFaults
from tests.support.kv_refusals import OTHERS, TOKENS
from tests.support.kv_world import LAYOUT, NEIGHBOUR, OWNER, T, World, body, seal_prompt, slot_bytes_of

INT8 = replace(LAYOUT, kv_format=KvFormat.INT8)


def scales_of(guard: Guard, page_id: int) -> list[np.ndarray]:
    """The fp32 scales of one page, by layer and stream; views into the pool."""
    slots = guard._pool.slots_SU8
    return [
        formats.scale_view(guard.layout, slots, layer, stream)[page_id]
        for layer in range(guard.layout.layers)
        for stream in range(len(guard.layout.streams))
    ]


def int8_world(checks: Checks = ALL_CHECKS) -> tuple[World, list]:
    """A prompt whose pages have scales of their own; another prompt's are different."""
    world = World(checks, source_layout=INT8, layout=INT8, slots=12)
    # Scales are written before the pages are sealed, as a kernel would.
    seal, written = world.source.seal, [0]

    def sealing(ref, owner, header, index):
        for scales in scales_of(world.source, ref.page_id):
            written[0] += 1
            scales[:] = 0.25 * written[0]
        return seal(ref, owner, header, index)

    world.source.seal = sealing  # type: ignore[method-assign]
    return world, world.prompt(TOKENS)


def lose_scales(world: World, descs: list, how: str) -> None:
    first, second = (scales_of(world.source, descs[i].ref.page_id) for i in (0, 1))
    if how == "zeroed":
        for scales in first:
            scales[:] = 0
    elif how == "swapped":
        for one, other in zip(first, second, strict=True):
            kept = one.copy()
            one[:], other[:] = other, kept
    elif how == "of another prompt":
        foreign = seal_prompt(world.source, world.keyer, OTHERS, NEIGHBOUR)
        for one, other in zip(first, scales_of(world.source, foreign[0].ref.page_id), strict=True):
            one[:] = other
    else:
        for scales in first[-1:]:
            scales[-1] = -scales[-1]


LOSSES = ("zeroed", "swapped", "of another prompt", "one sign")


@pytest.mark.parametrize("how", LOSSES)
def test_scales_that_are_not_the_pages_own_are_refused(how: str):
    world, descs = int8_world()
    lose_scales(world, descs, how)
    local = world.sink.allocate(OWNER, len(descs))
    with pytest.raises(CorruptPage) as caught:
        world.pull(descs, TOKENS, local=local)
    assert caught.value.reason == "digest_mismatch"
    world.sink.retire(local, OWNER)
    assert world.sink.counts().free == 12


@pytest.mark.parametrize("how", LOSSES)
def test_without_the_digest_other_scales_would_be_read(how: str):
    world, descs = int8_world(ALL_CHECKS.without("digest"))
    right = [scales.copy() for scales in scales_of(world.source, descs[0].ref.page_id)]
    lose_scales(world, descs, how)
    refs = world.pull(descs, TOKENS)
    got = scales_of(world.sink, refs[0].page_id)
    assert any((one != other).any() for one, other in zip(right, got, strict=True))


@pytest.mark.parametrize("page", [0, 2])
def test_a_page_that_is_cut_at_any_length_is_whole_or_refused(page: int):
    """From one byte to the whole slot; around powers of two each length."""
    refused = 0
    edges = {2**n + d for n in range(12) for d in (-1, 0, 1)} | {LAYOUT.slot_bytes}
    tails = sorted(edges.union(range(1, LAYOUT.slot_bytes, 29)) & set(range(1, LAYOUT.slot_bytes + 1)))
    for tail in tails:
        world = World(faults=TransferFaults(short_tail_bytes=tail, short_page=page))
        descs = world.prompt(TOKENS)
        local = world.sink.allocate(OWNER, len(descs))
        try:
            world.pull(descs, TOKENS, local=local)
        except (CorruptPage, StalePage):
            refused += 1
        else:  # what was cut off was zeros
            ours, theirs = (slot_bytes_of(*at) for at in (
                (world.sink, local[page].page_id), (world.source, descs[page].ref.page_id)))  # fmt: skip
            assert body(ours) == body(theirs)
        world.sink.retire(local, OWNER)
        assert world.sink.counts().free == 8
    assert refused > len(tails) // 2


def variants() -> list[PageLayout]:
    """Layouts that a producer and a consumer of one model could have by mistake."""
    base = replace(INT8, key_width=8, value_width=8)
    elements = [replace(base, kv_format=KvFormat.NONE, element=element) for element in ("fp32", "bf16", "fp16")]
    quantized = [replace(base, kv_format=kv_format) for kv_format in KvFormat if kv_format is not KvFormat.NONE]
    others = ({"scale_type": "fp16_per_page"}, {"order": HeadOrder.TOKEN_MAJOR}, {"page_tokens": 2 * T})
    return [*elements, *quantized, *(replace(base, **other) for other in others)]


def test_two_ends_that_read_bits_differently_are_refused_with_the_field_that_differs():
    layouts = variants()
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    for ours, theirs in itertools.product(layouts, layouts):
        if ours == theirs:
            require_same_layout(ours, theirs)
            continue
        with pytest.raises(LayoutMismatch) as caught:
            require_same_layout(ours, theirs)
        differing = {name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)}
        assert any(name in caught.value.message for name in differing)
