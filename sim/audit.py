"""The books, audited: what must be true between any two events, and at the end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.lifecycle import CACHE_OWNER, SlotState
from sim.decode_side import DecodeWorker
from sim.mischief import HOG
from sim.prefill_side import PrefillWorker
from sim.worker import Worker

if TYPE_CHECKING:
    from sim.world import World


def light(world: World) -> None:
    """After every event: no page is lost."""
    for worker in world.workers:
        if worker.alive and not worker.guard.conserves_pages():
            world.laws.broken("page_lost", f"{worker.name}: {worker.guard.counts()}")


def heavy(world: World) -> None:
    """Every few events: each slot's state, owner and counts against everybody who claims it."""
    for worker in world.workers:
        if worker.alive:
            _states(world, worker)
            if isinstance(worker, PrefillWorker):
                _prefill(world, worker)
            elif isinstance(worker, DecodeWorker):
                _decode(world, worker)


def settle(world: World) -> None:
    """Everything has ended: every page must be back, quarantined ones after the engines' proof."""
    laws = world.laws
    for request in world.requests:
        laws.require(request.ended, "never_ended", f"request {request.number}")
    for request in world.probes:
        ok = request.error is None
        laws.require(ok, "not_in_service", f"request {request.number} by {request.gateway.name}: {request.error!r}")
    for gateway in world.gateways:
        laws.require(not gateway.ledger.loads, "claims_left", f"{gateway.name}: {dict(gateway.ledger.loads)}")
        laws.require(not len(gateway.roll), "claims_left", f"{gateway.name} has {len(gateway.roll)} on its roll")
    world.controller.judge_overdue()
    world.fabric.land_all()
    for decode in (d for d in world.decodes if d.alive):
        decode.receiver.sweep()
        unproved = {o.local.page_id for c in decode.copies if not c.pull.transfer.quiesced() for o in c.pull.orders}
        counts = decode.guard.counts()
        laws.require(counts.quarantined <= len(unproved), "pages_not_back", f"{decode.name}: {counts} before the proof")
        decode.engine.close()
        laws.require(decode.receiver.sweep() == 0, "pages_not_back", f"{decode.name}: a copy outlives its engine")
        counts = decode.guard.counts()
        laws.require(counts.free == counts.total, "pages_not_back", f"{decode.name}: {counts}")
    for prefill in (p for p in world.prefills if p.alive):
        # An entry of a page that was taken away is a miss, not a page.
        cached = sum(prefill.guard.is_live(ref) for _, ref in prefill.core.index.oldest())
        counts = prefill.guard.counts()
        back = counts.sealed == cached and counts.free + counts.sealed == counts.total
        laws.require(back, "pages_not_back", f"{prefill.name}: {counts}, {cached} cached")
        prefill.core.evict_all()
        counts = prefill.guard.counts()
        laws.require(counts.free == counts.total, "pages_not_back", f"{prefill.name}: {counts} after eviction")
    for worker in world.workers:
        worker.guard.note_into(world.heap.note_bytes)


def _states(world: World, worker: Worker) -> None:
    guard = worker.guard
    seen = Counter(slot.state for slot in guard.book_slots())
    counts = guard.counts()
    told = (counts.free, counts.open, counts.sealed, counts.quarantined)
    order = (SlotState.FREE, SlotState.OPEN, SlotState.SEALED, SlotState.QUARANTINED)
    world.laws.require(tuple(seen[s] for s in order) == told, "page_lost", f"{worker.name}: {counts} but {dict(seen)}")


def _prefill(world: World, worker: PrefillWorker) -> None:
    guard, core, laws = worker.guard, worker.core, world.laws
    shares: Counter[int] = Counter()
    leases: Counter[int] = Counter()
    claims: dict[int, int] = {}
    for seq in core._running.values():
        shares.update(r.page_id for r in seq.pages.refs[: seq.sealed])
        private = set(seq.private)
        for i, ref in enumerate(seq.pages.refs):
            if guard.is_live(ref) and (i >= seq.sealed or ref in private):
                _claim(world, worker, claims, ref.page_id, seq.request_no)
    for lease in core.leases._leases.values():
        leases.update(r.page_id for r in lease.refs)
    for page_id, slot in enumerate(guard.book_slots()):
        counted = shares.get(page_id, 0), leases.get(page_id, 0), int(page_id in worker.steps.holding)
        if (slot.shares, slot.leases, slot.holds) != counted:
            laws.broken("counts_differ", f"{worker.name} page {page_id}: {slot}, {counted} count")
        if slot.state is SlotState.SEALED and slot.owner == CACHE_OWNER:
            _claim(world, worker, claims, page_id, CACHE_OWNER)


def _decode(world: World, worker: DecodeWorker) -> None:
    guard, core = worker.guard, worker.core
    claims: dict[int, int] = {}
    for request in core._requests.values():
        for ref in request.pages.refs:
            if guard.is_live(ref):
                _claim(world, worker, claims, ref.page_id, request.request_no)
    holds = Counter((*worker.landing(), *worker.steps.holding))
    for page_id, slot in enumerate(guard.book_slots()):
        counted = 0, 0, holds.get(page_id, 0)
        if (slot.shares, slot.leases, slot.holds) != counted:
            world.laws.broken("counts_differ", f"{worker.name} page {page_id}: {slot}, {counted} count")
        owned = slot.state in (SlotState.OPEN, SlotState.SEALED)
        if owned and slot.owner != HOG and page_id not in claims:
            world.laws.broken("two_owners", f"{worker.name} page {page_id} belongs to {slot.owner}, who has no use")


def _claim(world: World, worker: Worker, claims: dict[int, int], page_id: int, owner: int) -> None:
    if page_id in claims or worker.guard.book_slot(page_id).owner != owner:
        world.laws.broken("two_owners", f"{worker.name} page {page_id} is claimed by {owner}")
    claims[page_id] = owner
