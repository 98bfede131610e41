"""The start-up self-test: one marked page crosses the chosen engine and is judged, before any request's page does.

Every prefill pool keeps one sealed page, its beacon, in a slot beside the pool's own, so that no load can take it
away; its descriptor travels in the pool's export. A decode worker pulls it into a spare slot of its own and judges it
as it judges any page: header, prefix key, digest, live tag. Its bytes come from a keyed stream, all different, and its
key names the pool's life: a wrong path, a short read, another byte order, memory of another life all show.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from kvstore.errors import GenlockError, Unavailable
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.keys import PrefixKeyer
from kvstore.layout import HEADER_BYTES, PageLayout, layout_from_canonical, require_same_layout
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import Peer

BEACON_SLOTS = 1  # spares of a prefill pool
LANDING_SLOTS = 4  # spares of a decode pool: exchanges at a time, those whose bytes may still land among them
SELF_TEST_OWNER = -2  # no request has this number


def expected_beacon(keyer: PrefixKeyer, layout: PageLayout, incarnation: int) -> ExpectedPages:
    """The place and the key of the beacon of one life of a pool: a full page, at the start of a prompt of nobody's."""
    rows = layout.page_tokens
    # A tenant comes from a credential and holds no NUL.
    return ExpectedPages(rows, rows, keyer.chain(f"\0beacon/{incarnation}", range(rows), rows))


def light_beacon(guard: Guard, keyer: PrefixKeyer) -> None:
    """Seals the beacon of a pool with a free spare slot and adds it to the pool's export. Raises NoCapacity."""
    layout = guard.layout
    [key] = expected_beacon(keyer, layout, guard.incarnation).keys
    ref = guard.allocate_spare(SELF_TEST_OWNER)
    guard.fill(ref, SELF_TEST_OWNER, hashlib.shake_256(key).digest(layout.slot_bytes - HEADER_BYTES))
    header = PageHeader(ref.tag, layout.fingerprint, 0, layout.page_tokens, key)
    guard.export = replace(guard.export, beacon=guard.seal(ref, SELF_TEST_OWNER, header, 0))


class PeerProver:
    """Proves that pages of a connected pool arrive as they were sealed. Blocking; safe from several threads."""

    def __init__(self, guard: Guard, receiver: PageReceiver, keyer: PrefixKeyer, timeout_ms: int) -> None:
        self._guard = guard
        self._receiver = receiver
        self._keyer = keyer
        self._timeout_ms = timeout_ms

    def __call__(self, peer: Peer) -> None:
        """Pulls and judges the peer's beacon. Raises Unavailable('peer_not_proved') that says why, or LayoutMismatch.

        A landing slot that the engine may still write stays in quarantine, as any page would.
        """
        guard, export = self._guard, peer.export
        if guard.checks.layout:
            require_same_layout(guard.layout, layout_from_canonical(export.layout))
        try:
            self._exchange(peer)
        except GenlockError as error:
            guard.count(f"peer_proof/{error.reason}")
            raise Unavailable(
                "peer_not_proved",
                f"the page exchanged with this pool over {export.engine} did not pass: {error.message} "
                f"({error.reason})",
                field="transfer.engine",
            ) from error
        guard.count("peer_proof/ok")

    def _exchange(self, peer: Peer) -> None:
        guard, beacon = self._guard, peer.export.beacon
        if beacon is None:
            raise Unavailable("no_beacon", "the pool's export names no page to prove an exchange with")
        self._receiver.sweep()
        landing = guard.allocate_spare(SELF_TEST_OWNER)
        try:
            expected = expected_beacon(self._keyer, guard.layout, peer.export.incarnation)
            self._receiver.pull(peer, (PageOrder(beacon, landing),), SELF_TEST_OWNER, expected, self._timeout_ms)
        finally:
            guard.retire((landing,), SELF_TEST_OWNER)
