"""The life of a slot: every state and event against an explicit table, then random histories against a shadow book."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.allocator import PageAllocator
from kvstore.checks import ALL_CHECKS
from kvstore.errors import LifecycleError, NoCapacity, PagePinned, StalePage
from kvstore.ids import MAX_GENERATION, PageRef, Tag
from kvstore.lifecycle import NOBODY, TABLE, Slot, SlotEvent, SlotState, apply_event

S, E = SlotState, SlotEvent
OWNER = 7

START = {
    S.FREE: Slot(),
    S.OPEN: Slot(S.OPEN, 3, OWNER),
    S.SEALED: Slot(S.SEALED, 3, OWNER),
    S.QUARANTINED: Slot(S.QUARANTINED, 4, NOBODY, shares=1, leases=1, holds=1),
}

# What each event makes of the slots above: the next slot, or the reason of the refusal.
EXPECTED: dict[tuple[SlotState, SlotEvent], Slot | str] = {
    (S.FREE, E.ALLOCATE): Slot(S.OPEN, 3, OWNER),
    (S.FREE, E.SEAL): "not_allowed",
    (S.FREE, E.SHARE): "not_allowed",
    (S.FREE, E.UNSHARE): "not_allowed",
    (S.FREE, E.LEASE): "not_allowed",
    (S.FREE, E.RELEASE): "not_allowed",
    (S.FREE, E.HOLD): "not_allowed",
    (S.FREE, E.PROVE): "not_allowed",
    (S.FREE, E.RETIRE): "double_free",
    (S.FREE, E.CONDEMN): "not_allowed",
    (S.OPEN, E.ALLOCATE): "already_owned",
    (S.OPEN, E.SEAL): Slot(S.SEALED, 3, OWNER),
    (S.OPEN, E.SHARE): "not_sealed",
    (S.OPEN, E.UNSHARE): "not_allowed",
    (S.OPEN, E.LEASE): "not_sealed",
    (S.OPEN, E.RELEASE): "not_allowed",
    (S.OPEN, E.HOLD): Slot(S.OPEN, 3, OWNER, holds=1),
    (S.OPEN, E.PROVE): "no_hold",
    (S.OPEN, E.RETIRE): Slot(S.FREE, 4),
    (S.OPEN, E.CONDEMN): Slot(S.FREE, 4),
    (S.SEALED, E.ALLOCATE): "already_owned",
    (S.SEALED, E.SEAL): "already_sealed",
    (S.SEALED, E.SHARE): Slot(S.SEALED, 3, OWNER, shares=1),
    (S.SEALED, E.UNSHARE): "no_share",
    (S.SEALED, E.LEASE): Slot(S.SEALED, 3, OWNER, leases=1),
    (S.SEALED, E.RELEASE): "no_lease",
    (S.SEALED, E.HOLD): Slot(S.SEALED, 3, OWNER, holds=1),
    (S.SEALED, E.PROVE): "no_hold",
    (S.SEALED, E.RETIRE): Slot(S.FREE, 4),
    (S.SEALED, E.CONDEMN): Slot(S.FREE, 4),
    (S.QUARANTINED, E.ALLOCATE): "in_quarantine",
    (S.QUARANTINED, E.SEAL): "not_allowed",
    (S.QUARANTINED, E.SHARE): "not_allowed",
    (S.QUARANTINED, E.UNSHARE): Slot(S.QUARANTINED, 4, NOBODY, shares=0, leases=1, holds=1),
    (S.QUARANTINED, E.LEASE): "not_allowed",
    (S.QUARANTINED, E.RELEASE): Slot(S.QUARANTINED, 4, NOBODY, shares=1, leases=0, holds=1),
    (S.QUARANTINED, E.HOLD): "not_allowed",
    (S.QUARANTINED, E.PROVE): Slot(S.QUARANTINED, 4, NOBODY, shares=1, leases=1, holds=0),
    (S.QUARANTINED, E.RETIRE): "double_free",
    (S.QUARANTINED, E.CONDEMN): "not_allowed",
}


def test_the_table_names_every_pair() -> None:
    assert set(EXPECTED) == {(state, event) for state in S for event in E}
    assert {pair for pair, outcome in EXPECTED.items() if isinstance(outcome, Slot)} | {
        (S.OPEN, E.PROVE), (S.SEALED, E.UNSHARE), (S.SEALED, E.RELEASE), (S.SEALED, E.PROVE)
    } == set(TABLE)  # fmt: skip


@pytest.mark.parametrize(("state", "event"), list(EXPECTED), ids=lambda x: x.value)
def test_every_state_and_event(state: SlotState, event: SlotEvent) -> None:
    wanted = EXPECTED[state, event]
    if isinstance(wanted, Slot):
        assert apply_event(START[state], event, OWNER) == wanted
        return
    with pytest.raises(LifecycleError) as caught:
        apply_event(START[state], event, OWNER)
    assert caught.value.reason == wanted


@pytest.mark.parametrize("event", [E.RETIRE, E.CONDEMN])
@pytest.mark.parametrize("state", [S.OPEN, S.SEALED])
def test_a_held_page_that_is_given_up_waits_for_proof(state: SlotState, event: SlotEvent) -> None:
    gone = apply_event(START[state]._replace(holds=2), event)
    assert gone == Slot(S.QUARANTINED, 4, NOBODY, holds=2)
    once = apply_event(gone, E.PROVE)
    assert once.state is S.QUARANTINED
    assert apply_event(once, E.PROVE) == Slot(S.FREE, 4)


@pytest.mark.parametrize("pins", [{"shares": 1}, {"leases": 1}, {"shares": 2, "leases": 3}])
def test_a_pinned_page_is_not_retired_but_may_be_condemned(pins: dict[str, int]) -> None:
    slot = START[S.SEALED]._replace(**pins)
    with pytest.raises(PagePinned):
        apply_event(slot, E.RETIRE)
    gone = apply_event(slot, E.CONDEMN)
    assert (gone.state, gone.generation, gone.owner) == (S.QUARANTINED, 4, NOBODY)
    for event, count in ((E.UNSHARE, gone.shares), (E.RELEASE, gone.leases)):
        for _ in range(count):
            assert gone.state is S.QUARANTINED
            gone = apply_event(gone, event)
    assert gone == Slot(S.FREE, 4)


def test_generations_are_odd_while_owned_and_end_before_they_repeat() -> None:
    last = Slot(generation=MAX_GENERATION - 4)
    owned = apply_event(last, E.ALLOCATE, OWNER)
    assert owned.generation == MAX_GENERATION - 3
    gone = apply_event(owned, E.RETIRE)
    assert gone.state is S.QUARANTINED, "a slot whose generations are used up is never handed out again"
    with pytest.raises(LifecycleError):
        apply_event(gone, E.ALLOCATE, OWNER)
    with pytest.raises(LifecycleError) as caught:
        apply_event(Slot(generation=MAX_GENERATION - 2), E.ALLOCATE, OWNER)
    assert caught.value.reason == "generation_exhausted"


@pytest.mark.parametrize("name", ["tag_bump", "pins", "quarantine"])
def test_each_life_cycle_check_is_what_refuses(name: str) -> None:
    checks = ALL_CHECKS.without(name)
    held = START[S.OPEN]._replace(holds=1)
    shared = START[S.SEALED]._replace(shares=1)
    if name == "tag_bump":
        assert apply_event(START[S.OPEN], E.RETIRE, checks=checks).generation == 3
        assert apply_event(Slot(generation=3), E.ALLOCATE, OWNER, checks).generation == 3
    elif name == "pins":
        assert apply_event(shared, E.RETIRE, checks=checks).state is S.QUARANTINED
    else:
        assert apply_event(held, E.RETIRE, checks=checks).state is S.FREE


# --- random histories ---------------------------------------------------------------------------------------------


@dataclass
class Life:
    """Shadow of one owned or quarantined life of a slot."""

    ref: PageRef
    owner: int
    sealed: bool = False
    gone: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("share", "lease", "hold"), 0))

    @property
    def pinned(self) -> bool:
        return self.counts["share"] > 0 or self.counts["lease"] > 0

    @property
    def used(self) -> bool:
        return any(self.counts.values())


ENDS = {"share": "unshare", "lease": "release", "hold": "prove"}


class BookMachine(RuleBasedStateMachine):
    """Any history of calls, right or wrong, keeps the promises of the book."""

    SLOTS = 4

    @initialize()
    def start(self) -> None:
        self.tags: dict[int, list[Tag]] = {i: [] for i in range(self.SLOTS)}
        self.told: list[tuple[str, int]] = []
        self.book = PageAllocator(self.SLOTS, 9, self.on_tag, self.on_free)
        self.lives: dict[int, Life] = {}  # by page id
        self.dead: list[PageRef] = []

    def on_tag(self, page_id: int, tag: Tag) -> None:
        assert page_id not in self.book._free, "told before the slot can be handed out"
        self.tags[page_id].append(tag)
        self.told.append(("tag", page_id))

    def on_free(self, page_id: int) -> None:
        assert page_id not in self.book._free, "scrubbed before the slot can be handed out"
        self.told.append(("free", page_id))

    def pick(self, data: st.DataObject, **wanted: bool) -> Life | None:
        lives = [x for x in self.lives.values() if all(getattr(x, k) == v for k, v in wanted.items())]
        return data.draw(st.sampled_from(lives)) if lives else None

    def end_if_unused(self, life: Life) -> None:
        if life.gone and not life.used:
            del self.lives[life.ref.page_id]
            assert self.told[-1] == ("free", life.ref.page_id)
            self.dead.append(life.ref)

    @rule(owner=st.integers(1, 3), count=st.integers(0, 3))
    def allocate(self, owner: int, count: int) -> None:
        before = self.book.counts()
        if count > self.SLOTS - len(self.lives):
            with pytest.raises(NoCapacity):
                self.book.allocate(owner, count)
            assert self.book.counts() == before
            return
        for ref in self.book.allocate(owner, count):
            assert ref.page_id not in self.lives, "a page with two owners"
            assert self.tags[ref.page_id][-1] == ref.tag, "the tag is told before the page is given"
            self.lives[ref.page_id] = Life(ref, owner)

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        life = self.pick(data, gone=False)
        if life is None:
            return
        if life.sealed:
            with pytest.raises(LifecycleError):
                self.book.seal(life.ref, life.owner)
            return
        self.book.seal(life.ref, life.owner)
        life.sealed = True

    @rule(data=st.data(), kind=st.sampled_from(sorted(ENDS)))
    def take(self, data: st.DataObject, kind: str) -> None:
        life = self.pick(data, gone=False)
        if life is None:
            return
        if kind != "hold" and not life.sealed:
            with pytest.raises(LifecycleError):
                getattr(self.book, kind)([life.ref])
            return
        getattr(self.book, kind)([life.ref])
        life.counts[kind] += 1

    @rule(data=st.data(), kind=st.sampled_from(sorted(ENDS)))
    def end(self, data: st.DataObject, kind: str) -> None:
        life = self.pick(data)
        if life is None:
            return
        if not life.counts[kind]:
            with pytest.raises(LifecycleError):
                getattr(self.book, ENDS[kind])([life.ref])
            return
        getattr(self.book, ENDS[kind])([life.ref])
        life.counts[kind] -= 1
        self.end_if_unused(life)

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        life = self.pick(data)
        if life is None:
            return
        if life.gone or life.pinned:
            with pytest.raises(LifecycleError if life.gone else PagePinned):
                self.book.retire([life.ref], life.owner)
            return
        with pytest.raises(LifecycleError):
            self.book.retire([life.ref], life.owner + 1)
        self.book.retire([life.ref], life.owner)
        life.gone = True
        self.end_if_unused(life)

    @rule(data=st.data())
    def condemn(self, data: st.DataObject) -> None:
        life = self.pick(data)
        if life is None:
            return
        assert self.book.condemn(life.ref) is not life.gone
        if not life.gone:
            life.gone = True
            self.end_if_unused(life)

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def use_a_dead_ref(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.dead))
        before = [self.book.slot(i) for i in range(self.SLOTS)]
        for call in ("share", "lease", "hold", "unshare", "release", "prove"):
            with pytest.raises(StalePage):
                getattr(self.book, call)([ref])
        for owner in (NOBODY, 1, 2, 3):
            with pytest.raises((StalePage, LifecycleError)):
                self.book.retire([ref], owner)
            with pytest.raises((StalePage, LifecycleError)):
                self.book.seal(ref, owner)
        assert not self.book.condemn(ref)
        assert not self.book.is_live(ref)
        assert [self.book.slot(i) for i in range(self.SLOTS)] == before

    @invariant()
    def book_and_shadow_agree(self) -> None:
        if not hasattr(self, "book"):
            return
        counts = self.book.counts()
        assert counts.total == self.SLOTS
        assert counts.free == self.book.free_pages == self.SLOTS - len(self.lives)
        assert sorted(self.book._free) == sorted(set(range(self.SLOTS)) - set(self.lives))
        for life in self.lives.values():
            slot = self.book.slot(life.ref.page_id)
            wanted = S.QUARANTINED if life.gone else S.SEALED if life.sealed else S.OPEN
            assert slot.state is wanted
            assert (slot.shares, slot.leases, slot.holds) == tuple(life.counts[k] for k in ("share", "lease", "hold"))
            assert self.book.is_live(life.ref) is not life.gone
            assert slot.owner == (NOBODY if life.gone else life.owner)

    @invariant()
    def generations_only_rise(self) -> None:
        for tags in getattr(self, "tags", {}).values():
            generations = [tag.generation for tag in tags]
            assert generations == sorted(set(generations))
            assert all(tag.incarnation == 9 for tag in tags)


BookMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
test_any_history = BookMachine.TestCase
