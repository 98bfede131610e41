"""Copies of pages: what may go wrong in one, decided by the seed, and what must hold when it begins and when its pages
are adopted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.descriptor import PageDescriptor
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder
from kvstore.transfer.base import PagePair, Peer
from kvstore.transfer.faults import BitFlip, Ending, TransferFaults, TransferInfo
from kvstore.transfer.memory import MemoryTransfer

if TYPE_CHECKING:
    from sim.decode_side import Copy, DecodeWorker
    from sim.prefill_side import PrefillWorker
    from sim.world import World


class Copies:
    """`starting` is set before each copy begins: who reads from whom."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.dice
        self.last_ending = Ending.HONEST
        self.starting: tuple[PrefillWorker, DecodeWorker] | None = None

    # --- what happens to one -----------------------------------------------------------------------------------------

    def plan(self, info: TransferInfo) -> TransferFaults:
        """The faults of one copy; at most one kind, and a delay."""
        dice, rng = self._dice, self._dice.stream("copies")
        delay_ms = rng.randrange(3)
        if dice.hit("slow_copy"):
            delay_ms = rng.randrange(1, self._world.shape.max_copy_delay_ms + 1)
        made = self._kind_of_fault(info)
        self.last_ending = made.ending
        assert self.starting is not None
        prefill, decode = self.starting
        one, other, until_ms = self._world.partition
        if (one, other) == (prefill.name, decode.name):
            delay_ms = max(delay_ms, until_ms - self._world.heap.now_ms)
        return replace(
            made, delay_ms=delay_ms + (rng.randrange(1, 40) if made.ending is not Ending.HONEST else 0),
            wrap_out_of_range=self._dice.hit("wrap_out_of_range"), follow_restart=self._dice.hit("follow_restart"),
        )  # fmt: skip

    def _kind_of_fault(self, info: TransferInfo) -> TransferFaults:
        dice, rng, pages = self._dice, self._dice.stream("copies/how"), info.pages
        one, other = rng.randrange(pages), rng.randrange(pages)
        byte, bit = rng.randrange(info.source.slot_bytes), rng.randrange(8)
        for site, ending in (
            ("copy_dropped", Ending.DROP), ("early_notice", Ending.EARLY_NOTICE), ("late_bytes", Ending.LATE),
            ("error_rest_lands", Ending.ERROR_REST_LANDS), ("connection_lost", Ending.PEER_LOSS),
        ):  # fmt: skip
            if dice.hit(site):
                return TransferFaults(ending=ending, landed_pages=one)
        if dice.hit("short_page"):
            return TransferFaults(short_tail_bytes=byte + 1, short_page=one)
        if dice.hit("torn_page"):
            return TransferFaults(torn_page=one)
        if dice.hit("reverse_order"):
            return TransferFaults(reverse_order=True)
        if pages > 1 and dice.hit("duplicate_page"):
            return TransferFaults(duplicate=(one, other))
        if pages > 1 and dice.hit("swapped_pages"):
            return TransferFaults(swap=(one, other))
        if dice.hit("bit_flip"):
            return TransferFaults(bit_flips=(BitFlip(one, byte, bit),))
        return TransferFaults()

    def again_ms(self, transfer: MemoryTransfer) -> int:
        if transfer.due_ms is None or not self._dice.hit("sent_twice"):
            return 0
        return self._dice.stream("sent_twice/when").randrange(1, 60)

    def of(self, transfer: MemoryTransfer) -> Copy | None:
        copies = (c for d in self._world.decodes for c in d.copies)
        return next((c for c in copies if c.pull.transfer is transfer), None)

    def ended(self, transfer: MemoryTransfer) -> None:
        copy = self.of(transfer)
        if copy is not None:
            copy.quiet_ms = self._world.heap.now_ms
            guard = copy.attempt.prefill.guard
            copy.source_live = all(guard.is_live(o.desc.ref) for o in copy.pull.orders)

    def between_halves(self, pair: PagePair) -> None:
        transfer = self._world.fabric.landing
        copy = self.of(transfer) if transfer is not None else None
        if copy is not None:
            self._world.mischief.recycle_source(copy.attempt.prefill)

    # --- laws -----------------------------------------------------------------------------------------------------

    def judge_begun(self, peer: Peer, orders: Sequence[PageOrder], expected: ExpectedPages) -> None:
        """A copy began: each descriptor is the one of its place, generation and digest apart."""
        guard = next((p.guard for p in self._world.prefills if p.guard.incarnation == peer.export.incarnation), None)
        for order in orders:
            desc, made = order.desc, None
            if guard is not None and 0 <= desc.ref.page_id < guard.slots:
                layout = self._world.kit.layouts[self._world.shape.layout]
                made = PageDescriptor(
                    desc.ref, desc.logical_index, desc.logical_index * expected.page_tokens,
                    expected.valid_rows(desc.logical_index), guard.layout.slot_bytes, layout.fingerprint,
                    expected.keys[desc.logical_index], desc.digest,
                )  # fmt: skip
            own = guard is None or desc.ref.tag.incarnation == guard.incarnation
            if guard is not None and (made != desc or not own):
                self._world.laws.broken("forged_descriptor", f"page {desc.ref.page_id} for place {desc.logical_index}")

    def judge_adopted(self, copy: Copy) -> None:
        """Pages were adopted: they hold the request's KV, and their sources were live until they landed."""
        attempt = copy.attempt
        decode = attempt.decode
        if copy.source_live is False:
            self._world.laws.broken("adopted_stale", f"{decode.name} request {attempt.request_no}")
        oracle = self._world.oracle(attempt.start.ticket.token_ids)
        for order in copy.pull.orders:
            start = order.desc.logical_index * copy.pull.expected.page_tokens
            rows = copy.pull.expected.valid_rows(order.desc.logical_index)
            held = decode.compute.kv_of_page(decode.guard.bytes_of(order.local.page_id), rows)
            if held != oracle.kv(start, start + rows):
                self._world.laws.broken("adopted_wrong_bytes", f"{decode.name} request {attempt.request_no}")
