"""The prefix index under pressure: an entry is a page that is still what it was, or it is a miss."""

from __future__ import annotations

import pytest

from kvstore.keys import PrefixIdentity, PrefixKeyer
from prefill.core import PrefillLimits
from tests.support.core_world import PrefillSide
from tests.support.kv_world import T
from tests.support.prefill_prompts import prompt, require_right


@pytest.mark.parametrize("aborts", [False, True])
def test_fifty_rounds_of_fill_evict_and_ask_again(aborts: bool):
    """A prefix is filled, a prompt as large as the pool evicts it, the prefix is asked for again, perhaps by two at
    once of which the first leaves before it computed."""
    side = PrefillSide(slots=8, limits=PrefillLimits(chunk_tokens=T))
    for at in range(25):
        shared = prompt(1, 3 * T)
        require_right(side, side.prefill((*shared, 200 + at)))
        require_right(side, side.prefill(prompt(300 + at, 8 * T)))  # the whole pool
        first = side.submit((*shared, 400))
        second = side.submit((*shared, 500))
        if aborts:
            side.core.cancel(first.request_no)
        side.run()
        for seq in (second,) if aborts else (first, second):
            require_right(side, seq)
            side.core.release(seq.handoff_id)
    side.require_baseline()


def test_keys_are_256_bits_and_nobody_without_the_secret_can_make_one():
    """Equal tokens, tenant and model under another secret: no key in common, and not even the same length of prefix."""
    identity = PrefixIdentity("rev", "tok", 7)
    tokens = tuple(range(4 * T))
    keys, others = (PrefixKeyer(secret, identity).chain("t", tokens, T) for secret in (b"a" * 32, b"b" * 32))
    assert {len(key) for key in keys} == {32}
    assert not set(keys) & set(others)
    assert len(set(keys)) == 4
