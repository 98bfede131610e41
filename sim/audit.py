"""The books, audited: what must be true between any two events, and at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from kvstore.lifecycle import CACHE_OWNER, SlotState
from sim.decode_side import DecodeWorker
from sim.mischief import HOG
from sim.prefill_side import PrefillWorker
from sim.worker import Worker

if TYPE_CHECKING:
    from sim.world import World

# All slots of all pools are looked at again and again: half of a run's time is here, so the loops over them are C's.
_STATE, _PINS, _NO_PINS = attrgetter("state"), attrgetter("shares", "leases", "holds"), (0, 0, 0)
_OWNED = (SlotState.OPEN, SlotState.SEALED)


def light(world: World) -> None:
    """After every event: no page is lost."""
    for worker in world.workers:
        if worker.alive and not worker._guard.conserves_pages():
            world.laws.broken("page_lost", f"{worker.name}: {worker._guard.counts()}")


def books(world: World, *, every: bool) -> None:
    """After every event, of each worker that it touched, and of all (`every`) now and then: each slot's state, owner
    and counts against everybody who claims it."""
    for worker in world.workers:
        if worker.alive and (every or worker.touched):
            worker.touched = False
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
    guard = worker._guard
    seen = Counter(map(_STATE, guard.book_slots()))
    counts = guard.counts()
    told = (counts.free, counts.open, counts.sealed, counts.quarantined)
    order = (SlotState.FREE, SlotState.OPEN, SlotState.SEALED, SlotState.QUARANTINED)
    if tuple(seen[state] for state in order) != told:
        world.laws.broken("page_lost", f"{worker.name}: {counts} but {dict(seen)}")


def _prefill(world: World, worker: PrefillWorker) -> None:
    guard, core = worker._guard, worker._core
    shares: Counter[int] = Counter()
    claims: dict[int, int] = {}
    for seq in core._running.values():
        shares.update(r.page_id for r in seq.pages.refs[: seq.sealed])
        private = set(seq.private)
        mine = (ref for i, ref in enumerate(seq.pages.refs) if i >= seq.sealed or ref in private)
        _claim(world, worker, claims, (ref.page_id for ref in mine if guard.is_live(ref)), seq.request_no)
    leases = Counter(ref.page_id for lease in core.leases._leases.values() for ref in lease.refs)
    _pins(world, worker, shares, leases, dict.fromkeys(worker.steps.holding, 1))
    slots = guard.book_slots()
    cached = (i for i, slot in enumerate(slots) if slot.owner == CACHE_OWNER and slot.state is SlotState.SEALED)
    _claim(world, worker, claims, cached, CACHE_OWNER)


def _decode(world: World, worker: DecodeWorker) -> None:
    guard, core = worker._guard, worker._core
    claims: dict[int, int] = {}
    for request in core._requests.values():
        live = (ref.page_id for ref in request.pages.refs if guard.is_live(ref))
        _claim(world, worker, claims, live, request.request_no)
    _pins(world, worker, {}, {}, Counter((*worker.landing(), *worker.steps.holding)))
    for page_id, slot in enumerate(guard.book_slots()):
        if page_id not in claims and slot.state in _OWNED and slot.owner != HOG:
            world.laws.broken("two_owners", f"{worker.name} page {page_id} belongs to {slot.owner}, who has no use")


def _pins(
    world: World, worker: Worker, shares: Mapping[int, int], leases: Mapping[int, int], holds: Mapping[int, int]
) -> None:
    """Each page's shares, leases and holds are those that the claimants count, by page id."""
    slots = worker._guard.book_slots()
    counted = [_NO_PINS] * len(slots)
    for page_id in {*shares, *leases, *holds}:
        counted[page_id] = shares.get(page_id, 0), leases.get(page_id, 0), holds.get(page_id, 0)
    told = list(map(_PINS, slots))
    if told == counted:
        return
    page_id = next(i for i, pins in enumerate(counted) if pins != told[i])
    detail = f"{worker.name} page {page_id}: {slots[page_id]}, {counted[page_id]} count"
    world.laws.broken("counts_differ", detail)


def _claim(world: World, worker: Worker, claims: dict[int, int], page_ids: Iterable[int], owner: int) -> None:
    slots = worker._guard.book_slots()
    for page_id in page_ids:
        if page_id in claims or slots[page_id].owner != owner:
            world.laws.broken("two_owners", f"{worker.name} page {page_id} is claimed by {owner}")
        claims[page_id] = owner
