"""Ends that nobody planned: callers that leave, streams that are cut, workers that drain, calls that make no sense.

After each of them both pools are at their baseline, nothing computes, and a neighbour was right.
"""

from __future__ import annotations

import asyncio
import threading

import grpc.aio
import pytest

from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, StalePage, Unavailable
from prefill.core import HandoffFailed
from tests.support.edge_lab import EdgeLab, Neighbour, cluster, require_served
from wire.options import open_channel

PROMPT_TOKENS = 10 * PAGE_TOKENS
ANSWER_TOKENS = 1500  # long enough to be there when the end comes
BACK_S = 2.0  # the design's promise to whoever leaves: by then nothing of it is left on either side


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@pytest.fixture
async def lab(subject: Subject):
    async with cluster(subject, cache__decode_pages=256) as lab:
        yield lab


# --- callers that leave ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "phase", ["queued", "waiting for prefill", "prefilling", "prefilled and not told", "pulling", "decoding"]
)
async def test_a_caller_that_leaves_costs_nothing(subject, phase, stream):
    queued = phase == "queued"
    async with cluster(subject, cache__decode_pages=256, workers__max_running=1 if queued else 8,
                       workers__chunk_tokens=PAGE_TOKENS) as lab:  # fmt: skip
        victim = lab.subject.prompt("victim", PROMPT_TOKENS)
        let_go, held = threading.Event(), threading.Event()

        def hold_pull(start, orders) -> None:
            if start.ticket.token_ids == victim:
                held.set()
                let_go.wait(60)

        if phase == "waiting for prefill":
            lab.hooks.before_prefill_plan = lambda: False
        elif phase == "prefilling":
            turns: list[int] = []
            # One chunk is computed, then the worker is slow.
            lab.hooks.before_prefill_plan = lambda: len(turns) < 3 and not turns.append(1)
        elif phase == "pulling":
            lab.hooks.each_pull = hold_pull
        elif phase == "prefilled and not told":
            lab.hooks.each_event = lambda start, message: [] if start.ticket.token_ids == victim else [message]
        blocker = None
        if queued:
            blocker = lab.call(lab.subject.prompt("blocker", 70), max_tokens=ANSWER_TOKENS, ignore_eos=True)
            await lab.until(lambda: lab.decode.engine.facts().running == 1, "the blocker runs")
        call = lab.call(victim, max_tokens=ANSWER_TOKENS, ignore_eos=True, stream=stream)
        reading = asyncio.create_task(lab.read(call))
        prefill, decode = lab.prefill.engine, lab.decode.engine
        await lab.until(*{
            "queued": (lambda: decode.facts().waiting == 1, "it waits at decode"),
            "waiting for prefill": (lambda: prefill.facts().waiting == 1, "it waits at prefill"),
            "prefilling": (lambda: prefill.facts().running == 1 and prefill.facts().steps >= 2, "it computes"),
            "prefilled and not told": (lambda: is_done(lab, victim), "it is computed"),
            "pulling": (held.is_set, "it pulls"),
            "decoding": (lambda: len(lab.decode_pages(victim)[1]) > 12, "it answers"),
        }[phase])  # fmt: skip
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        async with asyncio.timeout(BACK_S):
            await lab.until(lambda: lab.decode_request_no(victim) is None, "decode has forgotten it")
            await lab.until(lambda: not len(lab.prefill_engine.core.leases), "prefill has forgotten it")
            await lab.until(lambda: are_back(lab, alone=not queued), "every page is back, or in the prefix cache")
        assert prefill.facts().running + prefill.facts().waiting == 0
        computed = prefill.facts().tokens
        lab.hooks.before_prefill_plan = lab.hooks.each_event = None
        let_go.set()
        if blocker is not None:
            blocker.cancel()
        await lab.require_quiet()
        assert prefill.facts().tokens == computed, "prefill computed nothing more"
        await require_served(lab)
        assert decode.facts().outcomes["cancelled"] == (2 if queued else 1)


def is_done(lab: EdgeLab, prompt: tuple[int, ...]) -> bool:
    promised = list(lab.prefill_engine.core._promised.values())
    return any(seq.ticket.token_ids == prompt and seq.completed for seq in promised)


def are_back(lab: EdgeLab, *, alone: bool) -> bool:
    """Both pools are at their baseline; with another request at decode, prefill's is."""
    prefill, decode = lab.prefill.guard, lab.decode.guard
    spared = lab.prefill_engine.core.cached_pages
    return prefill.free_pages + spared == prefill.slots and (not alone or decode.free_pages == decode.slots)


@pytest.mark.parametrize("delay_ms", range(0, 40, 4))
async def test_a_caller_that_leaves_at_any_moment_leaves_no_orphan(lab, delay_ms):
    """Also between the call and its admission, when nobody knows of the request yet."""
    calls = [lab.call(lab.subject.prompt(f"gone {i}", PROMPT_TOKENS), max_tokens=ANSWER_TOKENS, ignore_eos=True)
             for i in range(3)]  # fmt: skip
    readers = [asyncio.create_task(lab.read(call)) for call in calls]
    await asyncio.sleep(delay_ms / 1000)
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await lab.require_quiet()
    await require_served(lab)


