"""The controller's questions to workers, over gRPC, each with a deadline; and what an answer means. No retries here."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.control.state import Told
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import DeadlineExceeded
from wire.calls import answer
from wire.dial import Channels, Dialer


class GrpcAsker:
    def __init__(self, dialer: Dialer | None = None) -> None:
        self._channels = Channels(dialer)

    async def status(self, endpoint: str, timeout_ms: int) -> worker_pb2.WorkerStatus:
        stub = await self._stub(endpoint)
        return await answer(stub.Status(worker_pb2.WorkerStatusRequest(), timeout=timeout_ms / 1000))

    async def drain(self, endpoint: str, open_ms: int, timeout_ms: int) -> None:
        """A call that runs into its time has been heard all the same: it waits there for the drain's end."""
        stub = await self._stub(endpoint)
        try:
            await answer(stub.Drain(worker_pb2.DrainRequest(open_ms=open_ms), timeout=timeout_ms / 1000))
        except DeadlineExceeded:
            if not (await self.status(endpoint, timeout_ms)).draining:
                raise

    async def check(self, endpoint: str, prefill_endpoint: str, prefill_worker: str, timeout_ms: int) -> None:
        stub = worker_pb2_grpc.DecodeServiceStub(await self._channels.get(endpoint))
        request = worker_pb2.CheckPeerRequest(prefill_endpoint=prefill_endpoint, prefill_worker=prefill_worker)
        await answer(stub.CheckPeer(request, timeout=timeout_ms / 1000))

    async def close(self) -> None:
        await self._channels.close()

    async def _stub(self, endpoint: str) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(await self._channels.get(endpoint))


def told_of(
    status: worker_pb2.WorkerStatus, worker_id: str, life: int, asked_ms: int, peers: Mapping[str, int]
) -> Told:
    """Pure. `peers`: present incarnations of prefill workers; proofs about earlier lives say nothing."""
    fault, proofs = "", [proof for proof in status.peers if peers.get(proof.worker_id) == proof.incarnation]
    if status.worker_id != worker_id:
        fault = f"{status.role} worker {status.worker_id[:64]!r} answers at its endpoint"
    elif status.proves_peers and proofs and not any(proof.passed for proof in proofs):
        fault = f"its exchange of a page with {proofs[0].worker_id} failed: {proofs[0].detail or proofs[0].reason}"
    return Told(
        worker_id, life, asked_ms, status.incarnation, fault=fault[:256], running=status.running_requests,
        waiting=status.waiting_requests, leases=status.leases, draining=status.draining,
        step_age_ms=status.step_age_ms, owed=dict(status.owed_handoffs),
        proves=status.proves_peers, tried={proof.worker_id: proof.incarnation for proof in proofs},
    )  # fmt: skip
