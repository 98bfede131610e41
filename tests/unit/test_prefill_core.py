"""Prefill's decisions over a real guard: admission, cache, leases, ends. Answers are computed by hand."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import (
    InvalidInput,
    NoCapacity,
    PageFault,
    PagePinned,
)
from kvstore.lifecycle import CACHE_OWNER
from prefill.core import PrefillCore, PrefillLimits
from tests.support.core_world import PrefillSide, Token, computed
from tests.support.kv_world import T, body, fill, slot_bytes_of
from tests.support.prefill_prompts import first_of, prompt, require_right

# --- submission and admission ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kind", "reason"),
    [
        ((), InvalidInput, "empty_prompt"),
        (prompt(0, 65), InvalidInput, "prompt_too_long"),
        (prompt(0, 4 * T + 1), NoCapacity, "prompt_over_pool"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_page_is_taken(tokens, kind, reason):
    side = PrefillSide(slots=4, limits=PrefillLimits(context_tokens=64))
    with pytest.raises(kind) as caught:
        side.submit(tokens)
    assert caught.value.reason == reason
    side.require_baseline()


def test_the_queue_and_the_leases_are_bounded():
    side = PrefillSide(limits=PrefillLimits(max_waiting=2))
    seqs = [side.submit(prompt(i, 3)) for i in range(2)]
    with pytest.raises(NoCapacity) as caught:
        side.submit(prompt(9, 3))
    assert caught.value.reason == "prefill_queue_full"
    for seq in seqs:
        side.core.cancel(seq.request_no)
    side.require_baseline()
    side = PrefillSide(limits=PrefillLimits(max_leases=1))
    seq = side.submit(prompt(0, 3))
    with pytest.raises(NoCapacity) as caught:
        side.submit(prompt(9, 3))
    assert caught.value.reason == "too_many_leases"
    side.run()
    side.core.release(seq.handoff_id)
    side.submit(prompt(9, 3))


def test_leases_are_told_the_oldest_first_with_how_far_each_is():
    side = PrefillSide(slots=8, limits=PrefillLimits(chunk_tokens=T, max_running=1, lease_ms=100))
    done = side.submit(prompt(0, 2 * T + 1))
    side.run()
    side.now = 30
    half, waits = side.submit(prompt(50, 2 * T)), side.submit(prompt(90, 1))
    side.step()
    side.core.renew(half.handoff_id, 40)
    told = side.core.oldest_leases(9, 50)
    assert [one.handoff_id for one in told] == [seq.handoff_id for seq in (done, half, waits)]
    assert {one.ticket_id for one in told} == {b"ticket-of-a-test"}
    facts = [(one.phase, one.pages, one.prompt_pages, one.age_ms, one.left_ms, one.renewals) for one in told]
    assert facts == [("completed", 3, 3, 50, 50, 0), ("prefill", 1, 2, 20, 90, 1), ("queued", 0, 1, 20, 80, 0)]
    assert [one.left_ms for one in side.core.oldest_leases(9, 1000)] == [0, 0, 0]
    assert side.core.oldest_leases(1, 50) == told[:1]
    for seq in (done, half, waits):
        side.core.cancel(seq.request_no)
    assert side.core.oldest_leases(9, 50) == ()
    side.core.evict_all()
    side.require_baseline()


def test_a_submission_that_fails_half_way_leaves_no_lease():
    side = PrefillSide()
    with pytest.raises(OverflowError):
        side.submit((1 << 70,))
    side.now = 1 << 30
    side.step()
    side.require_baseline()


def test_admission_is_all_or_nothing_and_in_order():
    side = PrefillSide(slots=4)
    big, late, small = side.submit(prompt(0, 3 * T)), side.submit(prompt(50, 2 * T)), side.submit(prompt(90, 1))
    side.step()
    # The second does not fit, so nobody overtakes it; and it holds nothing while it waits.
    assert (side.core.running, side.core.waiting) == (1, 2)
    assert side.guard.free_pages == 1
    side.run()
    side.core.release(big.handoff_id)
    side.core.evict_all()
    side.run()
    for seq in (big, late, small):
        require_right(side, seq)
    side.core.release(late.handoff_id)
    side.core.release(small.handoff_id)
    side.require_baseline()


def test_no_more_run_at_a_time_than_the_limit_says():
    side = PrefillSide(limits=PrefillLimits(max_running=2, chunk_tokens=4))
    for i in range(4):
        side.submit(prompt(20 * i, 12))
    side.step()
    assert (side.core.running, side.core.waiting) == (2, 2)


@pytest.mark.parametrize("tokens", [1, T - 1, T, T + 1, 2 * T, 3 * T + 2])
@pytest.mark.parametrize("chunk", [1, 3, T, 64])
def test_every_chunking_seals_the_same_pages(tokens, chunk):
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=chunk))
    seq = side.prefill(prompt(5, tokens), release=False)
    require_right(side, seq)
    whole = PrefillSide(limits=PrefillLimits(chunk_tokens=1000))
    other = whole.prefill(prompt(5, tokens), release=False)
    ours = [body(slot_bytes_of(side.guard, r.page_id)) for r in seq.pages.refs]
    assert ours == [body(slot_bytes_of(whole.guard, r.page_id)) for r in other.pages.refs]
    side.core.release(seq.handoff_id)
    side.require_baseline()


def test_pages_are_promised_as_soon_as_they_are_full():
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=T))
    seq = side.submit(prompt(0, 3 * T))
    for pages in (1, 2):
        side.step()
        assert len(side.sealed[seq.request_no]) == pages
        assert not seq.completed


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached_pages", [0, 1, 2, 3])
def test_a_prefix_hit_gives_the_same_handoff_as_a_cold_one(cached_pages):
    """Whatever part of the prompt was cached, pages, bytes and token are the same, and only the rest is computed."""
    ids = prompt(7, 3 * T + 2)
    side = PrefillSide()
    if cached_pages:
        side.prefill(ids[: cached_pages * T])
    seq = side.submit(ids)
    tokens = 0
    while (plan := side.step()) is not None:
        tokens += plan.tokens
    require_right(side, seq)
    assert seq.cached_tokens == cached_pages * T
    assert tokens == len(ids) - cached_pages * T
    cold = PrefillSide()
    other = cold.prefill(ids, release=False)
    for ours, theirs in zip(seq.pages.refs, other.pages.refs, strict=True):
        assert body(slot_bytes_of(side.guard, ours.page_id)) == body(slot_bytes_of(cold.guard, theirs.page_id))
    side.core.release(seq.handoff_id)
    side.require_baseline()


@pytest.mark.parametrize("tokens", [T, 2 * T, 2 * T + 1])
def test_never_the_whole_prompt_comes_from_the_cache(tokens):
    side = PrefillSide()
    side.prefill(prompt(1, tokens))
    seq = side.prefill(prompt(1, tokens), release=False)
    assert seq.cached_tokens == (tokens - 1) // T * T
    require_right(side, seq)


def test_another_tenant_shares_nothing():
    side = PrefillSide()
    side.prefill(prompt(1, 3 * T), tenant="one")
    assert side.prefill(prompt(1, 3 * T), tenant="other", release=False).cached_tokens == 0


def test_the_cache_is_bounded_and_says_nothing_when_off():
    side = PrefillSide(max_cached_pages=0)
    side.prefill(prompt(1, 3 * T))
    assert side.core.cached_pages == 0
    assert side.guard.free_pages == side.guard.slots
    side = PrefillSide(max_cached_pages=1)
    side.prefill(prompt(1, 3 * T))
    assert side.core.cached_pages == 1
    assert side.guard.free_pages == side.guard.slots - 1


def test_equal_prompts_in_one_step_cost_no_page_twice_in_the_cache():
    """Both compute, one of them is cached, each hands over its own pages; the other's go back."""
    side = PrefillSide()
    a, b = side.submit(prompt(1, 2 * T)), side.submit(prompt(1, 2 * T))
    side.run()
    require_right(side, a)
    require_right(side, b)
    assert not {r.page_id for r in a.pages.refs} & {r.page_id for r in b.pages.refs}
    assert side.core.cached_pages == 2
    side.core.release(b.handoff_id)
    side.core.release(a.handoff_id)
    assert side.used == 0
    side.require_baseline()


