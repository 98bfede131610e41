"""How handoffs end at prefill: releases, leases, cancellation, faults; over a real guard."""

from __future__ import annotations

import contextlib
import random

import pytest

from kvstore.errors import (
    CorruptPage,
    GenlockError,
    NoCapacity,
    NotFound,
    StalePage,
    Unavailable,
)
from kvstore.guard import Published
from kvstore.lifecycle import SlotState
from prefill.core import PrefillLimits
from tests.support.core_world import PrefillSide, computed
from tests.support.kv_world import Moments, T
from tests.support.prefill_prompts import prompt, require_right

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
