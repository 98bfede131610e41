"""Single faults on a whole cluster: each ends the requests that it hit, and no other."""

from __future__ import annotations

import asyncio
import itertools
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.selftest.injector import Injector
from cluster.selftest.lab import PAGE_TOKENS, Lab, Subject, load_subject
from cluster.selftest.rows import bit_flip, lease_expired
from kvstore.errors import CorruptPage, InvalidInput, LayoutMismatch
from kvstore.layout import HEADER_BYTES
from kvstore.transfer.faults import BitFlip, TransferFaults
from tests.support.edge_lab import EdgeLab, Hooks, Neighbour, cluster, require_served


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


class Skewed(Injector):
    """Decode's clock is this far from prefill's, in milliseconds."""

    skew_ms = 0

    def decode_tuning(self, checks, model):
        tuning = super().decode_tuning(checks, model)
        clock = tuning.clock
        return replace(tuning, clock=lambda: clock() + self.skew_ms)


@pytest.mark.parametrize("skew_ms", [-60_000, 60_000])
async def test_a_lease_that_ended_is_noticed_whatever_the_readers_clock_says(subject, skew_ms):
    lab = Lab(subject)
    lab.inject = Skewed()
    lab.inject.skew_ms = skew_ms
    try:
        await lab.start()
        seen = await lease_expired(lab)
        assert seen.reply.error is not None
        assert (seen.reply.error.reason, seen.reply.tokens) == ("header_mismatch", ())
        prompt = subject.prompt("after")
        assert subject.right(prompt, await lab.ask(prompt, 20))
        assert await lab.settled()
    finally:
        await lab.stop()


async def test_a_page_that_three_requests_share_is_refused_to_all_three(subject):
    """All three wait with its descriptor when a bit of it flips; a fourth computes it anew."""
    async with cluster(subject, workers__max_running=8) as lab:
        shared = lab.subject.prompt("shared", 4 * PAGE_TOKENS)
        await lab.see(shared, max_tokens=1)
        prompts = [(*shared, *lab.subject.prompt(f"own {i}", 8)) for i in range(3)]
        held, go = [], threading.Event()

        def pull(start, orders) -> None:
            if start.ticket.token_ids in prompts:
                held.append([o.desc.ref for o in orders if o.desc.logical_index == 0])
                go.wait(30)

        lab.hooks.each_pull = pull
        tasks = [asyncio.create_task(lab.see(p, max_tokens=20, ignore_eos=True)) for p in prompts]
        try:
            await lab.until(lambda: len(held) == 3, "all three hold a promise")
            [ref] = {refs[0] for refs in held if refs}
            lab.prefill.guard._pool.slots_SU8[ref.page_id, HEADER_BYTES + 70] ^= 1
        finally:
            go.set()
        for seen in await asyncio.gather(*tasks):
            assert isinstance(seen.error, CorruptPage), seen.error
            assert seen.tokens() == []
        lab.hooks.each_pull = None
        fourth = await lab.see(prompts[0], max_tokens=20, ignore_eos=True)
        assert fourth.error is None
        assert fourth.tokens() == [t.token_id for t in lab.wanted(prompts[0], max_tokens=20, ignore_eos=True)]
        assert fourth.finished().usage.cached_tokens == 0, "nothing of the damaged prefix is used again"


async def test_one_of_thirty_two_is_corrupt_and_the_others_are_right(subject):
    prompts = [subject.prompt(f"of many {i}", 70) for i in range(32)]
    async with flipping(subject, prompts[:1], workers__max_running=32, workers__max_waiting=64,
                        cache__decode_pages=300, cache__prefill_pages=300) as lab:  # fmt: skip
        lives = [worker.guard.incarnation for worker in (lab.prefill, lab.decode)]
        seen = await asyncio.gather(*(lab.see(p, max_tokens=30, ignore_eos=True) for p in prompts))
        failed = [i for i, one in enumerate(seen) if one.error is not None]
        assert failed == [0]
        assert isinstance(seen[0].error, CorruptPage)
        for one, prompt in list(zip(seen, prompts, strict=True))[1:]:
            assert one.tokens() == [t.token_id for t in lab.wanted(prompt, max_tokens=30, ignore_eos=True)]
        assert [worker.guard.incarnation for worker in (lab.prefill, lab.decode)] == lives


@dataclass
class Flipping(Hooks):
    """A bit of the first page of every pull of the victims flips on its way."""

    victims: tuple[tuple[int, ...], ...] = ()

    def _pull(self, start, orders) -> None:
        self._pulling.victim = start.ticket.token_ids in self.victims
        super()._pull(start, orders)

    def _plan(self, info) -> TransferFaults:
        return TransferFaults(bit_flips=(BitFlip(0, HEADER_BYTES + 70, 3),)) if self._is_victim() else TransferFaults()


@asynccontextmanager
async def flipping(subject: Subject, victims, **flags: object):
    """A cluster at its baseline when it is left, in which these requests meet a bit flip."""
    lab = EdgeLab(subject, **{key.replace("__", "."): value for key, value in flags.items()})
    lab.hooks = lab.inject = Flipping(victims=tuple(victims))
    try:
        await lab.start()
        yield lab
        await lab.require_quiet()
    finally:
        await lab.stop()


