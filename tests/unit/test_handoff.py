"""The handoff's rules: every order of events, by a model that says what must happen."""

from __future__ import annotations

import itertools
import random

import pytest

from decode.handoff import Accepted, Completed, HandoffReceiver, HandoffState, PagePromised
from kvstore.checks import ALL_CHECKS
from kvstore.descriptor import PageDescriptor
from kvstore.errors import Cancelled, GenlockError, LayoutMismatch, StalePage, Unavailable
from kvstore.ids import PageRef, Tag
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder
from kvstore.transfer.base import PoolExport
from tests.support.core_world import Token
from tests.support.kv_world import LAYOUT, T

OURS, FOREIGN = b"h" * 16, b"f" * 16
TICKET = b"t" * 16
PAGES = 2
PROMPT = PAGES * T - 1
LOCAL = tuple(PageRef(10 + i, Tag(22, 3)) for i in range(PAGES))
OTHER_LAYOUT = LAYOUT.canonical().replace('"kv_heads":2', '"kv_heads":4')


def receiver(checks=ALL_CHECKS, pages: int = PAGES) -> HandoffReceiver[Token]:
    expected = ExpectedPages(pages * T - 1, T, tuple(bytes([i]) * 32 for i in range(pages)))
    local = tuple(PageRef(10 + i, Tag(22, 3)) for i in range(pages))
    return HandoffReceiver(TICKET, LAYOUT, expected, local, checks)


def accepted(handoff_id=OURS, ticket_id=TICKET, layout=None) -> Accepted:
    export = PoolExport("memory", 11, layout or LAYOUT.canonical(), 8, LAYOUT.slot_bytes, "")
    return Accepted(handoff_id, ticket_id, export, 1000)


def page(index: int, handoff_id=OURS) -> PagePromised:
    desc = PageDescriptor(
        PageRef(index, Tag(11, 3)),
        index,
        index * T,
        T,
        LAYOUT.slot_bytes,
        LAYOUT.fingerprint,
        bytes([index % 256]) * 32,
        5,
    )
    return PagePromised(handoff_id, desc)


def completed(count: int = PAGES, handoff_id=OURS) -> Completed[Token]:
    return Completed(handoff_id, count, Token(7), 1.0, 2.0)


EVENTS = {
    "accept": accepted(),
    "accept foreign ticket": accepted(ticket_id=b"x" * 16),
    "accept other layout": accepted(layout=OTHER_LAYOUT),
    "page 0": page(0),
    "page 1": page(1),
    "page 2": page(2),
    "page -1": page(-1),
    "foreign page 1": page(1, FOREIGN),
    "complete": completed(),
    "complete too few": completed(PAGES - 1),
    "foreign complete": completed(PAGES, FOREIGN),
    "end": None,
    "end badly": Cancelled("cancelled", "prefill says so"),
}


class Model:
    """What must happen, written down as a reader of the protocol would."""

    def __init__(self) -> None:
        self.state = HandoffState.CALLED
        self.seen: set[int] = set()

    def reason(self, name: str) -> str | None:
        """The reason of the error that this event gives, None where it is welcome; moves the state."""
        why = self._judge(name)
        if why is not None and not (name.startswith("end") and self.state is HandoffState.COMPLETED):
            self.state = HandoffState.FAILED
        return why

    def _judge(self, name: str) -> str | None:
        over, done = self.state is HandoffState.FAILED, self.state is HandoffState.COMPLETED
        if name == "end":
            return None if done else "handoff_cut"
        if name == "end badly":
            return None if done else "cancelled"
        if over:
            return "handoff_over"
        if name.startswith("accept"):
            if self.state is not HandoffState.CALLED:
                return "handoff_again"
            if "ticket" in name:
                return "foreign_ticket"
            if "layout" in name:
                return "layout_mismatch"
            self.state = HandoffState.ACCEPTED
            return None
        if self.state is HandoffState.CALLED:
            return "handoff_not_accepted"
        if "foreign" in name:
            return "unknown_handoff"
        if "page" in name:
            index = int(name.split()[-1])
            if done:
                return "page_after_end"
            if not 0 <= index < PAGES:
                return "page_not_expected"
            if index in self.seen:
                return "duplicate_page"
            self.seen.add(index)
            return None
        if done:
            return "handoff_again"
        if name != "complete" or len(self.seen) < PAGES:
            return "pages_missing"
        self.state = HandoffState.COMPLETED
        return None


