"""Pages are used again only after proof, with bytes that really land late: the owner of a prompt's pages is stopped in
the middle of a pull over a real network engine, and goes on when the pages have been given back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import NoCapacity, TransferTimeout
from kvstore.guard import Guard
from kvstore.ids import PageRef
from kvstore.layout import HEADER_BYTES
from kvstore.receive import PageOrder, PageReceiver, Pull
from kvstore.transfer.common import monotonic_ms
from tests.contract.transfer_kit import require
from tests.support.sealed_owner import LAYOUT, OWNER, Owner, body_of, make_engine, make_guard

PAGES = 96
NEXT_OWNER = 2
TIMEOUT_MS = 700
PATTERN = bytes([7]) * (LAYOUT.slot_bytes - HEADER_BYTES)


@dataclass
class Cut:
    """A pull whose owner stopped in its middle. The pull has timed out and its pages were given back."""

    kind: str
    made: list[Cut]  # those to be closed; this one too, from the moment on that it has a process
    checks: Checks = ALL_CHECKS
    stopped: bool = False
    refs: tuple[PageRef, ...] = field(init=False)
    pull: Pull = field(init=False)

    def __post_init__(self) -> None:
        self.owner = Owner(self.kind, PAGES)
        self.made.append(self)
        self.engine = make_engine(self.kind, clock_ms=self._look)
        self.guard: Guard = make_guard(self.engine, PAGES, 5, checks=self.checks)
        self.receiver = PageReceiver(self.guard, self.engine)
        self.bodies = self.engine.slots_SU8[:, HEADER_BYTES:]
        peer = self.engine.connect(self.owner.export)
        self.refs = self.guard.allocate(OWNER, PAGES)
        # Neighbours here are none there: an engine that joins neighbours still moves page after page.
        orders = [PageOrder(d, ref) for d, ref in zip(self.owner.descriptors, self.refs[::-1], strict=True)]
        self.place_of = {order.local.page_id: order.desc.logical_index for order in orders}
        self.pull = self.receiver.begin(peer, orders, OWNER, self.owner.expected)
        try:
            with pytest.raises(TransferTimeout):
                self.receiver.judge_data(self.pull, TIMEOUT_MS)
        finally:
            self.receiver.end(self.pull)
        assert self.stopped, "the owner stopped in the middle: something had landed"
        self.at_time_out = self.bodies.copy()
        assert (self.at_time_out == 0).any(), "and something had not"
        self.guard.retire(self.refs, OWNER)

    def _look(self) -> int:
        """The engine's clock, which it reads between any two looks at what is under way. Stops the owner once the
        first bytes are here: so the middle of the pull is hit, however fast the host is."""
        if not self.stopped and hasattr(self, "pull") and self.bodies[:, :64].any():
            self.owner.stop()
            self.stopped = True
        return monotonic_ms()

    def resume_until_quiet(self) -> None:
        """The owner goes on; returns when the engine has proved that nothing can land any more. No sweep yet."""
        self.owner.resume()
        deadline = time.monotonic() + 40
        while not self.pull.transfer.quiesced() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.pull.transfer.quiesced()

    def close(self) -> None:
        self.owner.close()
        if hasattr(self, "engine"):
            self.engine.close()


@pytest.fixture(params=["nixl-tcp", "mooncake"])
def kind(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return request.param


@pytest.fixture
def cuts() -> Iterator[list[Cut]]:
    made: list[Cut] = []
    yield made
    for cut in made:
        cut.close()


def test_pages_come_back_after_proof_and_hold_none_of_the_late_bytes(kind: str, cuts: list[Cut]) -> None:
    cut = Cut(kind, cuts)
    guard = cut.guard
    assert guard.counts().quarantined == PAGES
    with pytest.raises(NoCapacity):
        guard.allocate(NEXT_OWNER, PAGES)
    with pytest.raises(NoCapacity):
        guard.allocate(NEXT_OWNER, 1)
    assert cut.receiver.sweep() == 1, "no proof while the owner stands still"

    cut.resume_until_quiet()
    late = (cut.bodies != cut.at_time_out).any(axis=1)
    assert late.any(), "bytes landed after the pages were given back"
    for page_id in np.flatnonzero(late).tolist():
        source = np.frombuffer(body_of(cut.place_of[page_id]), np.uint8)
        landed = cut.bodies[page_id]
        assert ((landed == source) | (landed == 0)).all(), "each in its place, and no others"
    with pytest.raises(NoCapacity):
        guard.allocate(NEXT_OWNER, 1)

    assert cut.receiver.sweep() == 0
    fresh = guard.allocate(NEXT_OWNER, PAGES)
    assert not cut.bodies.any(), "the next owner gets empty pages"
    for ref in fresh:
        guard.fill(ref, NEXT_OWNER, PATTERN)
    time.sleep(0.2)
    assert (cut.bodies == 7).all()


def test_without_quarantine_late_bytes_overwrite_the_next_owners_pages(kind: str, cuts: list[Cut]) -> None:
    cut = Cut(kind, cuts, ALL_CHECKS.without("quarantine"))
    for ref in cut.guard.allocate(NEXT_OWNER, PAGES):
        cut.guard.fill(ref, NEXT_OWNER, PATTERN)
    assert (cut.bodies == 7).all()
    cut.resume_until_quiet()
    hit = np.flatnonzero((cut.bodies != 7).any(axis=1)).tolist()
    assert hit, "the negative control: without quarantine the wrong bytes must appear"
    for page_id in hit:
        source = np.frombuffer(body_of(cut.place_of[page_id]), np.uint8)
        landed = cut.bodies[page_id]
        assert ((landed == source) | (landed == 7)).all(), "they are the former request's"
