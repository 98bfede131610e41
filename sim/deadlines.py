"""Nothing waits for ever: every open request, handoff, copy and promise has a due time, and is over soon after it.

Due times are the simulator's own, in its true time. A worker looks at its clock once a tick, and a clock that jumped
back gives everybody as much longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.decode_side import FINISH_MS, PULL_TIMEOUT_MS, DecodeWorker
from sim.prefill_side import PrefillWorker
from sim.worker import TICK_MS, Worker

if TYPE_CHECKING:
    from sim.world import World


def judge(world: World) -> None:
    for request in world.requests:
        if not request.ended:
            at = request.at_decode
            _require(world, at[0] if at else None, request.due_ms, f"request {request.number}")
    for decode in world.decodes:
        if decode.alive:
            _questions(world, decode)
            _for_nobody(world, decode)
            _handoffs(world, decode)
            _copies(world, decode)
    for prefill in world.prefills:
        if prefill.alive:
            _promises(world, prefill)


def _questions(world: World, decode: DecodeWorker) -> None:
    """Who computes a preempted request again is answered in time, or the request has ended."""
    for number, asked_ms in decode.asked_ms.items():
        due_ms = asked_ms + decode.limits.assign_ms
        _require(world, decode, due_ms, f"{decode.name}: the question of request {number}")


def _for_nobody(world: World, decode: DecodeWorker) -> None:
    """What a gateway has given up ends at decode as soon as decode hears of it."""
    for request in decode.requests.values():
        if request.given_up:
            _require(world, None, request.due_ms, f"{decode.name}: request {request.number}, which was given up,")


def _handoffs(world: World, decode: DecodeWorker) -> None:
    """A handoff is due with its request, so it must have one that is open."""
    for number, attempt in decode.attempts.items():
        request = decode.requests.get(number)
        ended = request is None or (request.ended and not request.given_up)
        if ended or attempt.closed:
            world.laws.broken("overdue", f"{decode.name}: a handoff without a request, {number}")


def _copies(world: World, decode: DecodeWorker) -> None:
    for copy in decode.copies:
        what = f"{decode.name}: a copy of request {copy.attempt.request_no}"
        if not copy.finished:
            _require(world, None, copy.begun_ms + PULL_TIMEOUT_MS + FINISH_MS, what)
        elif copy.quiet_ms is not None and copy.pull.transfer.quiesced():
            # One that never becomes quiet keeps its pages: nothing else is safe.
            _require(world, None, copy.quiet_ms, f"{what}, quiet and not swept")


def _promises(world: World, prefill: PrefillWorker) -> None:
    """Of handoffs that were completed. One that waits or computes is due when its caller goes."""
    for handoff_id in prefill._core.leases._leases:
        seq = prefill._core._promised.get(handoff_id)
        if seq is None or handoff_id not in prefill.promised_ms:
            world.laws.broken("overdue", f"{prefill.name}: a lease that nobody asked for")
        elif seq.completed:
            due_ms = prefill.promised_ms[handoff_id] + prefill.limits.lease_ms
            _require(world, prefill, due_ms, f"{prefill.name}: the lease of request {seq.request_no}")


def _require(world: World, worker: Worker | None, due_ms: int, what: str) -> None:
    allowed_ms = TICK_MS + (worker.behind_ms if worker is not None else 0)
    late_ms = world.heap.now_ms - due_ms
    if late_ms > allowed_ms:
        world.laws.broken("overdue", f"{what} is {late_ms} ms late")
