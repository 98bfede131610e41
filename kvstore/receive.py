"""Pulling pages from a peer into our own slots, and judging them before anything may read them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from kvstore.descriptor import PageDescriptor
from kvstore.errors import GenlockError, TransferError, TransferTimeout
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.receipt import ExpectedPages, judge_descriptor, judge_digest, judge_header, judge_source
from kvstore.transfer.base import PagePair, Peer, Transfer, TransferEngine, TransferState


@dataclass(frozen=True)
class PageOrder:
    """One promised page and the open slot of ours that receives it."""

    desc: PageDescriptor
    local: PageRef


@dataclass(frozen=True)
class Pull:
    """A copy under way: made by `PageReceiver.begin`, ended by `PageReceiver.end`."""

    peer: Peer
    orders: tuple[PageOrder, ...]
    owner: int
    expected: ExpectedPages
    transfer: Transfer


class PageReceiver:
    """Runs pulls (blocking; call it from a worker thread) and keeps what is not proved quiet in quarantine."""

    def __init__(self, guard: Guard, engine: TransferEngine) -> None:
        self._guard = guard
        self._engine = engine
        self._lock = threading.Lock()
        self._unproved: list[tuple[Transfer, tuple[PageRef, ...]]] = []

    @property
    def unproved_transfers(self) -> int:
        return len(self._unproved)

    def pull(
        self, peer: Peer, orders: Sequence[PageOrder], owner: int, expected: ExpectedPages, timeout_ms: int
    ) -> None:
        """Copies, judges and adopts all `orders`, or none of them.

        Raises StalePage or CorruptPage (not provable), LayoutMismatch, TransferError, TransferTimeout. The caller then
        retires the local pages; those that an engine may still write go into quarantine.
        """
        if not orders:
            return
        pull = self.begin(peer, orders, owner, expected)
        try:
            self.judge_data(pull, timeout_ms)
            self.adopt(pull, timeout_ms)
        finally:
            self.end(pull)

    def begin(self, peer: Peer, orders: Sequence[PageOrder], owner: int, expected: ExpectedPages) -> Pull:
        """The first part of `pull`: judges the descriptors and starts the copy. Every begun pull must be ended."""
        guard, refs = self._guard, tuple(o.local for o in orders)
        descs = [order.desc for order in orders]
        self._judge(
            "descriptor",
            map(
                judge_descriptor, descs, repeat(peer.export), repeat(guard.layout), repeat(expected),
                repeat(guard.checks),
            ),
        )  # fmt: skip
        guard.prepare_landing(refs, owner)
        try:
            pairs = [PagePair(desc.ref.page_id, ref.page_id) for desc, ref in zip(descs, refs, strict=True)]
            transfer = self._engine.read_pages(peer, pairs)
        except BaseException:
            guard.prove(refs)
            raise
        return Pull(peer, tuple(orders), owner, expected, transfer)

    def judge_data(self, pull: Pull, timeout_ms: int) -> None:
        """The second part: waits for the copy and judges the bytes that arrived."""
        guard, orders = self._guard, pull.orders
        state = pull.transfer.wait(timeout_ms)
        if state is TransferState.FAILED:
            raise TransferError("transfer_failed", "the transfer engine could not read the peer's pages")
        if state is not TransferState.DONE:
            raise TransferTimeout("transfer_timeout", f"pages did not arrive within {timeout_ms} ms")
        refs, descs = [order.local for order in orders], [order.desc for order in orders]
        headers = guard.landed_headers(refs, [desc.header for desc in descs])
        self._judge("header", map(judge_header, headers, descs, repeat(pull.expected), repeat(guard.checks)))
        digests = guard.landed_digests(refs, pull.transfer.body_sums)
        self._judge("digest", map(judge_digest, digests, descs, repeat(guard.checks)))

    def adopt(self, pull: Pull, timeout_ms: int) -> None:
        """The third part: the source's tags, which must be read after the data, and then the pages are ours."""
        guard, orders = self._guard, pull.orders
        live = self._engine.read_tags(pull.peer, timeout_ms)
        descs = [order.desc for order in orders]
        known = [desc.ref.page_id for desc in descs if 0 <= desc.ref.page_id < len(live)]
        tags = dict(zip(known, map(tuple, live[known].tolist()), strict=True))
        self._judge("source_tag", map(judge_source, repeat(tags), descs, repeat(guard.checks)))
        if guard.checks.quarantine and not self._quiet(pull.transfer):
            raise TransferError("not_quiet", "the engine says done and has not proved that it stopped writing")
        guard.adopt(
            [
                (o.local, PageHeader(o.local.tag, d.layout_fingerprint, d.first_position, d.valid_rows, d.prefix_key))
                for o in orders
                for d in (o.desc,)
            ],
            pull.owner,
        )
        guard.count("pages_received", len(orders))

    def end(self, pull: Pull) -> None:
        """The last part, however the others went: the pages stay on hold until the engine is proved quiet."""
        with self._lock:
            self._unproved.append((pull.transfer, tuple(o.local for o in pull.orders)))
        self.sweep()

    def sweep(self) -> int:
        """Ends holds of transfers that have proved to be quiet. Call it now and then, also when idle. Returns how many
        transfers are still unproved."""
        with self._lock:
            for entry in tuple(self._unproved):
                transfer, refs = entry
                if self._quiet(transfer):
                    self._unproved.remove(entry)
                    self._guard.prove(refs)
            return len(self._unproved)

    def _quiet(self, transfer: Transfer) -> bool:
        try:
            return transfer.quiesced()
        except Exception:  # an engine that cannot answer has proved nothing, and must not keep the others waiting
            self._guard.count("quiesced_failed")
            return False

    def _judge(self, name: str, judging: Iterator[None]) -> None:
        """Judges page after page; the first that fails ends the batch. Counted once a batch."""
        passed = 0
        try:
            for passed, _ in enumerate(judging, 1):  # noqa: B007 # how many passed before the one that raises
                pass
        except GenlockError as error:
            self._guard.count(f"receipt_{name}/{error.reason}")
            raise
        finally:
            if passed:
                self._guard.count(f"receipt_{name}/ok", passed)
