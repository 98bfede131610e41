"""Leases, the prefix index and the incarnation registry."""

from __future__ import annotations

import pytest

from kvstore import registry
from kvstore.errors import GenlockError, InvalidInput, LifecycleError, NoCapacity, NotFound, StalePage
from kvstore.ids import PageRef, Tag
from kvstore.leases import LeaseTable
from kvstore.prefix_index import Content, PrefixIndex
from kvstore.registry import IncarnationRegistry


def ref(page_id: int, generation: int = 3) -> PageRef:
    return PageRef(page_id, Tag(9, generation))


# --- leases -------------------------------------------------------------------------------------------------------


def leases(max_leases: int = 2) -> LeaseTable:
    return LeaseTable(lease_ms=100, max_leases=max_leases)


def test_a_lease_keeps_its_pages_until_it_ends_once() -> None:
    table = leases()
    table.grant(b"h", 0)
    table.add(b"h", (ref(0),), 10)
    table.add(b"h", (ref(1), ref(2)), 20)
    assert b"h" in table
    assert table.end(b"h") == (ref(0), ref(1), ref(2))
    assert b"h" not in table
    with pytest.raises(NotFound):
        table.end(b"h")


@pytest.mark.parametrize("call", [
    lambda t: t.end(b"x"), lambda t: t.renew(b"x", 5), lambda t: t.add(b"x", (ref(0),), 5),
])  # fmt: skip
def test_an_unknown_handoff_is_not_found_and_changes_nothing(call) -> None:  # type: ignore[no-untyped-def]
    table = leases()
    table.grant(b"h", 0)
    with pytest.raises(NotFound):
        call(table)
    assert len(table) == 1
    assert table.expired(99) == ()
    assert table.expired(100) == (b"h",)


def test_a_second_grant_does_not_forget_promised_pages() -> None:
    table = leases()
    table.grant(b"h", 0)
    table.add(b"h", (ref(0),), 0)
    with pytest.raises(LifecycleError) as caught:
        table.grant(b"h", 50)
    assert caught.value.reason == "handoff_exists"
    assert table.expired(100) == (b"h",), "the refused grant did not renew it"
    assert table.end(b"h") == (ref(0),)


def test_leases_are_limited() -> None:
    table = leases(1)
    table.grant(b"h", 0)
    with pytest.raises(NoCapacity) as caught:
        table.grant(b"i", 0)
    assert caught.value.reason == "too_many_leases"
    table.end(b"h")
    table.grant(b"i", 0)


def test_deadlines_move_forward_only_and_end_at_their_millisecond() -> None:
    table = leases()
    table.grant(b"h", 1000)
    table.renew(b"h", 1050)
    table.renew(b"h", 900)
    table.add(b"h", (), 800)
    assert table.expired(1149) == ()
    assert table.expired(1150) == (b"h",)


def test_the_oldest_leases_are_those_granted_first_whatever_moved_since() -> None:
    table = leases(3)
    for at, name in enumerate((b"a", b"b", b"c")):
        table.grant(name, at)
    table.renew(b"a", 50)
    table.renew(b"a", 60)
    table.add(b"b", (ref(0),), 70)
    told = [(one.handoff_id, one.granted_ms, one.deadline_ms, one.renewals, one.refs) for one in table.oldest(2)]
    assert told == [(b"a", 0, 160, 2, ()), (b"b", 1, 170, 0, (ref(0),))]
    assert [len(table.oldest(limit)) for limit in (-1, 0, 3, 9)] == [0, 0, 3, 3]