async def test_a_call_to_a_worker_that_is_cancelled_behind_a_long_step_leaves_no_orphan(lab):
    """The submit waits for the step thread when the caller goes away; it must not run afterwards."""
    engine = lab.decode.engine
    in_step, leave = threading.Event(), threading.Event()

    def long_step() -> None:
        in_step.set()
        leave.wait(30)

    engine.loop.post(long_step)
    await asyncio.to_thread(in_step.wait, 30)
    prompt = lab.subject.prompt("orphan", 70)
    call = lab.call(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    await lab.until(lambda: engine.loop._commands.qsize() > 0, "its submit waits")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lab.read(call)
    await lab.until(lambda: engine.loop._commands.qsize() > 1, "and so does what undoes it")
    leave.set()
    await lab.until(lambda: engine.loop._commands.qsize() == 0, "both ran")
    await lab.require_quiet()
    assert engine.facts().steps == 0
    await require_served(lab)


async def test_a_deadline_ends_a_request_in_prefills_queue(lab):
    lab.hooks.before_prefill_plan = lambda: False
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(lab.see(lab.subject.prompt("late", 70), max_tokens=4), 0.5)
    lab.hooks.before_prefill_plan = None
    await lab.require_quiet()
    await require_served(lab)


# --- streams that are cut -------------------------------------------------------------------------------------------

PAGES = 4


@pytest.mark.parametrize("how", ["typed", "quiet end", "hang and drop"])
@pytest.mark.parametrize("at", range(PAGES + 1))
async def test_prefills_stream_ends_between_any_two_events(lab, how, at):
    """Instead of its event number `at` comes an error, or the good end of a stream that is not complete."""
    victim = lab.subject.prompt("cut", PAGES * PAGE_TOKENS)
    seen_events: list[int] = []

    def event(seq, item):
        if seq.ticket.token_ids != victim:
            return [item]
        seen_events.append(1)
        if len(seen_events) - 1 < at:
            return [item]
        if len(seen_events) - 1 > at:
            return []
        if how == "typed":
            return [HandoffFailed(seq.request_no, Unavailable("prefill_cut", "cut"))]
        return [None]  # how the service hears of a release that nobody sent

    async with Neighbour(lab):
        if how == "hang and drop":
            # The last thing that decode hears is event `at`; then prefill is told that the call broke.
            def drop(start, message):
                if start.ticket.token_ids != victim:
                    return [message]
                seen_events.append(1)
                if len(seen_events) - 1 <= at:
                    return [message]
                raise GenlockError("broken", "the call broke on our side")

            lab.hooks.each_event = drop
        else:
            lab.hooks.prefill_event = event
        seen = await lab.see(victim, max_tokens=40, ignore_eos=True)
        assert seen.error is not None
        assert seen.tokens() == []
        reason = {"typed": "prefill_cut", "quiet end": "handoff_cut", "hang and drop": "broken"}[how]
        assert seen.error.reason == reason
        lab.hooks.prefill_event = lab.hooks.each_event = None
    await require_served(lab)


@pytest.mark.parametrize("at", [0, 2, PAGES])
async def test_prefills_server_goes_away_in_the_middle(subject, at):
    """The connection itself ends. The request hears Unavailable; decode keeps nothing."""
    async with cluster(subject, cache__decode_pages=256) as lab:
        victim = lab.subject.prompt("gone", PAGES * PAGE_TOKENS)
        events: list[int] = []
        loop = asyncio.get_running_loop()
        stopped: list[asyncio.Future] = []

        def event(seq, item):
            if seq.ticket.token_ids == victim:
                events.append(1)
                if len(events) - 1 == at:
                    stopped.append(asyncio.run_coroutine_threadsafe(lab.prefill._server.stop(None), loop))
                if len(events) - 1 >= at:
                    return []
            return [item]

        async with Neighbour(lab):
            lab.hooks.prefill_event = event
            seen = await lab.see(victim, max_tokens=40, ignore_eos=True)
            assert isinstance(seen.error, Unavailable)
            assert seen.tokens() == []
            lab.hooks.prefill_event = None
        await lab.until(lambda: lab.decode.guard.free_pages == lab.decode.guard.slots, "decode's pages are back")
        await lab.restart_prefill()
        await lab.until(lab.gateway.state.fleet.serving, "it is back")
        await require_served(lab)


@pytest.mark.parametrize("kind", ["twice", "foreign id", "after the end", "missing", "second accept", "junk key"])
async def test_a_prefill_that_breaks_the_protocol_ends_that_request_alone(lab, kind):
    """What decode hears is not what was sent; the pages are taken from prefill's cache as well."""
    victim = lab.subject.prompt("rules", PAGES * PAGE_TOKENS)

    def event(start, message):
        if start.ticket.token_ids != victim:
            return [message]
        which = message.WhichOneof("event")
        if kind == "twice" and which == "page":
            return [message, message]
        if kind == "foreign id" and which == "page":
            message.handoff_id = b"somebody else's."
        if kind == "after the end" and which == "completed":
            again = type(message).FromString(message.SerializeToString())
            return [message, again]
        if kind == "missing" and which == "page" and message.page.logical_index == 1:
            return []
        if kind == "second accept" and which == "accepted":
            return [message, message]
        if kind == "junk key" and which == "page":
            message.page.prefix_key = b"x" * 32
        return [message]

    async with Neighbour(lab):
        lab.hooks.each_event = event
        seen = await lab.see(victim, max_tokens=40, ignore_eos=True)
        assert isinstance(seen.error, StalePage), seen.error
        assert seen.tokens() == []
        lab.hooks.each_event = None
    released = lab.prefill.engine.facts().outcomes
    assert released.get("suspect") == 1, "prefill was told, and the release arrived"
    await require_served(lab)


@pytest.mark.parametrize("kind", [
    "token outside", "negative token", "no time", "no incarnation", "no key", "cached too much", "cached below none",
    "log-probabilities",
])  # fmt: skip
async def test_what_prefill_says_is_never_the_callers_mistake(lab, kind):
    """Fields that cannot be: the request ends as one that its prefill worker failed, and nothing is left behind."""
    victim = lab.subject.prompt("malformed", PAGES * PAGE_TOKENS)

    def event(start, message):
        which = message.WhichOneof("event")
        if start.ticket.token_ids != victim:
            return [message]
        if which == "completed":
            if kind == "token outside":
                message.completed.first_token.token_id = 1 << 20
            elif kind == "negative token":
                message.completed.first_token.token_id = -1
            elif kind == "no time":
                message.completed.prefill_ms = float("nan")
            elif kind == "cached too much":
                message.completed.cached_tokens = PAGES * PAGE_TOKENS + 1
            elif kind == "cached below none":
                message.completed.cached_tokens = -1
            elif kind == "log-probabilities":  # nobody asked for any
                message.completed.first_token.logprob = -0.5
        elif which == "accepted" and kind == "no incarnation":
            message.accepted.pool.incarnation = 0
        elif which == "page" and kind == "no key":
            message.page.prefix_key = b""
        return [message]

    async with Neighbour(lab):
        lab.hooks.each_event = event
        seen = await lab.see(victim, max_tokens=40, ignore_eos=True)
        assert isinstance(seen.error, Unavailable), seen.error
        assert seen.error.reason == "prefill_malformed"
        assert seen.tokens() == []
        lab.hooks.each_event = None
    await require_served(lab)


# --- slow and many --------------------------------------------------------------------------------------------------


async def test_a_client_that_reads_slowly_gets_everything_and_stops_nobody(lab):
    prompt = lab.subject.prompt("slow", 70)
    call = lab.call(prompt, max_tokens=1200, ignore_eos=True)
    first = await call.read()
    async with Neighbour(lab):
        await asyncio.sleep(0.2)
    tokens = list(first.token_ids)
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens.extend(message.token_ids)
    assert len(tokens) == 1200
    assert tokens == [prompt[-64 + i % 64] for i in range(1200)]


async def test_pulls_that_hang_keep_nobody_else_waiting(lab):
    """More of them than two, and a request that comes later is served all the same."""
    let_go = threading.Event()
    hanging = [lab.subject.prompt(f"hang {i}", 70) for i in range(4)]
    held: list[int] = []

    def pull(start, orders) -> None:
        if start.ticket.token_ids in hanging:
            held.append(1)
            let_go.wait(60)

    lab.hooks.each_pull = pull
    tasks = [asyncio.create_task(lab.see(p, max_tokens=4, ignore_eos=True)) for p in hanging]
    try:
        await lab.until(lambda: len(held) >= 4, "all four hang")
        await require_served(lab)
    finally:
        let_go.set()
    for seen in await asyncio.gather(*tasks):
        assert seen.error is None


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_drain_under_load_loses_nothing(lab, role):
    worker = lab.prefill if role == "prefill" else lab.decode
    lab.hooks.before_prefill_plan = lambda: False
    prompts = [lab.subject.prompt(f"drain {i}", 70) for i in range(6)]
    tasks = [asyncio.create_task(lab.see(p, max_tokens=60, ignore_eos=True)) for p in prompts]
    engine = worker.engine
    await lab.until(lambda: engine.facts().running + engine.facts().waiting >= 6, "all are there")
    lab.hooks.before_prefill_plan = None
    channel = open_channel(worker.endpoint)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    answer = await stub.Drain(worker_pb2.DrainRequest(), timeout=60)
    assert answer.drained
    for seen, prompt in zip(await asyncio.gather(*tasks), prompts, strict=True):
        assert seen.error is None
        assert seen.tokens() == [t.token_id for t in lab.wanted(prompt, max_tokens=60, ignore_eos=True)]
    refused = await lab.see(prompts[0], max_tokens=4)
    assert isinstance(refused.error, Unavailable)
    assert (await stub.Status(worker_pb2.WorkerStatusRequest(), timeout=5)).draining
    await channel.close(None)
