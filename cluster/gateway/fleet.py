"""What the gateway knows about workers. Pure: answers and failures of status calls in, a frozen table out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from cluster.roles import Role
from cluster.router import WorkerView
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError, NotFound, Unavailable


class WorkerState(StrEnum):
    READY = "READY"
    DRAINING = "DRAINING"
    UNREACHABLE = "UNREACHABLE"


@dataclass(frozen=True)
class FleetPolicy:
    # A refused connection counts at once; a late answer only when it repeats.
    late_answers: int = 3
    stall_ms: int = 60_000
    request_limit: int = 40


@dataclass(frozen=True)
class WorkerRecord:
    worker_id: str
    role: Role
    endpoint: str
    state: WorkerState = WorkerState.UNREACHABLE
    detail: str = "not asked yet"
    late_answers: int = 0
    # The last answer; None when unreachable.
    status: worker_pb2.WorkerStatus | None = None


@dataclass(frozen=True)
class Load:
    """What this gateway has outstanding at one worker."""

    tokens: int = 0
    requests: int = 0


@dataclass(frozen=True)
class Fleet:
    """All known workers. Every change returns a new fleet."""

    policy: FleetPolicy = field(default_factory=FleetPolicy)
    workers: Mapping[str, WorkerRecord] = field(default_factory=lambda: MappingProxyType({}))

    def added(self, worker_id: str, role: Role, endpoint: str) -> Fleet:
        return self._with(WorkerRecord(worker_id, role, endpoint))

    def removed(self, worker_id: str) -> Fleet:
        kept = {key: record for key, record in self.workers.items() if key != worker_id}
        return replace(self, workers=MappingProxyType(kept))

    def answered(self, worker_id: str, endpoint: str, status: worker_pb2.WorkerStatus) -> Fleet:
        """A worker told its status. An answer about another endpoint than the current one changes nothing."""
        record = self.workers.get(worker_id)
        if record is None or record.endpoint != endpoint:
            return self
        state, detail = WorkerState.READY, ""
        if status.worker_id != worker_id or status.role != record.role.value:
            state, detail = WorkerState.UNREACHABLE, f"{endpoint} is {status.role} worker {status.worker_id[:64]!r}"
        elif status.draining:
            state, detail = WorkerState.DRAINING, "takes no new requests"
        elif status.step_age_ms > self.policy.stall_ms:
            state, detail = WorkerState.UNREACHABLE, f"its step loop has stood still for {status.step_age_ms} ms"
        return self._with(replace(record, state=state, detail=detail, late_answers=0, status=status))

    def failed(self, worker_id: str, endpoint: str, error: GenlockError) -> Fleet:
        """A status call or a request could not reach the worker."""
        record = self.workers.get(worker_id)
        if record is None or record.endpoint != endpoint:
            return self
        late = record.late_answers + 1
        if not isinstance(error, Unavailable) and late < self.policy.late_answers:
            return self._with(replace(record, late_answers=late))
        return self._with(
            replace(record, state=WorkerState.UNREACHABLE, detail=error.message[:256], late_answers=late, status=None)
        )

    def view(self, loads: Mapping[str, Load]) -> tuple[WorkerView, ...]:
        """What the router sees."""
        return tuple(self._view(record, loads.get(record.worker_id, Load())) for record in self.workers.values())

    def serving(self) -> bool:
        """True when a request can be served at all."""
        ready = {record.role for record in self.workers.values() if record.state is WorkerState.READY}
        return ready == set(Role)

    def get(self, worker_id: str) -> WorkerRecord:
        try:
            return self.workers[worker_id]
        except KeyError:
            known = ", ".join(sorted(self.workers)) or "none"
            raise NotFound("unknown_worker", f"no worker {worker_id[:64]!r}; known: {known}") from None

    def _with(self, record: WorkerRecord) -> Fleet:
        return replace(self, workers=MappingProxyType({**self.workers, record.worker_id: record}))

    def _view(self, record: WorkerRecord, load: Load) -> WorkerView:
        return WorkerView(
            worker_id=record.worker_id,
            role=record.role,
            endpoint=record.endpoint,
            ready=record.state is WorkerState.READY,
            outstanding_tokens=load.tokens,
            outstanding_requests=load.requests,
            request_limit=self.policy.request_limit,
            layout_fingerprint=record.status.layout_fingerprint if record.status is not None else "",
        )


class Ledger:
    """Outstanding tokens and requests of one gateway, by worker."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    @property
    def loads(self) -> Mapping[str, Load]:
        return self._loads

    def claim(self, worker_id: str, tokens: int) -> Claim:
        load = self._loads.get(worker_id, Load())
        self._loads[worker_id] = Load(load.tokens + tokens, load.requests + 1)
        return Claim(self, worker_id, tokens)

    def give_back(self, worker_id: str, tokens: int) -> None:
        load = self._loads[worker_id]
        rest = Load(load.tokens - tokens, load.requests - 1)
        if rest.requests:
            self._loads[worker_id] = rest
        else:
            del self._loads[worker_id]


class Claim:
    """A part of a worker's load; given back once, however often it is released."""

    def __init__(self, ledger: Ledger, worker_id: str, tokens: int) -> None:
        self._ledger: Ledger | None = ledger
        self._worker_id = worker_id
        self._tokens = tokens

    def release(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.give_back(self._worker_id, self._tokens)


def release_all(claims: Iterable[Claim]) -> None:
    for claim in claims:
        claim.release()
