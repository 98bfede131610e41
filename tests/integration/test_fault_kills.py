"""Workers that are killed as real processes: what their requests hear, and what the survivors keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from cluster.launch.build import BuiltWorker
from cluster.launch.spec import WorkerSpec
from cluster.selftest.kills import LONG_PROMPT_TOKENS, KillLab, build_slow
from cluster.selftest.lab import REQUEST_TIMEOUT_S, Reply, Subject, load_subject
from cluster.selftest.rows import ROWS
from cluster.selftest.run import is_fail_closed, run_row, run_trial
from kvstore.checks import ALL_CHECKS
from kvstore.errors import TransferError, Unavailable

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
KILLS = {row.number: row for row in ROWS if row.run is None}
# A control doubles the time; these two show both ends of a stream that is taken for its end.
WITH_CONTROL = ("17c", "18")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@pytest.mark.parametrize("number", WITH_CONTROL)
async def test_a_kill_fails_closed_and_its_control_does_not(number: str, subject: Subject):
    result = await run_row(KILLS[number], subject)
    assert result.fail_closed, f"{result.error} after {result.tokens_sent} tokens; {result.detail}"
    assert result.neighbour_ok
    assert result.pages_back
    assert result.control_wrong, result.detail


@pytest.mark.parametrize("number", sorted(set(KILLS) - set(WITH_CONTROL)))
async def test_a_kill_fails_closed(number: str, subject: Subject):
    row = KILLS[number]
    trial = await run_trial(row, subject, ALL_CHECKS)
    reply = trial.seen.reply
    assert is_fail_closed(subject, row, reply, trial.seen), reply.error
    assert isinstance(reply.error, Unavailable)
    assert trial.neighbour_ok
    assert trial.pages_back


# --- phases beside those of the rows --------------------------------------------------------------------------------

DECODERS = ("decode-0", "decode-1")
ANSWER_TOKENS = 600  # there when the kill comes


@asynccontextmanager
async def kill_lab(
    subject: Subject, build: Callable[[WorkerSpec], BuiltWorker] | None = None, **flags: object
) -> AsyncIterator[KillLab]:
    lab = KillLab(subject, ALL_CHECKS, {key.replace("__", "."): value for key, value in flags.items()}, build)
    try:
        await lab.start()
        yield lab
    finally:
        await lab.stop()


async def ended(task: asyncio.Task[Reply]) -> Reply:
    """What a request heard, at the latest a second after its deadline."""
    async with asyncio.timeout(REQUEST_TIMEOUT_S + 1):
        return await task


def require_typed(subject: Subject, prompt: tuple[int, ...], reply: Reply) -> None:
    """The kill's own error, not the deadline's, and no token that is not the oracle's."""
    assert isinstance(reply.error, Unavailable | TransferError), reply.error
    wanted = subject.answer(prompt, len(reply.tokens) or 1).tokens
    assert reply.tokens == wanted[: len(reply.tokens)]


async def require_served(lab: KillLab, subject: Subject) -> None:
    prompt = subject.prompt("after")
    assert subject.right(prompt, await lab.client.ask(prompt, 20))


async def test_prefill_is_killed_when_all_is_sent_and_nothing_acknowledged(subject: Subject):
    async with kill_lab(subject, build_slow) as lab:
        bystander = subject.prompt("bystander")
        beside = asyncio.create_task(lab.client.ask(bystander, ANSWER_TOKENS))
        prompt = subject.prompt("victim", LONG_PROMPT_TOKENS)
        victim = asyncio.create_task(lab.client.ask(prompt, 64))
        await lab.until("prefill-0", lambda s: s.leases == 1 and not s.running_requests and s.tokens >= len(prompt))
        await lab.kill("prefill-0")
        reply = await ended(victim)
        require_typed(subject, prompt, reply)
        assert reply.tokens == ()
        assert subject.right(bystander, await ended(beside))
        assert await lab.settled(DECODERS)


@pytest.mark.parametrize("phase", ["waiting for prefill", "pulling"])
async def test_decode_is_killed_before_it_answers(subject: Subject, phase: str):
    pulling = phase == "pulling"
    async with kill_lab(subject, build_slow if pulling else None) as lab:
        prompt = subject.prompt("victim", LONG_PROMPT_TOKENS)
        victim = asyncio.create_task(lab.client.ask(prompt, 64))
        await lab.until("prefill-0", lambda s: s.leases == 1 and s.running_requests == (0 if pulling else 1)
                        and (s.tokens >= len(prompt) or not pulling))  # fmt: skip
        target = await busy_of(lab, lambda s: s.running_requests + s.waiting_requests == 1)
        await lab.kill(target)
        reply = await ended(victim)
        require_typed(subject, prompt, reply)
        assert reply.tokens == ()
        assert await lab.settled(("prefill-0", *(w for w in DECODERS if w != target)))
        await require_served(lab, subject)


async def test_decode_is_killed_with_a_request_in_its_queue(subject: Subject):
    """One runs and one waits there; a third on the other worker is right."""
    async with kill_lab(subject, workers__max_running=1) as lab:
        names = ["one", "two"]
        running = [asyncio.create_task(lab.client.ask(subject.prompt(n), ANSWER_TOKENS)) for n in names]
        for worker in DECODERS:
            await lab.until(worker, lambda s: s.running_requests == 1)
        prompt = subject.prompt("victim")
        victim = asyncio.create_task(lab.client.ask(prompt, 64))
        target = await busy_of(lab, lambda s: s.waiting_requests == 1)
        await lab.kill(target)
        reply = await ended(victim)
        require_typed(subject, prompt, reply)
        assert reply.tokens == ()
        replies = [await ended(task) for task in running]
        assert sorted(reply.error is None for reply in replies) == [False, True]
        for name, other in zip(names, replies, strict=True):
            if other.error is None:
                assert subject.right(subject.prompt(name), other)
            else:
                require_typed(subject, subject.prompt(name), other)
        assert await lab.settled(("prefill-0", *(w for w in DECODERS if w != target)))


async def busy_of(lab: KillLab, true: Callable[[object], bool]) -> str:
    """The decode worker of which this is true, as soon as it is of one."""
    async with asyncio.timeout(30):
        while True:
            for worker in DECODERS:
                if true(await lab.status(worker)):
                    return worker
            await asyncio.sleep(0.01)
