"""The prefix index under pressure: an entry is a page that is still what it was, or it is a miss."""

from __future__ import annotations

import pytest

from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.prefix_index import Content
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


class OneKey(PrefixKeyer):
    """Every page of every prompt of every tenant has one key."""

    def extend(self, root, previous, token_ids):
        return b"k" * 32


@pytest.fixture
def colliding() -> PrefillSide:
    side = PrefillSide(slots=32)
    side.core._keyer = OneKey(b"s" * 32, PrefixIdentity("rev", "tok", 7))
    return side


# (tokens, tenant) of a prompt, and how much of it the first prompt's only entry may serve
SHARED = prompt(1, T)
CASES = [
    ((*SHARED, *prompt(50, 2 * T)), "t", T),  # the same first page
    (prompt(100, 3 * T), "t", 0),
    (prompt(1, 3 * T), "u", 0),  # the same tokens, another tenant's
    ((*prompt(100, T), *SHARED, 5), "t", 0),  # the same page at another place
]


def test_with_one_key_for_everything_lookups_compare_tokens_and_tenant_and_miss(colliding: PrefillSide):
    colliding.prefill(prompt(1, 3 * T))
    assert colliding.core.cached_pages == 1, "one key has one entry"
    for tokens, tenant, cached in CASES:
        seq = colliding.prefill(tokens, tenant, release=False)
        assert seq.cached_tokens == cached, (tokens, tenant)
        require_right(colliding, seq)
        colliding.core.release(seq.handoff_id)
    colliding.require_baseline()


def test_without_the_comparison_one_key_hands_out_foreign_pages(colliding: PrefillSide, monkeypatch):
    """The control: keys alone would take any page for any other."""
    monkeypatch.setattr(Content, "is_same", lambda self, other: True)
    colliding.prefill(prompt(1, 3 * T))
    seq = colliding.prefill(prompt(100, 3 * T))
    assert seq.cached_tokens > 0
    with pytest.raises(AssertionError):
        require_right(colliding, seq)


def test_keys_that_meet_further_on_in_two_prompts_are_a_miss(monkeypatch):
    """Equal tokens at an equal place under an equal key, after other pages: the page's own ids alone would not tell."""
    side = PrefillSide(slots=32)
    plain = side.core._keyer.extend
    second = prompt(40, T)
    monkeypatch.setattr(
        side.core._keyer, "extend", lambda root, prev, ids: b"k" * 32 if ids == second else plain(root, prev, ids)
    )
    one, two = (*prompt(1, T), *second, 9), (*prompt(20, T), *second, 9)
    side.prefill(one)
    for tokens, cached in ((one, 2 * T), (two, 0), (two, T), (one, 2 * T)):
        seq = side.prefill(tokens, release=False)
        assert seq.cached_tokens == cached
        require_right(side, seq)
        side.core.release(seq.handoff_id)
    side.require_baseline()
