"""Pulls that must fail: the error, and that nothing came of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.descriptor import PageDescriptor
from kvstore.errors import (
    GenlockError,
)
from kvstore.lifecycle import SlotState
from tests.support.kv_world import (
    OWNER,
    World,
)

TOKENS = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]  # three pages, the last one partial
OTHERS = [t + 60 for t in TOKENS]


def refused(world: World, descs: Sequence[PageDescriptor], error: type[GenlockError], reason: str) -> GenlockError:
    """The pull fails so; nothing is adopted, and once the owner gives its pages back the pool is as before."""
    before = world.sink.counts()
    local = world.sink.allocate(OWNER, len(descs))
    with pytest.raises(error) as caught:
        world.pull(descs, TOKENS, local=local)
    assert caught.value.reason == reason
    assert all(world.sink.slot_state(r.page_id) is SlotState.OPEN for r in local), "adopted in spite of the error"
    assert world.sink.counters["pages_received"] == 0
    world.sink.retire(local, OWNER)
    world.fabric.land_all()
    world.receiver.sweep()
    assert world.sink.counts() == before
    return caught.value
