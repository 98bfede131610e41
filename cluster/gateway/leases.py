"""Single leases, for operators: every prefill worker of this gateway is asked at once, within a limit. Who does not
answer is named in the reply; nobody waits longer for that."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterable

from cluster.gateway.fleet import WorkerRecord
from cluster.gateway.peers import MAX_DETAIL_CHARS
from cluster.gateway.state import GatewayState
from cluster.roles import Role
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import worker_pb2
from wire.calls import answer
from wire.errors import surprise

Told = worker_pb2.WorkerLeases | pb.UnreachedWorker


async def list_leases(state: GatewayState, limit: int) -> pb.ListLeasesResponse:
    """Never raises for what workers do."""
    workers = sorted(state.fleet.workers.values(), key=lambda record: record.worker_id)
    # One that counts as unreachable too: a step loop that stands still answers, and is what somebody looks for.
    asked = (_ask(state, record, limit) for record in workers if record.role is Role.PREFILL)
    told = await asyncio.gather(*asked)
    return merged_leases(told, awaited(workers), limit)


async def _ask(state: GatewayState, record: WorkerRecord, limit: int) -> Told:
    timeout_s = state.config.workers.status_timeout_ms / 1000
    request = worker_pb2.WorkerLeasesRequest(limit=limit)
    try:
        return await answer(state.worker_stub(record.endpoint).Leases(request, timeout=timeout_s))
    except Exception as exc:
        error = surprise(exc, f"a question for the leases of {record.worker_id}")
        return pb.UnreachedWorker(
            worker_id=record.worker_id, reason=error.reason, detail=error.message[:MAX_DETAIL_CHARS]
        )


def merged_leases(told: Iterable[Told], waits: Iterable[pb.AwaitedHandoffs], limit: int) -> pb.ListLeasesResponse:
    """The oldest of all workers. Pure."""
    answers: list[worker_pb2.WorkerLeases] = []
    unreached: list[pb.UnreachedWorker] = []
    for one in told:
        if isinstance(one, pb.UnreachedWorker):
            unreached.append(one)
        else:
            answers.append(one)
    every = (lease for part in answers for lease in part.leases)
    oldest = heapq.nlargest(limit, every, key=lambda lease: lease.age_ms)
    total = sum(part.total for part in answers)
    return pb.ListLeasesResponse(leases=oldest, total=total, unreached=unreached, awaited=waits)


def awaited(workers: Iterable[WorkerRecord]) -> list[pb.AwaitedHandoffs]:
    """What decode workers last said that they wait for. Pure."""
    return [
        pb.AwaitedHandoffs(decode_worker=record.worker_id, prefill_worker=prefill, handoffs=count)
        for record in workers if record.status is not None
        for prefill, count in sorted(record.status.owed_handoffs.items())
    ]  # fmt: skip
