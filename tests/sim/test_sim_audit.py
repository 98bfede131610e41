"""Which workers' books are audited after an event: all that it changed."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.checks import ALL_CHECKS
from sim.decode_side import DecodeWorker
from sim.faults import sample_faults
from sim.prefill_side import PrefillWorker
from sim.worker import Worker
from sim.world import World, make_kit

KIT = make_kit()


def books(worker: Worker) -> object:
    """All that the audit of a worker reads, without touching it."""
    slots = [(s.state, s.owner, s.shares, s.leases, s.holds) for s in worker._guard.book_slots()]
    claims: object = ()
    if isinstance(worker, PrefillWorker):
        running = [
            (seq.request_no, seq.sealed, seq.pages.refs, tuple(seq.private)) for seq in worker._core._running.values()
        ]
        claims = running, [(number, lease.refs) for number, lease in worker._core.leases._leases.items()]
    elif isinstance(worker, DecodeWorker):
        claims = [(one.request_no, one.pages.refs) for one in worker._core._requests.values()], worker.landing()
    return worker.life, slots, worker._guard.counts(), claims, sorted(worker.steps.holding)


@pytest.mark.parametrize("seed", [3, 8, 1_000_003])
def test_a_worker_that_no_event_touched_has_the_same_books(seed: int) -> None:
    world = World(seed, KIT, sample_faults(seed), ALL_CHECKS)
    known: dict[str, object] = {}
    seen: Counter[str] = Counter()
    for _ in range(3000):
        if world.finished():
            break
        world.heap.run_next()
        for worker in world.workers:
            if not worker.alive:
                continue
            now = books(worker)
            if worker.touched:
                seen["changed" if known.get(worker.name) != now else "touched"] += 1
            else:
                assert now == known[worker.name], f"{worker.name} changed in event {world.heap.events}"
                seen["left alone"] += 1
            known[worker.name] = now
            worker.touched = False
        if world.heap.now_ms >= world.calm_ms:
            world.mischief.stop()
    assert all(seen[kind] > 100 for kind in ("changed", "left alone")), seen
