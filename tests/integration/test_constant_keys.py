"""A whole cluster in which every prefix key is the same: prefill's lookups compare tokens and tenant, so that no answer
comes from another prompt. What is left to the key alone is said here as well."""

from __future__ import annotations

import hashlib

import pytest

from cluster.gateway.identity import BearerTenants, Caller
from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from kvstore.keys import PrefixKeyer, token_pages
from kvstore.prefix_index import Content
from tests.support.edge_lab import EdgeLab, Seen, cluster


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


def one_key(self, root: bytes, previous: bytes, token_ids) -> bytes:
    return b"k" * 32


def one_key_a_place(self, root: bytes, previous: bytes, token_ids) -> bytes:
    """Worse: a foreign page would even be where it belongs."""
    at = 0 if previous == root else previous[-1] + 1
    return b"k" * 31 + bytes([at])


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {tenant}"),)


async def ask(lab: EdgeLab, prompt: tuple[int, ...], tenant: str = "a") -> Seen:
    lab.gateway.state.authenticator = BearerTenants(
        {hashlib.sha256(name.encode()).digest(): Caller(name) for name in ("a", "b")}
    )
    return await lab.see(prompt, max_tokens=64, ignore_eos=True, metadata=bearer(tenant))


def is_right(lab: EdgeLab, prompt: tuple[int, ...], seen: Seen) -> bool:
    wanted = [t.token_id for t in lab.wanted(prompt, max_tokens=64, ignore_eos=True)]
    return seen.error is None and seen.tokens() == wanted


@pytest.mark.parametrize("extend", [one_key, one_key_a_place])
async def test_every_answer_is_its_own_prompts(subject, monkeypatch, extend):
    monkeypatch.setattr(PrefixKeyer, "extend", extend)
    first = subject.prompt("first", 5 * PAGE_TOKENS)
    same_start = (*first[:PAGE_TOKENS], *subject.prompt("second", 4 * PAGE_TOKENS))
    whole = PAGE_TOKENS if extend is one_key else 4 * PAGE_TOKENS  # one key has one entry
    async with cluster(subject) as lab:
        for prompt, tenant, cached in (
            (first, "a", 0),
            (first, "a", whole),
            (subject.prompt("third", 5 * PAGE_TOKENS), "a", 0),
            (same_start, "a", PAGE_TOKENS),
            (first, "b", 0),
        ):
            seen = await ask(lab, prompt, tenant)
            assert is_right(lab, prompt, seen)
            assert seen.finished().usage.cached_tokens == cached


async def test_without_the_comparison_an_answer_is_anothers(subject, monkeypatch):
    """The control. Decode does not notice either: it, too, compares keys."""
    monkeypatch.setattr(PrefixKeyer, "extend", one_key_a_place)
    monkeypatch.setattr(Content, "is_same", lambda self, other: True)
    async with cluster(subject) as lab:
        first, other = subject.prompt("first", 5 * PAGE_TOKENS), subject.prompt("other", 5 * PAGE_TOKENS)
        await ask(lab, first)
        seen = await ask(lab, other)
        assert seen.error is None
        assert seen.tokens()[:48] == list(first[PAGE_TOKENS : 4 * PAGE_TOKENS]), "the first prompt's secret"


async def test_what_decode_is_left_with_is_the_key(subject, monkeypatch):
    """Where prefill's index is wrong itself, decode knows a foreign page by its key, and by nothing else: with one key
    for everything it is not noticed. So this takes two faults, of which one is a collision of 256-bit keyed hashes."""
    monkeypatch.setattr(PrefixKeyer, "extend", one_key)
    async with cluster(subject) as lab:
        foreign, victim = subject.prompt("foreign"), subject.prompt("victim")
        await ask(lab, foreign)
        core = lab.prefill_engine.core

        def poison() -> None:
            [(key, ref)] = core.index.oldest()
            core.index._pages.clear()
            core.index.insert(key, ref, Content("a", token_pages(victim, PAGE_TOKENS)[0], None))

        await lab.prefill_engine.loop.call(poison)
        seen = await ask(lab, victim)
        assert seen.error is None
        assert not is_right(lab, victim, seen)
        assert seen.tokens()[1:PAGE_TOKENS] == list(foreign[1:PAGE_TOKENS]), "the foreign page's own"