@pytest.mark.parametrize("when", ["waiting", "planned", "first chunk"])
def test_a_request_that_ends_before_its_pages_are_full_is_no_hit(when):
    """Two equal prompts at once; the first is aborted. The second is right, and so is everybody after it."""
    rng = random.Random(50)
    for round_no in range(50):
        # A small pool with neighbours, so that slots change hands in every round.
        side = PrefillSide(slots=7, limits=PrefillLimits(chunk_tokens=rng.choice((3, T, 2 * T))))
        side.prefill(prompt(100 + round_no, 2 * T + 1))
        ids = prompt(1, 2 * T + rng.randrange(1, T))
        first, second = side.submit(ids), side.submit(ids)
        if when == "waiting":
            side.core.cancel(first.request_no)
        elif when == "planned":
            plan, events = side.core.plan(side.now)
            side.take(events)
            side.core.cancel(first.request_no)
            side.take(side.core.apply(plan, computed(plan, side.guard), side.now))
        else:
            side.step()
            side.core.cancel(first.request_no)
        side.run()
        assert not side.failed
        require_right(side, second)
        side.core.release(second.handoff_id)
        third = side.prefill(ids, release=False)
        require_right(side, third)
        side.core.release(third.handoff_id)
        side.require_baseline()


def test_a_page_whose_bytes_rotted_in_the_cache_is_a_miss():
    side = PrefillSide()
    first = side.prefill(prompt(1, 3 * T))
    fill(side.guard, first.pages.refs[1], [99.0])
    seq = side.prefill(prompt(1, 3 * T), release=False)
    assert seq.cached_tokens == T, "the page before the rotten one is still good"
    assert side.guard.counters["cache_rotten"] == 1
    require_right(side, seq)
    side.core.release(seq.handoff_id)
    side.require_baseline()


