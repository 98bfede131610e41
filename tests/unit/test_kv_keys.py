"""Prefix keys: one key means one tenant, model, tokenizer, layout, adapter and token sequence, and nothing else."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidInput
from kvstore.keys import PrefixIdentity, PrefixKeyer

SECRET = b"cluster secret of a test"
IDENTITY = PrefixIdentity("rev-1", "tok-1", 12345, "")
OTHER_VALUE = {"model_revision": "rev-2", "tokenizer_digest": "tok-2", "layout_fingerprint": 12346, "adapter": "lora"}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def keyer(**changed: object) -> PrefixKeyer:
    return PrefixKeyer(SECRET, replace(IDENTITY, **changed))  # type: ignore[arg-type]


def test_every_field_of_the_identity_is_in_this_table() -> None:
    assert {f.name for f in fields(PrefixIdentity)} == set(OTHER_VALUE)


def test_one_differing_field_gives_all_different_keys() -> None:
    chains = {"same": keyer().chain("t", TOKENS, 4), "tenant": keyer().chain("u", TOKENS, 4)}
    chains["secret"] = PrefixKeyer(SECRET + b"!", IDENTITY).chain("t", TOKENS, 4)
    for name, value in OTHER_VALUE.items():
        chains[name] = keyer(**{name: value}).chain("t", TOKENS, 4)
    for (one, a), (other, b) in itertools.combinations(chains.items(), 2):
        assert not set(a) & set(b), f"{one} and {other} share a key"
    assert chains["same"] == keyer().chain("t", TOKENS, 4)


# Texts that would read alike if fields were only glued together.
AMBIGUOUS = ["", "a", "ab", "b", "a\0", "\0a", "a\0b", "\1\0\0\0", "a\1\0\0\0b", "1", "11"]


def test_neighbouring_fields_cannot_lend_each_other_bytes() -> None:
    roots: dict[bytes, tuple[object, ...]] = {}
    for model, tokenizer, adapter, tenant in itertools.product(AMBIGUOUS, repeat=4):
        named = (model, tokenizer, adapter, tenant)
        root = PrefixKeyer(SECRET, PrefixIdentity(model, tokenizer, 1, adapter)).root(tenant)
        assert roots.setdefault(root, named) == named
    for one, two in itertools.product((1, 11), repeat=2):
        root = PrefixKeyer(SECRET, PrefixIdentity("1", "1", one, str(two))).root("1")
        assert roots.setdefault(root, (one, two)) in ((one, two), ("1", "1", str(two), "1"))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), max_size=9), st.lists(st.integers(0, 3), max_size=9), st.sampled_from([1, 2, 4]))
def test_keys_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int], page_tokens: int) -> None:
    one, two = (keyer().chain("t", tokens, page_tokens) for tokens in (a, b))
    assert len(one) == -(-len(a) // page_tokens)
    for i, (k, m) in enumerate(itertools.zip_longest(one, two)):
        end = (i + 1) * page_tokens
        assert (k == m) is (a[:end] == b[:end] and k is not None)
    assert len(set(one)) == len(one)


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_partial_page_is_not_its_full_page_and_not_a_shifted_one(cut: int) -> None:
    full, part = keyer().chain("t", TOKENS[:8], 8), keyer().chain("t", TOKENS[:cut], 8)
    shifted = keyer().chain("t", TOKENS[cut : cut + 8], 8)
    split = keyer().chain("t", TOKENS[:8], cut)
    assert len({*full, *part, *shifted, *split}) == 3 + len(split) - (split[0] == part[0])


def test_zeros_are_tokens_too() -> None:
    chains = [keyer().chain("t", [0] * n, 4) for n in range(9)]
    assert len({c[-1] for c in chains[1:]}) == 8


@pytest.mark.parametrize(("root", "previous"), [(0, 32), (32, 0), (31, 32), (32, 40), (64, 32)])
def test_a_key_of_another_length_is_refused(root: int, previous: int) -> None:
    with pytest.raises(InvalidInput):
        keyer().extend(bytes(root), bytes(previous), [1])


def test_extend_is_the_step_of_chain() -> None:
    k = keyer()
    root = k.root("t")
    first = k.extend(root, root, TOKENS[:4])
    assert k.chain("t", TOKENS[:6], 4) == (first, k.extend(root, first, TOKENS[4:6]))
    assert k.extend(root, root, TOKENS[:4]) != k.extend(keyer().root("u"), root, TOKENS[:4])


@pytest.mark.parametrize("page_tokens", [0, -4])
def test_impossible_pages_are_refused(page_tokens: int) -> None:
    with pytest.raises(InvalidInput):
        keyer().chain("t", TOKENS, page_tokens)


def test_a_short_secret_is_refused_and_odd_tenants_are_not() -> None:
    with pytest.raises(InvalidInput) as caught:
        PrefixKeyer(b"x" * 15, IDENTITY)
    assert caught.value.field == "cluster.secret"
    assert keyer().root("\ud800") != keyer().root("?")