def feed(rules: HandoffReceiver[Token], name: str) -> PageOrder | None:
    event = EVENTS[name]
    if name.startswith("end"):
        rules.on_end(event)
        return None
    return rules.on_event(event)


def play(names) -> None:
    rules, model = receiver(), Model()
    for at, name in enumerate(names):
        where = f"{names[: at + 1]}"
        wanted = model.reason(name)
        if wanted is None:
            order = feed(rules, name)
            if "page" in name:
                index = int(name.split()[-1])
                assert order == PageOrder(page(index).desc, LOCAL[index]), where
            else:
                assert order is None, where
        else:
            with pytest.raises(GenlockError) as caught:
                feed(rules, name)
            if wanted != "layout_mismatch":
                assert caught.value.reason == wanted, where
            else:
                assert isinstance(caught.value, LayoutMismatch), where
        assert rules.state is model.state, where
        assert not rules.ready, f"nothing was verified: {where}"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_sequence_of_events(length):
    for names in itertools.product(EVENTS, repeat=length):
        play(names)


def test_every_event_after_each_way_to_an_end():
    """End states absorb: whatever comes, they stay, and a failed handoff asks for no page."""
    good = ("accept", "page 1", "page 0", "complete")
    for names in itertools.product(EVENTS, repeat=2):
        play((*good, *names))
        for cut in range(1, len(good)):
            play((*good[:cut], "end", *names))


def test_long_random_sequences():
    rng = random.Random(20)
    names = list(EVENTS)
    weights = [4 if n in ("accept", "page 0", "page 1", "complete") else 1 for n in names]
    for _ in range(3000):
        play(tuple(rng.choices(names, weights, k=rng.randrange(4, 9))))


def test_any_order_of_descriptors_orders_each_page_into_its_own_slot():
    for order in itertools.permutations(range(4)):
        rules = receiver(pages=4)
        rules.on_event(accepted())
        orders = [rules.on_event(page(i)) for i in order]
        assert {o.desc.logical_index: o.local.page_id for o in orders} == {i: 10 + i for i in range(4)}
        rules.on_event(completed(4))
        assert rules.state is HandoffState.COMPLETED
        rules.verified(tuple(orders[:3]))
        assert not rules.ready, "one page is still owed"
        rules.verified((orders[3],))
        assert rules.ready


def test_ready_needs_both_the_completion_and_every_page():
    rules = receiver()
    rules.on_event(accepted())
    orders = tuple(rules.on_event(page(i)) for i in range(PAGES))
    rules.verified(orders)
    assert not rules.ready
    rules.on_event(completed())
    assert rules.ready


def test_a_page_verified_twice_does_not_stand_in_for_another():
    rules = receiver()
    rules.on_event(accepted())
    first = rules.on_event(page(0))
    rules.on_event(page(1))
    rules.on_event(completed())
    rules.verified((first,))
    rules.verified((first,))
    assert not rules.ready


def test_a_failed_handoff_is_never_ready():
    rules = receiver()
    rules.on_event(accepted())
    orders = tuple(rules.on_event(page(i)) for i in range(PAGES))
    with pytest.raises(StalePage):
        rules.on_event(page(0))
    rules.verified(orders)
    assert not rules.ready


def test_the_end_of_the_stream_tells_prefills_own_error():
    rules = receiver()
    with pytest.raises(Cancelled):
        rules.on_end(Cancelled("cancelled", ""))
    rules = receiver()
    with pytest.raises(Unavailable) as caught:
        rules.on_end(None)
    assert caught.value.reason == "handoff_cut"


def test_a_slot_for_each_page_or_nothing():
    expected = ExpectedPages(PROMPT, T, (b"a" * 32, b"b" * 32))
    with pytest.raises(ValueError, match="one local slot"):
        HandoffReceiver(TICKET, LAYOUT, expected, LOCAL[:1])


@pytest.mark.parametrize(
    ("check", "names"),
    [
        ("handoff_id", ("accept foreign ticket",)),
        ("handoff_id", ("accept", "foreign page 1")),
        ("layout", ("accept other layout",)),
        ("exact_set", ("accept", "page 0", "page 0")),
        ("exact_set", ("accept", "page 0", "complete")),
        ("stream_end", ("accept", "end")),
    ],
)
def test_without_its_check_each_fault_passes(check, names):
    with pytest.raises(GenlockError):
        [feed(receiver_all, name) for receiver_all in [receiver()] for name in names]
    rules = receiver(ALL_CHECKS.without(check))
    for name in names:
        feed(rules, name)
    assert rules.state is not HandoffState.FAILED