async def test_totals_are_exact_by_cause(subject):
    good = [subject.prompt(f"good {i}", 70) for i in range(10)]
    corrupt = [subject.prompt(f"corrupt {i}", 70) for i in range(2)]
    gone = [subject.prompt(f"gone {i}", 70) for i in range(3)]
    async with flipping(subject, corrupt, workers__max_running=16, cache__decode_pages=512) as lab:
        calls = [lab.call(p, max_tokens=1500, ignore_eos=True) for p in gone]
        readers = [asyncio.create_task(lab.read(call)) for call in calls]
        seen = await asyncio.gather(*(lab.see(p, max_tokens=20, ignore_eos=True) for p in [*good, *corrupt]))
        await lab.until(lambda: all(lab.decode_pages(p)[0] for p in gone), "the three are being answered")
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await lab.until(lambda: lab.decode.engine.facts().outcomes.get("cancelled") == 3, "all were told")
        assert [one.error is None for one in seen] == [True] * 10 + [False] * 2
        outcomes = lab.decode.engine.facts().outcomes
        assert {name: outcomes[name] for name in ("ok", "cancelled", "digest_mismatch")} == {
            "ok": 10, "cancelled": 3, "digest_mismatch": 2,
        }  # fmt: skip
        assert lab.decode.guard.counters["receipt_digest/digest_mismatch"] == 2


SIDES = list(itertools.product((8, 16, 32), (64, 100)))


@pytest.mark.parametrize(("prefill_side", "decode_side"), list(itertools.product(SIDES, SIDES)))
async def test_page_sizes_and_pool_sizes_of_both_ends(subject, prefill_side, decode_side):
    """Pools may differ in size; pages may not. What differs is refused before any page is taken."""
    (prefill_tokens, prefill_pages), (decode_tokens, decode_pages) = prefill_side, decode_side
    lab = Lab(subject, flags={"cache.page_tokens": decode_tokens, "cache.decode_pages": decode_pages},
              prefill_flags={"cache.page_tokens": prefill_tokens, "cache.prefill_pages": prefill_pages})  # fmt: skip
    try:
        await lab.start()
        prompt = subject.prompt("matrix", 70)
        reply = await lab.ask(prompt, 20)
        if prefill_tokens == decode_tokens:
            wanted = subject.answer(prompt, 20)
            assert (reply.error, reply.tokens) == (None, wanted.tokens)
        else:
            assert reply.error is not None
            assert reply.error.reason == "no_matching_layout"
            assert "page_tokens" in reply.error.message
            assert lab.prefill.engine.facts().steps == 0, "nothing was computed"
            assert reply.tokens == ()
        assert await lab.settled()
    finally:
        await lab.stop()


@pytest.mark.parametrize("ranks", [2, 4])
async def test_a_peer_that_is_one_of_several_ranks_is_refused_and_nobody_is_hurt(subject, ranks):
    """A worker is one rank. A prefill worker that says otherwise serves nobody, and the request says which field."""
    async with cluster(subject) as lab:
        victim = lab.subject.prompt("victim", 70)

        def told(start, message):
            if start.ticket.token_ids == victim and message.WhichOneof("event") == "accepted":
                one = lab.decode.guard.layout
                message.accepted.pool.layout = replace(one, tp_size=ranks, tp_rank=ranks - 1).canonical()
            return [message]

        lives = [worker.guard.incarnation for worker in (lab.prefill, lab.decode)]
        async with Neighbour(lab):
            lab.hooks.each_event = told
            seen = await lab.see(victim, max_tokens=4)
            assert isinstance(seen.error, LayoutMismatch)
            assert (seen.error.field, seen.tokens()) == ("layout.tp_rank", [])
            lab.hooks.each_event = None
        assert [worker.guard.incarnation for worker in (lab.prefill, lab.decode)] == lives
        await require_served(lab)


async def test_a_worker_whose_model_is_one_of_several_ranks_does_not_start(subject):
    class OneOfTwo:
        info = subject.model.info

        def layout(self, page_tokens, kv_format):
            return replace(subject.model.layout(page_tokens, kv_format), tp_size=2)

    worker = BuiltWorker(WorkerSpec(Role.PREFILL, "prefill-0", Lab(subject).config), WorkerTuning(model=OneOfTwo()))
    with pytest.raises(InvalidInput) as caught:
        await worker.start()
    assert (caught.value.reason, caught.value.field) == ("ranks_not_built", "layout.tp_size")
    await worker.stop(0)


async def test_a_worker_whose_steps_stand_still_is_not_ready_until_they_go_on(subject):
    async with cluster(subject, workers__stall_ms=400) as lab:
        await require_served(lab)
        lab.decode.engine.loop.freeze(True)
        try:
            await lab.until(lambda: not lab.gateway.state.fleet.serving(), "the gateway noticed")
            seen = await lab.see(lab.subject.prompt("frozen", 20), max_tokens=4)
            assert seen.error is not None
            assert seen.error.status == "UNAVAILABLE"
        finally:
            lab.decode.engine.loop.freeze(False)
        # Each answer of a worker makes another fleet.
        await lab.until(lambda: lab.gateway.state.fleet.serving() is True, "it is back")
        await require_served(lab)


async def test_a_bit_flip_is_seen_at_every_page_size(subject):
    """The fault table runs one; here the smallest."""
    lab = Lab(subject, flags={"cache.page_tokens": 8})
    try:
        await lab.start()
        seen = await bit_flip("payload")(lab)
        assert isinstance(seen.reply.error, CorruptPage)
        assert await lab.settled()
    finally:
        await lab.stop()
