"""Torn and exchanged bytes within one batch, around every engine's own reads: the receipt refuses them, and without its
checks they are adopted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import CorruptPage, GenlockError, StalePage
from kvstore.guard import Guard
from kvstore.ids import PageRef
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import PagePair, TransferEngine
from kvstore.transfer.faults import FaultHooks, TransferFaults
from kvstore.transfer.faulty import FaultyEngine
from kvstore.transfer.memory import MemoryEngine
from tests.contract.transfer_kit import TIMEOUT_MS, Kit
from tests.support.kv_world import OWNER, T, fill, make_guard, make_keyer, seal_prompt, values_of

KINDS = ("memory", "shm", "mooncake", "nixl", "nixl-tcp")
TOKENS = [11, 12, 13, 14, 21, 22, 23, 24]
OTHERS = [91, 92, 93, 94]

pytestmark = pytest.mark.parametrize("kit", KINDS, indirect=True)


@dataclass
class Pair:
    """A source with a sealed prompt of two pages, and a sink."""

    kit: Kit
    faults: TransferFaults
    checks: Checks
    between_halves: Callable[[Guard, Sequence[PageRef]], None] = lambda guard, refs: None

    def __post_init__(self) -> None:
        self.source_engine = self.kit.engine()
        self.source = make_guard(self.source_engine, 11, scrub=False)
        self.keyer = make_keyer()
        self.descs = seal_prompt(self.source, self.keyer, TOKENS)
        self.engine = self._faulty(self.kit.engine())
        self.sink = make_guard(self.engine, 22, checks=self.checks, scrub=False)

    def pull(self) -> list[list[float]]:
        """The values in the adopted pages. Raises what the receiver raises."""
        refs = self.sink.allocate(OWNER, len(self.descs))
        orders = [PageOrder(d, r) for d, r in zip(self.descs, refs, strict=True)]
        expected = ExpectedPages(len(TOKENS), T, self.keyer.chain("t", TOKENS, T))
        peer = self.engine.connect(self.source.export)
        PageReceiver(self.sink, self.engine).pull(peer, orders, OWNER, expected, TIMEOUT_MS)
        return [values_of(self.sink, ref.page_id) for ref in refs]

    def _faulty(self, engine: TransferEngine) -> TransferEngine:
        def between(pair: PagePair) -> None:
            self.between_halves(self.source, [d.ref for d in self.descs])

        hooks = FaultHooks(between_halves=between)
        if isinstance(engine, MemoryEngine):
            self.kit.fabric.plan, self.kit.fabric.hooks = lambda info: self.faults, hooks
            return engine
        return FaultyEngine(engine, lambda info: self.faults, hooks)


def overwrite(guard: Guard, refs: Sequence[PageRef]) -> None:
    fill(guard, refs[0], OTHERS)


def test_a_page_torn_in_its_middle_is_refused(kit: Kit) -> None:
    with pytest.raises(CorruptPage) as caught:
        Pair(kit, TransferFaults(torn_page=0), ALL_CHECKS, overwrite).pull()
    assert caught.value.reason == "digest_mismatch"


def test_without_the_digest_the_torn_page_is_adopted(kit: Kit) -> None:
    """The first half, with the header, is the prompt's; the values in the second half are another's."""
    adopted = Pair(kit, TransferFaults(torn_page=0), ALL_CHECKS.without("digest"), overwrite).pull()
    assert adopted == [OTHERS, TOKENS[T:]]


EXCHANGES = [TransferFaults(swap=(0, 1)), TransferFaults(duplicate=(0, 1))]


@pytest.mark.parametrize("faults", EXCHANGES, ids=["swapped", "one_for_another"])
def test_pages_in_each_others_place_are_refused(kit: Kit, faults: TransferFaults) -> None:
    with pytest.raises(StalePage) as caught:
        Pair(kit, faults, ALL_CHECKS).pull()
    assert caught.value.reason == "header_mismatch"


@pytest.mark.parametrize("faults", EXCHANGES, ids=["swapped", "one_for_another"])
def test_without_the_checks_pages_are_adopted_in_each_others_place(kit: Kit, faults: TransferFaults) -> None:
    checks = ALL_CHECKS.without("header", "prefix_key", "digest")
    assert Pair(kit, faults, checks).pull() in ([TOKENS[T:], TOKENS[:T]], [TOKENS[:T], TOKENS[:T]])


def test_pages_that_land_in_another_order_are_the_same_pages(kit: Kit) -> None:
    assert Pair(kit, TransferFaults(reverse_order=True), ALL_CHECKS).pull() == [TOKENS[:T], TOKENS[T:]]


def test_tags_are_read_after_the_pages_and_tell_of_a_page_that_moved_on_meanwhile(kit: Kit) -> None:
    """The tag moves while the bytes are under way. The bytes are whole, so that nothing but the order shows it."""

    def move_on(guard: Guard, refs: Sequence[PageRef]) -> None:
        guard.retire([refs[0]], OWNER)

    for checks in (ALL_CHECKS, ALL_CHECKS.without("source_tag")):
        pair = Pair(kit, TransferFaults(torn_page=0), checks, move_on)
        try:
            adopted: object = pair.pull()
        except GenlockError as error:
            adopted = error.reason
        assert adopted == ("source_moved_on" if checks.source_tag else [TOKENS[:T], TOKENS[T:]])
