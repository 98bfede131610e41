"""The step loop survives what it runs, refuses what it cannot run, and ends."""

from __future__ import annotations

import asyncio
import itertools
import threading

import pytest

from kvstore.errors import NoCapacity, Unavailable
from wire import step_loop
from wire.step_loop import StepLoop

WAIT_S = 10.0


@pytest.fixture
def make():
    loops = []

    def build(turn=lambda: False, *, start: bool = True, idle_ms: int = 1) -> StepLoop:
        ticks = itertools.count()
        loop = StepLoop("test-steps", turn, lambda: next(ticks), idle_ms)
        loops.append(loop)
        if start:
            loop.start()
        return loop

    yield build
    for loop in loops:
        assert loop.stop(10_000)


async def test_a_call_runs_on_the_loops_own_thread_and_answers(make):
    loop = make()
    assert await loop.call(lambda: threading.current_thread().name) == "test-steps"


async def test_a_call_raises_what_its_work_raises_and_the_loop_goes_on(make):
    loop = make()
    with pytest.raises(ZeroDivisionError):
        await loop.call(lambda: 1 // 0)
    assert await loop.call(lambda: 7) == 7
    assert loop.surprises == 0, "the caller was told; nothing was swallowed"


async def test_commands_run_in_order(make):
    loop = make()
    seen: list[int] = []
    for i in range(3000):  # more than one turn takes
        loop.post(lambda i=i: seen.append(i))
    await loop.call(lambda: None)
    assert seen == list(range(3000))


async def test_a_raising_command_is_counted_and_those_behind_it_run(make):
    loop = make()
    loop.post(lambda: 1 // 0)
    assert await loop.call(lambda: "after") == "after"
    assert loop.surprises == 1


async def test_a_raising_turn_is_counted_and_the_next_turn_comes(make):
    fate = iter([True, True, False])
    turned = threading.Event()

    def turn() -> bool:
        if next(fate, False):
            raise RuntimeError("a surprise")
        turned.set()
        return False

    loop = make(turn)
    assert await asyncio.to_thread(turned.wait, WAIT_S)
    assert loop.surprises == 2


async def test_what_is_logged_names_no_text_of_the_exception(make, caplog):
    loop = make()

    def bad() -> None:
        secret = "the prompt's text"
        raise ValueError(secret)

    loop.post(bad)
    await loop.call(lambda: None)
    assert "ValueError" in caplog.text
    assert "the prompt's text" not in caplog.text.replace('secret = "the prompt\'s text"', "")


async def test_turns_come_when_idle_and_commands_between_busy_turns(make):
    turns = itertools.count()
    count = [0]

    def turn() -> bool:
        count[0] = next(turns)
        return True  # busy for ever

    loop = make(turn)
    assert await loop.call(lambda: 1) == 1
    seen: list[int] = []
    idle = make(lambda: bool(seen.append(1)))
    async with asyncio.timeout(WAIT_S):
        while len(seen) < 3:
            await asyncio.sleep(0.001)
    assert idle.surprises == 0


async def test_the_queue_is_bounded_but_an_end_always_passes(make, monkeypatch):
    monkeypatch.setattr(step_loop, "MAX_COMMANDS", 3)
    loop = make(start=False)
    for _ in range(3):
        loop.post(lambda: None)
    with pytest.raises(NoCapacity) as caught:
        loop.post(lambda: None)
    assert caught.value.reason == "command_queue_full"
    with pytest.raises(NoCapacity):
        await loop.call(lambda: None)
    ended: list[int] = []
    loop.post_quietly(lambda: ended.append(1))
    loop.start()
    async with asyncio.timeout(WAIT_S):
        while not ended:
            await asyncio.sleep(0.001)


async def test_after_the_stop_posts_are_refused_and_quiet_ones_are_quiet(make):
    loop = make()
    assert loop.stop(10_000)
    with pytest.raises(Unavailable):
        loop.post(lambda: None)
    with pytest.raises(Unavailable) as caught:
        await loop.call(lambda: None)
    assert caught.value.reason == "worker_stopped"
    loop.post_quietly(lambda: None)
    assert loop.stop(1), "twice is once"


async def test_a_call_that_the_stop_overtakes_is_refused_not_forgotten(make):
    entered, leave = threading.Event(), threading.Event()

    def turn() -> bool:
        entered.set()
        leave.wait(WAIT_S)
        return False

    loop = make(turn)
    assert await asyncio.to_thread(entered.wait, WAIT_S)
    ran: list[int] = []
    waiting = asyncio.create_task(loop.call(lambda: ran.append(1)))
    await asyncio.sleep(0)
    assert not loop.stop(1), "the turn still runs"
    leave.set()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, WAIT_S)
    assert not ran


async def test_a_call_that_was_never_started_is_refused_by_the_stop(make):
    loop = make(start=False)
    waiting = asyncio.create_task(loop.call(lambda: 1))
    await asyncio.sleep(0)
    assert loop.stop(1)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, WAIT_S)


async def test_what_a_cancelled_caller_made_is_undone(make):
    """The command was queued behind a long turn when its caller went away: it runs, and is taken back."""
    entered, leave = threading.Event(), threading.Event()

    def turn() -> bool:
        entered.set()
        leave.wait(WAIT_S)
        return False

    loop = make(turn)
    assert await asyncio.to_thread(entered.wait, WAIT_S)
    made: list[str] = []
    undone: list[str] = []

    def work() -> str:
        made.append("thing")
        return "thing"

    task = asyncio.create_task(loop.call(work, undone.append))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    leave.set()
    await loop.call(lambda: None)
    assert made == undone == ["thing"]


async def test_nothing_is_undone_for_a_caller_that_got_its_answer_or_whose_work_failed(make):
    loop = make()
    undone: list[object] = []
    await loop.call(lambda: 1, undone.append)
    with pytest.raises(ZeroDivisionError):
        await loop.call(lambda: 1 // 0, undone.append)
    await loop.call(lambda: None)
    assert undone == []


async def test_a_frozen_loop_runs_nothing_until_thawed_and_can_be_stopped(make):
    loop = make()
    await loop.call(lambda: None)
    loop.freeze(True)
    await asyncio.sleep(0.05)  # it may be within its last turn
    seen: list[int] = []
    loop.post(lambda: seen.append(1))
    await asyncio.sleep(0.05)
    at = len(seen)
    loop.freeze(False)
    await loop.call(lambda: None)
    assert (at, seen) in ((0, [1]), (1, [1]))
    loop.freeze(True)
    assert loop.stop(10_000)


async def test_the_beat_moves_when_idle_and_stands_still_in_a_long_turn(make):
    leave = threading.Event()
    hold = threading.Event()

    def turn() -> bool:
        if hold.is_set():
            leave.wait(WAIT_S)
        return False

    loop = make(turn)
    first = await loop.call(lambda: loop.last_turn_ms)
    async with asyncio.timeout(WAIT_S):
        while loop.last_turn_ms == first:
            await asyncio.sleep(0.001)
    hold.set()
    await asyncio.sleep(0.05)
    held = loop.last_turn_ms
    await asyncio.sleep(0.05)
    assert loop.last_turn_ms == held
    leave.set()