def test_a_page_whose_header_rotted_in_the_cache_is_a_miss():
    side = PrefillSide()
    first = side.prefill(prompt(1, 3 * T))
    side.guard._pool.slots_SU8[first.pages.refs[0].page_id, :40] = 255
    seq = side.prefill(prompt(1, 3 * T), release=False)
    assert seq.cached_tokens == 0
    require_right(side, seq)


@pytest.mark.parametrize("rot", ["bytes", "header"])
def test_control_without_the_look_a_rotten_page_would_be_promised(monkeypatch, rot):
    """To the next prompt, as if it held what was sealed; only decode's receipt would be left to notice."""
    monkeypatch.setattr(PrefillCore, "_holds_what_was_sealed", lambda self, ref: True)
    side = PrefillSide()
    ids = prompt(1, 3 * T)
    first = side.prefill(ids)
    rotten = first.pages.refs[1]
    if rot == "bytes":
        fill(side.guard, rotten, [99.0])
    else:
        side.guard._pool.slots_SU8[rotten.page_id, 40] ^= 1
    seq = side.prefill(ids, release=False)
    assert seq.cached_tokens == 2 * T
    promised = side.sealed[seq.request_no][1]
    assert promised.ref == rotten
    with pytest.raises((AssertionError, PageFault)):
        assert side.guard.describe(rotten, 1) == promised
    if rot == "bytes":
        assert side.done[seq.request_no].first != Token(first_of(ids)), "and prefill's own token is wrong"


def test_an_entry_whose_page_has_moved_on_is_a_miss_and_never_data():
    side = PrefillSide()
    first = side.prefill(prompt(1, 3 * T))
    side.guard.retire((first.pages.refs[0],), CACHE_OWNER)
    stolen = side.guard.allocate(77, 1)
    fill(side.guard, stolen[0], [50.0] * T)
    seq = side.prefill(prompt(1, 3 * T), release=False)
    assert seq.cached_tokens == 0
    require_right(side, seq)
    side.guard.retire(stolen, 77)


# --- eviction -------------------------------------------------------------------------------------------------------


def test_eviction_takes_the_oldest_that_nobody_uses():
    side = PrefillSide(slots=6)
    old, young = prompt(1, 2 * T), prompt(40, 2 * T)
    side.prefill(old)
    side.prefill(young)
    side.prefill(prompt(80, 3 * T))
    assert side.prefill(young).cached_tokens == T, "the younger prompt is still there"


def test_eviction_never_touches_pages_that_are_promised_and_not_yet_sent():
    """A prompt is complete and waits to be pulled; the pool runs dry; a page that was promised must not go."""
    side = PrefillSide(slots=5)
    promised = side.prefill(prompt(1, 3 * T), release=False)
    late = side.submit(prompt(50, 3 * T))
    side.run()
    assert not late.completed, "it waits: nothing may be evicted"
    assert side.core.evict_all() == 0
    require_right(side, promised)
    assert all(side.guard.is_live(ref) for ref in promised.pages.refs)
    side.core.release(promised.handoff_id)
    side.run()
    require_right(side, late)
    assert side.core.cached_pages <= side.guard.slots


def test_eviction_never_touches_a_prefix_that_a_running_request_reads():
    side = PrefillSide(slots=6, limits=PrefillLimits(chunk_tokens=T))
    side.prefill(prompt(1, 2 * T))
    reader = side.submit(prompt(1, 4 * T))
    side.step()
    assert reader.cached_tokens == 2 * T
    waiting = side.submit(prompt(60, 3 * T))
    side.run()
    require_right(side, reader)
    assert not waiting.completed
    side.core.release(reader.handoff_id)
    side.run()
    require_right(side, waiting)


def test_eviction_spares_the_hits_of_the_request_that_it_makes_room_for():
    side = PrefillSide(slots=5)
    side.prefill(prompt(1, 2 * T))  # oldest, and needed
    side.prefill(prompt(50, 2 * T))
    seq = side.prefill(prompt(1, 4 * T), release=False)
    assert seq.cached_tokens == 2 * T
    require_right(side, seq)


def test_without_pins_a_promised_page_would_be_evicted():
    """The control: the retire that eviction tries is what refuses."""
    side = PrefillSide(slots=5)
    promised = side.prefill(prompt(1, 3 * T), release=False)
    with pytest.raises(PagePinned):
        side.guard.retire((promised.pages.refs[0],), CACHE_OWNER)