@pytest.mark.parametrize("field", ["lease_ms", "max_leases"])
def test_impossible_lease_tables_are_refused(field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        LeaseTable(**{"lease_ms": 1, "max_leases": 1, field: 0})
    assert caught.value.field == f"leases.{field}"


# --- prefix index ---------------------------------------------------------------------------------------------------


class Index:
    """An index over refs that can be killed."""

    def __init__(self, max_entries: int = 4) -> None:
        self.dead: set[PageRef] = set()
        self.index = PrefixIndex(max_entries, lambda r: r not in self.dead)

    def fill(self, *names: str) -> None:
        before: Content | None = None
        for i, name in enumerate(names):
            before = content(name, before)
            assert self.index.insert(name.encode(), ref(i), before)

    def insert(self, name: str, page: PageRef, *before: str) -> bool:
        return self.index.insert(name.encode(), page, chain(*before, name))

    def match(self, *names: str, tenant: str = "t") -> tuple[PageRef, ...]:
        """Of a prompt whose pages hold these tokens and have keys of the same names."""
        return self.index.match(keys(*names), tenant, keys(*names))


def content(name: str, before: Content | None = None) -> Content:
    return Content("t", name.encode(), before)


def chain(*names: str) -> Content:
    before: Content | None = None
    for name in names:
        before = content(name, before)
    assert before is not None
    return before


def keys(*names: str) -> list[bytes]:
    return [n.encode() for n in names]


def test_the_longest_cached_prefix_is_found() -> None:
    world = Index()
    world.fill("a", "b", "d")
    assert world.match("a", "b", "c", "d") == (ref(0), ref(1))
    assert world.match("c", "d") == ()
    assert world.match() == ()


def test_a_stale_entry_is_a_miss_and_leaves() -> None:
    world = Index()
    world.fill("a", "b", "c")
    world.dead.add(ref(1))
    assert world.match("a", "b", "c") == (ref(0),)
    assert len(world.index) == 2
    assert world.insert("b", ref(7), "a")
    assert world.match("a", "b", "c") == (ref(0), ref(7), ref(2))


def test_a_live_page_is_not_replaced_a_stale_one_is() -> None:
    world = Index()
    world.fill("a")
    assert not world.index.wants(b"a")
    assert not world.insert("a", ref(5))
    assert world.match("a") == (ref(0),)
    world.dead.add(ref(0))
    assert world.index.wants(b"a")
    assert world.insert("a", ref(5))
    assert world.match("a") == (ref(5),)


def test_the_same_slot_in_another_life_is_another_page() -> None:
    world = Index()
    world.fill("a")
    world.dead.add(ref(0, 3))
    assert world.insert("b", ref(0, 5))
    assert world.match("a") == ()
    assert world.match("b") == (ref(0, 5),)


def test_a_full_index_takes_nothing_until_something_leaves_or_is_stale() -> None:
    world = Index(2)
    world.fill("a", "b")
    assert not world.index.wants(b"c")
    assert not world.insert("c", ref(2))
    assert len(world.index) == 2
    world.dead.add(ref(0))
    assert world.insert("c", ref(2)), "a stale entry does not keep a live one out"
    assert world.match("c") == (ref(2),)
    world.index.remove(b"b", ref(7))
    assert world.index.content_of(b"b") is not None, "another page of that key is not this one"
    world.index.remove(b"b", ref(1))
    world.index.remove(b"b", ref(1))
    assert world.index.content_of(b"b") is None
    assert world.insert("d", ref(3))
    assert not PrefixIndex(0, lambda r: True).insert(b"a", ref(0), content("a"))


def test_what_was_used_is_evicted_last_and_a_prefix_after_what_follows_it() -> None:
    world = Index()
    world.fill("a", "b", "x")
    world.match("a", "b")
    assert [k for k, _ in world.index.oldest()] == keys("x", "b", "a")
    for key, page in world.index.oldest():
        world.index.remove(key, page)  # while the iterator lives
    assert len(world.index) == 0


def test_a_key_whose_page_holds_something_else_is_a_miss() -> None:
    """Whatever differs: the page's own tokens, a page before it, how many are before it, or the tenant."""
    world = Index()
    world.fill("a", "b")
    assert world.index.match(keys("a", "b"), "t", keys("a", "b")) == (ref(0), ref(1))
    assert world.index.match(keys("a", "b"), "t", keys("x", "b")) == ()
    assert world.index.match(keys("a", "b"), "t", keys("a", "x")) == (ref(0),)
    assert world.index.match(keys("b"), "t", keys("b")) == (), "the same tokens at another place"
    assert world.match("a", "b", tenant="u") == ()
    assert len(world.index) == 2, "the entries are their own prompt's still"
    other = Index()
    other.fill("x", "b")
    other.insert("a", ref(5))
    assert other.match("a", "b") == (ref(5),), "the same page after another one"


def test_equal_contents_are_the_same_whoever_made_them() -> None:
    """A page whose predecessor was evicted and computed again is still a hit."""
    world = Index()
    world.fill("a", "b", "c")
    world.index.remove(b"a", ref(0))
    assert world.insert("a", ref(8))
    assert world.match("a", "b", "c") == (ref(8), ref(1), ref(2))


def test_a_long_chain_of_contents_comes_and_goes() -> None:
    names = [str(i) for i in range(50_000)]
    assert chain(*names).is_same(chain(*names))
    assert not chain(*names).is_same(chain("other", *names[1:]))


# --- registry -------------------------------------------------------------------------------------------------------


def test_a_new_life_ends_the_former_one_for_good() -> None:
    reg = IncarnationRegistry()
    assert reg.see("w", 5) is None
    assert reg.see("w", 5) is None
    assert reg.see("w", 6) == 5
    assert (reg.present("w"), reg.is_dead(5), reg.is_dead(6)) == (6, True, False)
    for worker in ("w", "v"):
        with pytest.raises(StalePage) as caught:
            reg.see(worker, 5)
        assert caught.value.reason == "incarnation_dead"
    assert reg.present("w") == 6
    assert reg.present("v") is None


def test_a_worker_that_leaves_is_dead_and_may_come_back_as_another() -> None:
    reg = IncarnationRegistry()
    reg.see("w", 5)
    reg.leave("w")
    reg.leave("w")
    reg.leave("nobody")
    assert reg.is_dead(5)
    assert reg.present("w") is None
    assert reg.see("w", 6) is None


def test_two_workers_cannot_be_one_life() -> None:
    reg = IncarnationRegistry()
    reg.see("w", 5)
    with pytest.raises(StalePage) as caught:
        reg.see("v", 5)
    assert caught.value.reason == "incarnation_taken"
    assert reg.present("v") is None


@pytest.mark.parametrize("incarnation", [0, -1, 1 << 63])
def test_impossible_incarnations_are_refused(incarnation: int) -> None:
    reg = IncarnationRegistry()
    with pytest.raises(InvalidInput) as caught:
        reg.see("w", incarnation)
    assert caught.value.field == "pool.incarnation"
    assert reg.present("w") is None


def test_memory_of_the_registry_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_REMEMBERED", 3)
    reg = IncarnationRegistry()
    for incarnation in range(1, 7):
        reg.see("w", incarnation)
    assert [reg.is_dead(i) for i in range(1, 7)] == [False, False, True, True, True, False]
    reg.see("v", 10)
    reg.see("u", 11)
    with pytest.raises(GenlockError) as caught:
        reg.see("t", 12)
    assert isinstance(caught.value, NoCapacity)
    assert reg.see("u", 13) == 11, "a known worker may still change its life"
