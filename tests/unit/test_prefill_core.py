"""Prefill's decisions over a real guard: admission, cache, leases, ends. Answers are computed by hand."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvstore.errors import (
    CorruptPage,
    GenlockError,
    InvalidInput,
    NoCapacity,
    NotFound,
    PagePinned,
    StalePage,
    Unavailable,
)
from kvstore.guard import Published
from kvstore.lifecycle import CACHE_OWNER, SlotState
from prefill.core import PrefillLimits
from tests.support.core_world import PrefillSide, Token, computed, next_token
from tests.support.kv_world import Moments, T, body, fill, slot_bytes_of, values_of


def prompt(start: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(start, start + tokens))


def first_of(ids) -> int:
    return next_token(sum(ids) / len(ids), len(ids))


def require_right(side: PrefillSide, seq) -> None:
    """The handoff promises exactly the prompt's pages, each holds the prompt's own values, and the token is right."""
    ids = seq.ticket.token_ids
    done = side.done[seq.request_no]
    descs = sorted(side.sealed[seq.request_no], key=lambda d: d.logical_index)
    assert done.page_count == len(descs) == -(-len(ids) // T)
    assert [d.logical_index for d in descs] == list(range(len(descs)))
    for desc in descs:
        at = desc.logical_index * T
        rows = ids[at : at + T]
        assert (desc.first_position, desc.valid_rows, desc.prefix_key) == (at, len(rows), seq.keys[desc.logical_index])
        if side.guard.is_live(desc.ref):
            assert values_of(side.guard, desc.ref.page_id)[: len(rows)] == [float(t) for t in rows]
    assert done.first == Token(first_of(ids))


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


# --- releases and leases --------------------------------------------------------------------------------------------


def test_a_suspect_release_condemns_for_every_sharer_and_drops_the_index():
    """Three requests share a page; one of them found it bad. The others fail, and a fourth is computed anew."""
    side = PrefillSide(slots=16, limits=PrefillLimits(chunk_tokens=4, max_running=4))
    ids = prompt(1, 2 * T)
    side.prefill(ids)
    waiting_to_be_pulled = side.prefill((*ids, 30), release=False)
    running = side.submit((*ids, *prompt(31, 3 * T)))
    blamer = side.submit((*ids, 35))
    side.step()
    assert waiting_to_be_pulled.cached_tokens == running.cached_tokens == blamer.cached_tokens == 2 * T
    shared = waiting_to_be_pulled.pages.refs[:2]
    assert running.pages.refs[:2] == blamer.pages.refs[:2] == shared
    side.core.release(blamer.handoff_id, suspect=True)
    assert not any(side.guard.is_live(ref) for ref in shared)
    states = {side.guard.slot_state(ref.page_id) for ref in shared}
    assert states == {SlotState.QUARANTINED}, "others still count on them"
    side.run()
    assert isinstance(side.failed[running.request_no], StalePage)
    fourth = side.prefill((*ids, 36), release=False)
    assert fourth.cached_tokens == 0
    require_right(side, fourth)
    side.core.release(fourth.handoff_id)
    side.core.release(waiting_to_be_pulled.handoff_id)
    side.require_baseline()


def test_a_release_that_is_not_suspect_keeps_the_pages_in_the_cache():
    side = PrefillSide()
    side.prefill(prompt(1, 2 * T))
    assert side.core.cached_pages == 2
    assert side.used == 0


def test_a_kernels_surprise_ends_its_row_and_no_sharer():
    """No page is to blame: the pages that the failed row shares stay with their other readers."""
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=2 * T))
    ids = prompt(1, 2 * T)
    side.prefill(ids)
    other, bad = side.submit((*ids, *prompt(40, 3))), side.submit((*ids, *prompt(60, 3)))
    plan, events = side.core.plan(side.now)
    side.take(events)
    good = {p.request_no: p for p in computed(plan, side.guard)}
    error = GenlockError("step_failed", "a kernel raised")
    results = [Published(bad.request_no, None, error) if r.request_no == bad.request_no else good[r.request_no]
               for r in plan.rows]  # fmt: skip
    side.take(side.core.apply(plan, results, side.now))
    assert side.failed == {bad.request_no: error}
    require_right(side, other)
    assert all(side.guard.is_live(ref) for ref in other.pages.refs)
    side.core.release(other.handoff_id)
    side.require_baseline()


@pytest.mark.parametrize("kind", [StalePage, CorruptPage])
def test_a_page_fault_takes_the_page_from_everybody(kind):
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=2 * T))
    ids = prompt(1, 2 * T)
    side.prefill(ids)
    bad = side.submit((*ids, 60))
    plan, events = side.core.plan(side.now)
    side.take(events)
    side.take(side.core.apply(plan, [Published(bad.request_no, None, kind("bad"))], side.now))
    assert side.core.cached_pages == 0
    assert side.prefill((*ids, 61)).cached_tokens == 0
    side.require_baseline()


@pytest.mark.parametrize("phase", ["waiting", "running", "completed"])
def test_a_lease_ends_by_time_only_when_the_prompt_is_complete(phase):
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=T, lease_ms=100))
    seq = side.submit(prompt(1, 3 * T))
    if phase != "waiting":
        side.step()
    if phase == "completed":
        side.run()
    side.now = 10_000
    failed = side.core.expire(side.now)
    if phase == "completed":
        assert [f.request_no for f in failed] == [seq.request_no]
        assert isinstance(failed[0].error, Unavailable)
        assert failed[0].error.reason == "lease_expired"
        with pytest.raises(NotFound):
            side.core.release(seq.handoff_id)
        assert side.core.expire(side.now) == []
    else:
        assert failed == []
        side.run()
        require_right(side, seq)
        assert side.core.expire(side.now + 99) == []
        assert len(side.core.expire(side.now + 100)) == 1, "from its completion on the clock runs"
    side.require_baseline()


def test_an_expired_lease_leaves_good_pages_in_the_cache():
    side = PrefillSide(limits=PrefillLimits(lease_ms=100))
    side.prefill(prompt(1, 2 * T), release=False)
    side.core.expire(100)
    assert side.core.cached_pages == 2


def test_renewal_moves_the_end():
    side = PrefillSide(limits=PrefillLimits(lease_ms=100))
    seq = side.prefill(prompt(1, 5), release=False)
    for now in (90, 180, 270):
        side.core.renew(seq.handoff_id, now)
        assert side.core.expire(now + 99) == []
    assert len(side.core.expire(370)) == 1


@pytest.mark.parametrize("which", ["unknown", "released", "expired", "cancelled", "failed"])
def test_ids_that_are_not_live_are_not_found_and_change_nothing(which):
    side = PrefillSide(limits=PrefillLimits(lease_ms=100))
    neighbour = side.prefill(prompt(50, 5), release=False)
    handoff_id = b"never given out."
    if which != "unknown":
        seq = side.prefill(prompt(1, 5), release=False)
        handoff_id = seq.handoff_id
    if which == "released":
        side.core.release(handoff_id)
    elif which == "expired":
        side.core.renew(neighbour.handoff_id, 100)
        side.core.expire(100)
    elif which == "cancelled":
        side.core.cancel(seq.request_no)
    elif which == "failed":
        side.core.release(handoff_id, suspect=True)
    before = (side.guard.counts(), len(side.core.leases), side.core.cached_pages)
    for _ in range(2):
        for suspect in (False, True):
            with pytest.raises(NotFound):
                side.core.release(handoff_id, suspect=suspect)
        with pytest.raises(NotFound):
            side.core.renew(handoff_id, 0)
    assert (side.guard.counts(), len(side.core.leases), side.core.cached_pages) == before
    require_right(side, neighbour)


def test_a_release_while_it_still_computes_ends_the_compute():
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=T))
    seq = side.submit(prompt(1, 4 * T))
    side.step()
    assert side.core.release(seq.handoff_id) == seq.request_no
    assert side.step() is None
    side.require_baseline()


# --- cancellation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_cancel_at_every_step_gives_every_page_back(steps, cached):
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=3))
    if cached:
        side.prefill(prompt(1, T))
    seq = side.submit(prompt(1, 3 * T + 1))
    neighbour = side.submit(prompt(60, 2 * T))
    for _ in range(steps):
        side.step()
    assert side.core.cancel(seq.request_no)
    assert not side.core.cancel(seq.request_no)
    side.run()
    assert seq.request_no not in side.failed
    require_right(side, neighbour)
    side.core.release(neighbour.handoff_id)
    assert side.used == 0
    side.require_baseline()


def test_cancel_while_the_step_computes_gives_every_page_back():
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=64))
    seq, neighbour = side.submit(prompt(1, 2 * T)), side.submit(prompt(60, 2 * T))
    plan, events = side.core.plan(0)
    side.take(events)
    published = computed(plan, side.guard, Moments(before_attend=lambda: side.core.cancel(seq.request_no) and None))
    side.take(side.core.apply(plan, published, 0))
    assert seq.request_no not in side.done
    require_right(side, neighbour)
    side.core.release(neighbour.handoff_id)
    side.require_baseline()


def test_a_step_fault_of_one_row_spares_the_others():
    side = PrefillSide(limits=PrefillLimits(chunk_tokens=64))
    bad, good = side.submit(prompt(1, 2 * T)), side.submit(prompt(60, 2 * T))

    def steal() -> None:
        ref = bad.pages.refs[0]
        side.guard.condemn((ref,))

    side.step(Moments(before_attend=steal))
    assert isinstance(side.failed[bad.request_no], StalePage)
    require_right(side, good)
    side.core.release(good.handoff_id)
    side.require_baseline()


# --- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_random_lives_end_at_the_baseline(seed):
    """Shared prefixes, cancels, releases, suspects, expiries, in a pool that is too small: what completes is right."""
    rng = random.Random(seed)
    side = PrefillSide(slots=10, limits=PrefillLimits(chunk_tokens=5, max_running=3, lease_ms=50, max_waiting=6))
    live: list = []
    finished = 0
    for _ in range(250):
        side.now += rng.randrange(4)
        act = rng.random()
        if act < 0.3:
            base = rng.choice((1, 1, 1, 40))
            ids = (*prompt(base, rng.randrange(1, 3 * T)), rng.randrange(100, 104))
            with contextlib.suppress(NoCapacity):
                live.append(side.submit(ids, tenant=rng.choice("ab")))
        elif act < 0.6 and live:
            seq = live.pop(rng.randrange(len(live)))
            kind = rng.random()
            with contextlib.suppress(NotFound):
                if kind < 0.3:
                    side.core.cancel(seq.request_no)
                else:
                    side.core.release(seq.handoff_id, suspect=kind >= 0.9)
        before = set(side.done)
        side.step()
        for number in set(side.done) - before:
            finished += 1
            seq = side.core.sequence(number)
            require_right(side, seq)
        assert side.guard.counts().total == 10
    assert finished > 10
    for seq in live:
        side.core.cancel(seq.request_no)
    side.require_baseline()
