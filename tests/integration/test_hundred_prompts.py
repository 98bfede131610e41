"""A hundred prompts, each answered by one process, split and cold, and split with its prefix from the cache, while
copies take their time: the same tokens each time."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from kvstore.transfer.faults import TransferFaults, TransferInfo
from tests.support.edge_lab import EdgeLab, Hooks

PROMPTS, AT_ONCE = 100, 10
ANSWER = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


class SlowCopies(Hooks):
    """Each copy takes some milliseconds of its own, and the pages of some come last first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._draw = threading.Lock()
        self.delayed = 0

    def _plan(self, info: TransferInfo) -> TransferFaults:
        with self._draw:
            self.delayed += 1
            return TransferFaults(delay_ms=self._rng.randrange(1, 20), reverse_order=self._rng.random() < 0.5)


async def test_one_process_and_split_cold_and_from_the_cache_give_the_same_tokens(subject):
    prompts = [subject.prompt(f"of a hundred {i}", PAGE_TOKENS + 1 + i) for i in range(PROMPTS)]
    pages = sum(-(-(len(p) + 24) // PAGE_TOKENS) for p in prompts)
    lab = EdgeLab(subject, **{"cache.prefill_pages": pages + 64, "cache.decode_pages": 256})
    lab.hooks = lab.inject = SlowCopies(seed=30)
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: tuple[int, ...]) -> tuple[list[int], int]:
        async with slots:
            seen = await lab.see(prompt, **ANSWER)
        assert seen.error is None
        return seen.tokens(), seen.finished().usage.cached_tokens

    try:
        await lab.start()
        cold, warm = [await asyncio.gather(*map(one, prompts)) for _ in range(2)]
        for prompt, (first, nothing), (second, cached) in zip(prompts, cold, warm, strict=True):
            wanted = [t.token_id for t in lab.wanted(prompt, **ANSWER)]
            assert first == second == wanted
            assert nothing == 0
            assert cached == (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
        assert lab.hooks.delayed >= 2 * PROMPTS, "every copy was slow"
        await lab.require_quiet()
    finally:
        await lab.stop()
