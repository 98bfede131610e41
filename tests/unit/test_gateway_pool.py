"""The pool of threads: turns, bounds, callers that leave."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from cluster.gateway.admission import Prompt, Turn
from cluster.gateway.pool import FairPool
from cluster.gateway.prompt import INLINE_CHARS, TURN_CHARS, PromptEncoder
from kvstore.errors import InvalidInput, NoCapacity
from model.probe import probe_tokenizer
from model.tokenizer import MAX_HELD_CHARS, ByteLevelTokenizer


class Stage:
    """Jobs that are held until they are let go, and the order in which they began."""

    def __init__(self, pool: FairPool) -> None:
        self.pool = pool
        self.began: list[str] = []
        self.gate = threading.Event()

    def job(self, tenant: str, name: str) -> asyncio.Task[str]:
        def work() -> str:
            self.began.append(name)
            assert self.gate.wait(20)
            return name

        return asyncio.ensure_future(self.pool.run(tenant, work))

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.began) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
async def stage():
    made = Stage(FairPool("test", threads=1, max_jobs=8))
    yield made
    made.gate.set()
    made.pool.close()


async def test_tenants_take_turns_however_many_one_has_waiting(stage: Stage):
    jobs = [stage.job("many", f"m{index}") for index in range(5)]
    await stage.begun(1)
    jobs += [stage.job("few", "f0"), stage.job("other", "o0")]
    await asyncio.sleep(0)
    stage.gate.set()
    await asyncio.gather(*jobs)
    assert stage.began == ["m0", "m1", "f0", "o0", "m2", "m3", "m4"]


async def test_more_than_the_bound_are_refused_and_those_that_run_count(stage: Stage):
    jobs = [stage.job("a", str(index)) for index in range(8)]
    await stage.begun(1)
    with pytest.raises(NoCapacity) as caught:
        await stage.pool.run("b", lambda: None)
    assert caught.value.reason == "tokenizer_busy"
    stage.gate.set()
    assert await asyncio.gather(*jobs) == [str(index) for index in range(8)]
    assert len(stage.pool) == 0
    assert await stage.pool.run("b", lambda: 7) == 7


async def test_a_caller_that_leaves_gives_its_turn_and_a_thread_that_runs_stays_counted(stage: Stage):
    first, second, third = (stage.job("a", name) for name in "123")
    await stage.begun(1)
    first.cancel()
    second.cancel()
    await asyncio.wait({first, second})
    assert len(stage.pool) == 2
    stage.gate.set()
    assert await third == "3"
    assert stage.began == ["1", "3"]


async def test_a_close_ends_those_who_wait(stage: Stage):
    jobs = [stage.job("a", str(index)) for index in range(3)]
    await stage.begun(1)
    stage.pool.close()
    stage.gate.set()
    await asyncio.wait(jobs, timeout=20)
    assert [job.cancelled() for job in jobs] == [True] * 3
    assert stage.began == ["0"]


async def test_errors_are_the_callers(stage: Stage):
    def fails() -> None:
        raise InvalidInput("bad_text", "no")

    with pytest.raises(InvalidInput):
        await stage.pool.run("a", fails)
    assert len(stage.pool) == 0


class Where:
    """Notes on which thread it was asked."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return [1]

    def encode_chat(self, messages, *, tools=()) -> list[int]:
        return self.encode("")


@pytest.mark.parametrize(
    ("prompt", "inline"),
    [
        (Prompt("text", text="x" * INLINE_CHARS), True),
        (Prompt("text", text="x" * (INLINE_CHARS + 1)), False),
        (Prompt("chat", turns=(Turn("user", "x"),)), True),
        (Prompt("chat", turns=(Turn("user", ""),) * (INLINE_CHARS // TURN_CHARS + 1)), False),
        (Prompt("chat", turns=(Turn("user", "", name="n" * INLINE_CHARS),)), False),
    ],
    ids=["short text", "long text", "short chat", "many empty messages", "long names"],
)
async def test_what_is_work_is_not_done_on_the_loop(prompt: Prompt, inline: bool, stage: Stage):
    tokenizer = Where()
    assert await PromptEncoder(tokenizer, stage.pool).encode(prompt, "a") == [1]
    assert (tokenizer.threads == [threading.main_thread()]) is inline


class Held(SimpleNamespace):
    def encode(self, *_args: object, **_kwargs: object) -> None:
        raise AssertionError("holds the interpreter")


def test_long_texts_are_encoded_without_holding_the_interpreter():
    """The library lets other threads run within `encode_batch` alone."""
    whole = probe_tokenizer()
    text = "ab cd " * MAX_HELD_CHARS
    held = Held(encode_batch=whole.plain.encode_batch)
    other = ByteLevelTokenizer(
        held, whole.token_bytes, whole.controls, whole.prefix_ids, whole.eos_token_ids, whole.template, whole.digest
    )
    assert other.encode(text) == whole.plain.encode(text, add_special_tokens=False).ids
    with pytest.raises(AssertionError):
        other.encode("short")
