"""The book of a pool: all or nothing, and no name but a live ref opens a page."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.allocator import MAX_SLOTS, PageAllocator
from kvstore.checks import ALL_CHECKS
from kvstore.errors import GenlockError, InvalidInput, LifecycleError, NoCapacity, PagePinned, StalePage
from kvstore.ids import MAX_GENERATION, PageRef, Tag
from kvstore.lifecycle import CACHE_OWNER, NOBODY, Slot, SlotState

INC, OWNER, OTHER = 11, 5, 6


def book(slots: int = 6) -> PageAllocator:
    return PageAllocator(slots, INC)


def snapshot(b: PageAllocator) -> tuple[object, ...]:
    return ([b.slot(i) for i in range(len(b))], list(b._free), b.counts())


def refused(b: PageAllocator, kind: type[GenlockError], call: Callable[[], object], reason: str = "") -> None:
    before = snapshot(b)
    with pytest.raises(kind) as caught:
        call()
    assert not reason or caught.value.reason == reason
    assert snapshot(b) == before, "a refusal changed something"


CALLS: dict[str, Callable[[PageAllocator, list[PageRef]], object]] = {
    "share": lambda b, refs: b.share(refs),
    "lease": lambda b, refs: b.lease(refs),
    "hold": lambda b, refs: b.hold(refs),
    "unshare": lambda b, refs: b.unshare(refs),
    "release": lambda b, refs: b.release(refs),
    "prove": lambda b, refs: b.prove(refs),
    "retire": lambda b, refs: b.retire(refs, OWNER),
    "require_open": lambda b, refs: b.require_open(refs, OWNER),
    "claim": lambda b, refs: b.claim(refs, OWNER),
    "seal": lambda b, refs: [b.seal(ref, OWNER) for ref in refs[-1:]],
}


def ready(call: str) -> tuple[PageAllocator, list[PageRef]]:
    """A book in which `call` is allowed for the returned two refs."""
    b = book()
    refs = list(b.allocate(OWNER, 2))
    if call in ("share", "lease", "unshare", "release"):
        for ref in refs:
            b.seal(ref, OWNER)
    if call == "unshare":
        b.share(refs)
    if call == "release":
        b.lease(refs)
    if call == "prove":
        b.hold(refs)
    return b, refs


def misnamed(b: PageAllocator, good: PageRef) -> dict[str, PageRef]:
    """Refs that are not `good`, though each resembles it."""
    page, (inc, gen) = good
    return {
        "negative": PageRef(page - len(b), good.tag),
        "beyond": PageRef(len(b), good.tag),
        "far": PageRef(1 << 40, good.tag),
        "older": PageRef(page, Tag(inc, gen - 2)),
        "newer": PageRef(page, Tag(inc, gen + 2)),
        "freed_generation": PageRef(page, Tag(inc, gen + 1)),
        "wrong_incarnation": PageRef(page, Tag(inc + 1, gen)),
        "no_tag": PageRef(page, Tag(0, 0)),
        "other_slot": PageRef(5, good.tag),
    }


@pytest.mark.parametrize("bad", list(misnamed(book(), PageRef(0, Tag(INC, 3)))))
@pytest.mark.parametrize("call", list(CALLS))
def test_a_misnamed_page_changes_nothing_not_even_its_neighbours(call: str, bad: str) -> None:
    b, refs = ready(call)
    wrong = misnamed(b, refs[1])[bad]
    refused(b, GenlockError, lambda: CALLS[call](b, [refs[0], wrong]))
    refused(b, GenlockError, lambda: CALLS[call](b, [wrong]))
    assert not b.is_live(wrong)
    assert not b.condemn(wrong)
    CALLS[call](b, refs)  # the right names still work


@pytest.mark.parametrize("call", list(CALLS))
def test_a_ref_of_a_former_life_is_refused_in_the_next_one(call: str) -> None:
    b, refs = ready("retire")
    b.retire(refs, OWNER)
    again = b.allocate(OWNER, 2)
    assert {r.page_id for r in again} == {r.page_id for r in refs}
    for ref in again:
        if call in ("share", "lease", "unshare", "release"):
            b.seal(ref, OWNER)
    refused(b, StalePage, lambda: CALLS[call](b, refs), "stale_ref")


def test_a_free_slot_has_no_name() -> None:
    b = book()
    name = PageRef(0, b.live_tag(0))
    assert not b.is_live(name)
    assert not b.condemn(name)
    for call in ("share", "lease", "hold", "unshare", "release", "prove"):
        refused(b, StalePage, lambda call=call: CALLS[call](b, [name]))  # type: ignore[misc]
    refused(b, LifecycleError, lambda: b.retire([name], NOBODY), "double_free")
    refused(b, GenlockError, lambda: b.seal(name, NOBODY))


@pytest.mark.parametrize("page_id", [-1, -6, 6, 1 << 30])
def test_reports_refuse_pages_outside_the_pool(page_id: int) -> None:
    for call in (book().slot, book().live_tag):
        with pytest.raises(InvalidInput) as caught:
            call(page_id)
        assert caught.value.field == "page_id"


def test_allocate_is_all_or_nothing() -> None:
    b = book(3)
    b.allocate(OWNER, 2)
    refused(b, NoCapacity, lambda: b.allocate(OTHER, 2), "no_pages")
    refused(b, InvalidInput, lambda: b.allocate(OTHER, -1), "bad_allocation")
    refused(b, InvalidInput, lambda: b.allocate(NOBODY, 1), "bad_allocation")
    assert b.allocate(OTHER, 0) == ()


def test_a_slot_whose_generations_are_used_up_stays_out_and_costs_nobody_else() -> None:
    b = book(2)
    b._slots[1] = Slot(generation=MAX_GENERATION - 4)
    refs = b.allocate(OWNER, 2)
    b.retire(refs, OWNER)
    assert b.counts().quarantined == 1
    assert b.counts().total == 2
    assert len(b.allocate(OWNER, 1)) == 1
    refused(b, NoCapacity, lambda: b.allocate(OWNER, 1))


@pytest.mark.parametrize("bad", ["pinned", "foreign", "twice", "free", "stale", "quarantined"])
@pytest.mark.parametrize("first", [True, False])
def test_retire_is_all_or_nothing(bad: str, first: bool) -> None:
    b = book()
    good, odd = b.allocate(OWNER, 2)
    if bad == "pinned":
        b.seal(odd, OWNER)
        b.share([odd])
    elif bad == "foreign":
        (odd,) = b.allocate(OTHER, 1)
    elif bad == "twice":
        odd = good
    elif bad == "free":
        b.retire([odd], OWNER)
    elif bad == "quarantined":
        b.hold([odd])
        b.retire([odd], OWNER)
    else:
        odd = PageRef(odd.page_id, Tag(INC, odd.tag.generation + 2))
    kind, reason = {
        "pinned": (PagePinned, "page_pinned"),
        "foreign": (LifecycleError, "not_owner"),
        "twice": (LifecycleError, "double_free"),
        "free": (LifecycleError, "double_free"),
        "quarantined": (LifecycleError, "double_free"),
        "stale": (StalePage, "stale_ref"),
    }[bad]
    refused(b, kind, lambda: b.retire([odd, good] if first else [good, odd], OWNER), reason)
    assert b.is_live(good)


def test_retire_takes_an_iterator_and_frees_every_page() -> None:
    b = book()
    b.retire(iter(b.allocate(OWNER, 6)), OWNER)
    assert b.counts().free == 6


@pytest.mark.parametrize(("take", "end", "field"), [
    ("share", "unshare", "shares"), ("lease", "release", "leases"), ("hold", "prove", "holds"),
])  # fmt: skip
def test_counts_are_taken_and_ended_all_or_none(take: str, end: str, field: str) -> None:
    b = book()
    one, two = b.allocate(OWNER, 2)
    (open_page,) = b.allocate(OTHER, 1)
    for ref in (one, two):
        b.seal(ref, OWNER)
    CALLS[take](b, [one, two, one])  # one call may count a page twice
    assert [getattr(b.slot(r.page_id), field) for r in (one, two)] == [2, 1]
    refused(b, LifecycleError, lambda: CALLS[end](b, [one, two, two]))
    refused(b, LifecycleError, lambda: CALLS[end](b, [one, open_page]))
    if take != "hold":
        refused(b, LifecycleError, lambda: CALLS[take](b, [one, open_page]), "not_sealed")
    CALLS[end](b, [one, one, two])
    refused(b, LifecycleError, lambda: CALLS[end](b, [one]))


def test_counts_end_in_quarantine_and_the_last_one_frees() -> None:
    b = book()
    (ref,) = b.allocate(OWNER, 1)
    b.seal(ref, OWNER)
    b.share([ref])
    b.lease([ref])
    b.hold([ref])
    assert b.condemn(ref)
    assert not b.condemn(ref)
    refused(b, StalePage, lambda: b.share([ref]))
    for end in (b.unshare, b.prove):
        end([ref])
        assert b.slot(ref.page_id).state is SlotState.QUARANTINED
    quarantine_name = PageRef(ref.page_id, b.live_tag(ref.page_id))
    refused(b, StalePage, lambda: b.release([quarantine_name]))
    b.release([ref])
    assert b.slot(ref.page_id).state is SlotState.FREE
    refused(b, StalePage, lambda: b.release([ref]))


def test_cache_pages_belong_to_the_cache() -> None:
    b = book()
    (ref,) = b.allocate(OWNER, 1)
    b.seal(ref, OWNER, keep_in_cache=True)
    refused(b, LifecycleError, lambda: b.retire([ref], OWNER), "not_owner")
    b.retire([ref], CACHE_OWNER)
    assert b.counts().free == 6


@pytest.mark.parametrize("case", ["foreign", "sealed", "held", "twice"])
def test_only_quiet_open_pages_of_the_owner_are_claimed(case: str) -> None:
    b = book()
    good, odd = b.allocate(OWNER, 2)
    owner, refs = OWNER, [good, odd]
    if case == "foreign":
        owner = OTHER
    elif case == "sealed":
        b.seal(odd, OWNER)
    elif case == "held":
        b.hold([odd])
    else:
        refs = [good, odd, good]
    reason = {"foreign": "not_owner", "sealed": "not_open", "held": "page_busy", "twice": "page_busy"}[case]
    refused(b, LifecycleError, lambda: b.claim(refs, owner), reason)
    b.claim([good], OWNER)
    assert b.slot(good.page_id).holds == 1


def test_many_seals_are_one_seal_after_the_other_and_spares_are_no_pages_of_the_pool() -> None:
    one, many = (PageAllocator(4, INC, spares=1) for _ in range(2))
    for b in (one, many):
        b.allocate(OWNER, 3)
    refs = [PageRef(page_id, one.live_tag(page_id)) for page_id in (0, 1)]
    spare = one.allocate_spare(OWNER)
    assert many.allocate_spare(OWNER) == spare
    for ref in (*refs, spare):
        one.seal(ref, OWNER)
    many.seal_many([*refs, spare])
    assert [many.slot(i) for i in range(5)] == [one.slot(i) for i in range(5)]
    assert many.counts() == one.counts()
    assert (many.counts().open, many.counts().sealed) == (1, 2)


HISTORIES: dict[str, Callable[[PageAllocator], object]] = {
    "untouched": lambda b: None,
    "open": lambda b: b.allocate(OWNER, 1),
    "foreign": lambda b: b.allocate(OTHER, 1),
    "held": lambda b: b.hold(b.allocate(OWNER, 1)),
    "sealed": lambda b: b.seal(b.allocate(OWNER, 1)[0], OWNER),
    "freed": lambda b: b.retire(b.allocate(OWNER, 1), OWNER),
    "freed and the owner's again": lambda b: (b.retire(b.allocate(OWNER, 1), OWNER), b.allocate(OWNER, 1)),
    "in quarantine": lambda b: (b.hold(refs := b.allocate(OWNER, 1)), b.retire(refs, OWNER)),
}


@pytest.mark.parametrize("history", list(HISTORIES))
def test_one_claim_is_the_claim_of_one_page_whatever_names_it(history: str) -> None:
    names = [
        PageRef(page_id, Tag(incarnation, generation))
        for page_id in (-1, 0, 1, 2)
        for incarnation in (INC, INC + 1)
        for generation in range(1, 8)
    ]
    taken = 0
    for ref in names:
        for owner in (OWNER, OTHER, NOBODY):
            one, many = book(1), book(1)
            HISTORIES[history](one)
            HISTORIES[history](many)
            before = snapshot(one)
            try:
                many.claim([ref], owner)
            except GenlockError:
                assert not one.claim_one(ref, owner), (ref, owner)
                assert snapshot(one) == before
                continue
            taken += 1
            assert one.claim_one(ref, owner), (ref, owner)
            assert snapshot(one) == snapshot(many)
            one.unclaim([ref])
            many.prove([ref])
            assert snapshot(one) == snapshot(many) == before
    assert taken == (history in ("open", "foreign", "freed and the owner's again"))


@pytest.mark.parametrize("gone", ["retired", "condemned", "sealed"])
def test_a_claim_ends_whatever_became_of_its_page(gone: str) -> None:
    b = book(1)
    (ref,) = b.allocate(OWNER, 1)
    assert b.claim_one(ref, OWNER)
    if gone == "sealed":
        b.seal(ref, OWNER)
    elif gone == "condemned":
        assert b.condemn(ref)
    else:
        b.retire([ref], OWNER)
    assert b.slot(0).holds == 1
    b.unclaim([ref])
    assert b.slot(0).holds == 0
    assert b.slot(0).state is (SlotState.SEALED if gone == "sealed" else SlotState.FREE)


def test_without_quarantine_a_proof_that_comes_too_late_ends_nothing() -> None:
    b = PageAllocator(1, INC, checks=ALL_CHECKS.without("quarantine"))
    (ref,) = b.allocate(OWNER, 1)
    b.hold([ref])
    b.retire([ref], OWNER)
    (next_ref,) = b.allocate(OTHER, 1)  # the negative control: the slot is given away under the engine
    b.hold([next_ref])
    b.prove([ref])
    assert b.slot(next_ref.page_id).holds == 1


def test_without_tags_that_move_a_page_is_still_condemned_once() -> None:
    b = PageAllocator(1, INC, checks=ALL_CHECKS.without("tag_bump"))
    (ref,) = b.allocate(OWNER, 1)
    b.hold([ref])
    assert b.condemn(ref)
    assert not b.condemn(ref)  # the negative control: its old name still looks alive
    b.prove([ref])
    assert not b.condemn(ref)
    assert b.is_live(ref)


@pytest.mark.parametrize(("slots", "incarnation", "field"), [
    (0, 1, "pool.slots"), (-1, 1, "pool.slots"), (MAX_SLOTS + 1, 1, "pool.slots"),
    (1, 0, "pool.incarnation"), (1, -1, "pool.incarnation"), (1, 1 << 63, "pool.incarnation"),
])  # fmt: skip
def test_impossible_pools_are_refused(slots: int, incarnation: int, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        PageAllocator(slots, incarnation)
    assert caught.value.field == field
