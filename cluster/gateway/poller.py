"""Asks every worker for its status, all at once, again and again, each question with a deadline.

Each pair of a decode and a prefill worker that has not proved an exchange of a page for the prefill worker's present
life is asked to, beside these rounds: an exchange that hangs keeps nobody's status waiting.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster.gateway.fleet import WorkerRecord
from cluster.gateway.pairs import Pairs
from cluster.gateway.state import GatewayState
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError
from wire.calls import answer
from wire.ending import end_tasks
from wire.errors import surprise
from wire.loops import keep_going

MAX_CHECKS = 64  # exchanges at a time
CHECK_MARGIN_MS = 10_000  # beyond the exchange's own time: the question for the pool, a place in the queue
FIRST_RETRY_MS = 500.0
LONGEST_RETRY_MS = 30_000.0

Pair = tuple[str, str, int]  # decode worker, prefill worker, the prefill pool's incarnation


@dataclass(frozen=True)
class Failed:
    """A pair that did not pass: when to ask again, and how long to wait after that."""

    retry_at_ms: float
    wait_ms: float


class Poller:
    def __init__(self, state: GatewayState) -> None:
        self._state = state
        self._task: asyncio.Task[None] | None = None
        self._checks: dict[Pair, asyncio.Task[None]] = {}
        self._failed: dict[Pair, Failed] = {}
        self._pairs = Pairs()

    @property
    def checking(self) -> bool:
        """Whether an exchange of a page is under way."""
        return bool(self._checks)

    def start(self) -> None:
        self._task = asyncio.create_task(
            keep_going(self._again, "the worker poller", self._state.surprised), name="worker poller"
        )

    async def stop(self) -> None:
        tasks = [*([self._task] if self._task is not None else []), *self._checks.values()]
        self._task = None
        await end_tasks(tasks)

    async def look(self) -> None:
        """One round over all workers; then unproved pairs begin to prove themselves."""
        workers = list(self._state.fleet.workers.values())
        await asyncio.gather(*(self._ask(record.worker_id, record.endpoint) for record in workers))
        self._check_pairs()

    async def _again(self) -> None:
        await self.look()
        await self._state.pause(self._state.config.workers.status_poll_ms)

    async def _ask(self, worker_id: str, endpoint: str) -> None:
        state = self._state
        timeout_s = state.config.workers.status_timeout_ms / 1000
        try:
            call = state.worker_stub(endpoint).Status(worker_pb2.WorkerStatusRequest(), timeout=timeout_s)
            status = await answer(call)
        except Exception as exc:
            # One worker's surprise keeps no other's answer away.
            state.set_fleet(state.fleet.failed(worker_id, endpoint, self._typed(exc, f"a question to {worker_id}")))
        else:
            state.set_fleet(state.fleet.answered(worker_id, endpoint, status))

    def _typed(self, exc: Exception, where: str) -> GenlockError:
        if not isinstance(exc, GenlockError):
            self._state.surprised()
        return surprise(exc, where)

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _check_pairs(self) -> None:
        now_ms = self._state.sources.now_ms()
        pairs = self._pairs
        pairs.look(self._state.fleet)
        self._failed = {pair: failed for pair, failed in self._failed.items() if pairs.owes(*pair)}
        if len(self._checks) >= MAX_CHECKS:
            return
        for decode, prefill in pairs.owed():
            pair = _pair(decode, prefill)
            failed = self._failed.get(pair)
            if pair in self._checks or (failed and failed.retry_at_ms > now_ms):
                continue
            task = asyncio.create_task(self._check(pair, decode, prefill), name=f"check {pair[0]} and {pair[1]}")
            self._checks[pair] = task
            task.add_done_callback(lambda _task, pair=pair: self._checks.pop(pair, None))  # type: ignore[misc] # default
            if len(self._checks) >= MAX_CHECKS:
                return

    async def _check(self, pair: Pair, decode: WorkerRecord, prefill: WorkerRecord) -> None:
        state = self._state
        request = worker_pb2.CheckPeerRequest(prefill_endpoint=prefill.endpoint, prefill_worker=prefill.worker_id)
        timeout_s = (state.config.transfer.timeout_ms + CHECK_MARGIN_MS) / 1000
        try:
            call = state.decode_stub(decode.endpoint).CheckPeer(request, timeout=timeout_s)
            proof = (await answer(call)).proof
        except Exception as exc:
            error = self._typed(exc, f"a check of {decode.worker_id} and {prefill.worker_id}")
            proof = worker_pb2.PeerProof(
                worker_id=prefill.worker_id, incarnation=pair[2], reason=error.reason, detail=error.message[:256]
            )
        state.set_fleet(state.fleet.checked(decode.worker_id, decode.endpoint, proof))
        if not proof.passed:
            before = self._failed.get(pair)
            wait_ms = FIRST_RETRY_MS if before is None else min(2 * before.wait_ms, LONGEST_RETRY_MS)
            self._failed[pair] = Failed(state.sources.now_ms() + wait_ms, wait_ms)


def _pair(decode: WorkerRecord, prefill: WorkerRecord) -> Pair:
    return decode.worker_id, prefill.worker_id, prefill.status.incarnation if prefill.status is not None else 0
