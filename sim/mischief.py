"""Faults that strike the cluster by themselves: crashes, partitions, pressure, rot, rude calls. Driven by a timer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.errors import GenlockError, LifecycleError, NotFound
from kvstore.header import PageHeader
from kvstore.ids import PageRef
from kvstore.lifecycle import Slot, SlotState
from kvstore.registry import IncarnationRegistry
from sim.decode_side import Attempt, DecodeWorker
from sim.gateway_side import Gateway
from sim.prefill_side import PrefillWorker
from sim.watch import WatchedGuard
from sim.worker import Worker

if TYPE_CHECKING:
    from sim.world import World

PERIOD_MS = 10
RESTART_MS = 15
BEAT_MS = 40  # so soon a living worker registers again
HOG = 1 << 40  # owner numbers that no request has
STRANGER = HOG + 1
RUDE_CALLS = 12
_BookCall = Callable[[tuple[PageRef, ...]], None]


class Mischief:
    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.dice
        self._rng = world.dice.stream("mischief")
        self._hogs: list[tuple[Worker, int, tuple[PageRef, ...]]] = []
        if world.dice.armed:
            world.heap.after(PERIOD_MS, "mischief", self._turn)

    def stop(self) -> None:
        """Faults are over: what was taken is given back, the dead come back."""
        self._dice.over = True
        self._world.partition = ("", "", 0)
        self._world.list.up = True
        for hog in list(self._hogs):
            self._give_back(hog)
        self._world.controller.restore()
        for gateway in self._world.gateways:
            self._revive(gateway)

    def worker_gone(self, worker: Worker) -> None:
        self._hogs = [h for h in self._hogs if h[0] is not worker]

    def recycle_source(self, prefill: PrefillWorker) -> None:
        """While a page is half copied: its leases end and somebody else writes over what is free."""
        self._expire(prefill)
        guard = prefill.guard
        prefill.core.evict_all()
        refs = guard.allocate(HOG, guard.free_pages)
        for ref in refs:
            guard.rot(ref.page_id, 140 + self._rng.randrange(40), 3)
        guard.retire(refs, HOG)

    def end_lease(self, attempt: Attempt, gap: str) -> None:
        """Time runs out for a handoff's promise in one of its gaps; half of the times its pages are taken at once."""
        prefill, accepted = attempt.prefill, attempt.rules.accepted
        if accepted is None or not prefill.alive:
            return
        promised = accepted.handoff_id in prefill.core.leases
        if self._dice.stream("lease_expires/how").random() < 0.5:
            self._expire(prefill)
        else:
            self.recycle_source(prefill)
        if promised and accepted.handoff_id not in prefill.core.leases:
            self._world.tally.met[f"lease ends {gap}"] += 1

    def _expire(self, prefill: PrefillWorker) -> None:
        """The worker's clock runs ahead for a moment."""
        prefill.skew_ms += 1000
        prefill.tick()

    def _turn(self) -> None:
        if self._dice.over:
            return
        world, dice, rng = self._world, self._dice, self._rng
        if dice.hit("prefill_crash"):
            self._crash(rng.choice(world.prefills))
        if dice.hit("decode_crash"):
            self._crash(rng.choice(world.decodes))
        if dice.hit("partition"):
            pair = (rng.choice(world.prefills).name, rng.choice(world.decodes).name)
            world.partition = (*pair, world.heap.now_ms + rng.randrange(10, 150))
        if dice.hit("registry_loss"):
            self._forget(rng.choice(world.decodes))
        if dice.hit("gateway_death"):
            self._kill(rng.choice(world.gateways))
        self._fleet()
        if dice.hit("pool_pressure"):
            self._hog(rng.choice(world.workers))
        if dice.hit("cache_rot"):
            self._rot(rng.choice(world.prefills))
        if dice.hit("unknown_command"):
            self._unknown(rng.choice(world.prefills), rng.choice(world.decodes))
        if dice.hit("rude_call"):
            self._rude(rng.choice(world.workers))
        world.heap.after(PERIOD_MS, "mischief", self._turn)

    def leave_soon(self, prefill: PrefillWorker) -> None:
        """The worker that was just named for a preempted request goes: by a drain with enough time, or a crash."""
        rng = self._dice.stream("assigned_leaves/how")
        if rng.random() < 0.7:
            self._world.controller.drain_gently(prefill)
        else:
            prefill.later(rng.randrange(30), "crash", self._crash, prefill)

    def _fleet(self) -> None:
        """Operators at work, and a list that nobody can read for a while."""
        world, dice, rng, controller = self._world, self._dice, self._rng, self._world.controller
        for site, act in (
            ("cordon", controller.cordon), ("scale_down", controller.scale_down), ("restart_asked", controller.restart),
            ("drain_short", controller.drain_short), ("drain_rude", controller.drain_rude),
        ):  # fmt: skip
            if dice.hit(site):
                act(rng.choice(world.workers))
        if dice.hit("controller_crash") and controller.alive:
            controller.die()
            world.heap.after(RESTART_MS, "restart", self._again)
        if dice.hit("list_lost") and world.list.up:
            world.list.up = False
            world.heap.after(rng.randrange(20, 150), "list-back", self._list_back)

        if dice.hit("list_emptied"):
            world.list.empty()
            for worker in world.workers:
                worker.later(dice.stream("list_emptied/beat").randrange(1, BEAT_MS), "beat", world.list.beat, worker)

    def _again(self) -> None:
        if not self._world.controller.alive:
            self._world.controller.start()

    def _list_back(self) -> None:
        self._world.list.up = True

    def _kill(self, gateway: Gateway) -> None:
        if gateway.alive:
            gateway.die()
            self._world.heap.after(RESTART_MS, "restart", self._revive, gateway)

    def _revive(self, gateway: Gateway) -> None:
        if not gateway.alive:
            gateway.start()

    def _crash(self, worker: Worker) -> None:
        if not worker.alive:
            return
        world = self._world
        world.controller.crashed(worker)
        world.stop_worker(worker, "lost")

    def _forget(self, decode: DecodeWorker) -> None:
        """The registry comes back empty; what was dead is not known to be dead any more."""
        decode.registry = IncarnationRegistry()
        decode.peers._registry = decode.registry

    def _hog(self, worker: Worker) -> None:
        if not worker.alive or not worker.guard.free_pages:
            return
        refs = worker.guard.allocate(HOG, self._rng.randrange(1, worker.guard.free_pages + 1))
        hog = (worker, worker.life, refs)
        self._hogs.append(hog)
        worker.later(self._rng.randrange(5, 60), "hog-leaves", self._give_back, hog)

    def _give_back(self, hog: tuple[Worker, int, tuple[PageRef, ...]]) -> None:
        if hog in self._hogs:
            self._hogs.remove(hog)
            hog[0].guard.retire(hog[2], HOG)
            hog[0].steps.kick()

    def _rot(self, prefill: PrefillWorker) -> None:
        """A bit flips in a cached page that nobody computes from at the moment."""
        if not prefill.alive:
            return
        guard = prefill.guard
        idle = [ref for ref in guard.ledger if guard.is_live(ref) and not guard.book_slot(ref.page_id).shares]
        if idle:
            guard.rot(self._rng.choice(idle).page_id, self._rng.randrange(192), self._rng.randrange(8))

    def _unknown(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        """Commands for things that nobody knows; they must change nothing."""
        if prefill.alive:
            with contextlib.suppress(NotFound):
                prefill.core.renew(self._rng.randbytes(16), prefill.now)
            with contextlib.suppress(NotFound):
                prefill.core.release(self._rng.randbytes(16))
            prefill.core.cancel(1 << 30)
        if decode.alive:
            decode.on_cancel(1 << 30)

    def _rude(self, worker: Worker) -> None:
        """Calls of the book that a slot's state does not allow: refused, and nothing changes."""
        # Without quarantine the book lets counts of pages that were given away end quietly.
        for _ in range(RUDE_CALLS if worker.alive and self._world.checks.quarantine else 0):
            guard, rng = worker.guard, self._rng
            rare = [i for i in range(guard.slots) if guard.slot_state(i) is SlotState.QUARANTINED]
            page_id = rng.choice(rare) if rare and rng.random() < 0.5 else rng.randrange(guard.slots)
            slot = guard.book_slot(page_id)
            ref = PageRef(page_id, guard._book.live_tag(page_id))
            try:
                rng.choice(_rude_calls(guard, slot))((ref,))
            except GenlockError:
                continue
            self._world.laws.broken("refusal_changed_state", f"{worker.name}: a rude call was allowed")


def _rude_calls(guard: WatchedGuard, slot: Slot) -> tuple[_BookCall, ...]:
    """What must be refused for a page in this state, by a stranger who knows its tag."""

    def retire(refs: tuple[PageRef, ...]) -> None:
        guard.retire(refs, STRANGER)

    def seal(refs: tuple[PageRef, ...]) -> None:
        header = PageHeader(refs[0].tag, guard.layout.fingerprint, 0, 1, bytes(32))
        guard.seal(refs[0], slot.owner, header, 0)

    def land(refs: tuple[PageRef, ...]) -> None:
        guard.prepare_landing(refs, slot.owner)

    def condemn(refs: tuple[PageRef, ...]) -> None:
        if guard.condemn(refs) == 0:
            raise LifecycleError("passed_over")

    if slot.state is SlotState.OPEN:
        return guard.share, guard.lease, guard.unshare, guard.release, retire
    if slot.state is SlotState.SEALED:
        return retire, land, seal
    if slot.state is SlotState.FREE:
        return guard.share, guard.lease, guard.hold, guard.unshare, guard.release, guard.prove, retire, seal, condemn
    return guard.share, guard.lease, guard.hold, retire, seal, condemn
