"""What the gateway knows about workers. Pure: answers and failures of status calls in, a frozen table out."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from cluster.roles import Role
from cluster.router import WorkerView, layouts_fit
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError, NotFound, Unavailable

NOT_ASKED = "not asked yet"


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
    detail: str = NOT_ASKED
    late_answers: int = 0
    # The last answer; None when unreachable.
    status: worker_pb2.WorkerStatus | None = None
    # Of that answer: prefill workers from which pages arrived as they were sealed, with the life that this is said of.
    # None: it needs no proof, or has told nothing.
    passed: Mapping[str, int] | None = None


@dataclass(frozen=True)
class ProvedPeers(Container[str]):
    """The peers of one decode worker whose present life has passed; asked, never listed."""

    passed: Mapping[str, int]
    workers: Mapping[str, WorkerRecord]

    def __contains__(self, worker_id: object) -> bool:
        record = self.workers.get(worker_id) if isinstance(worker_id, str) else None
        if record is None or record.status is None:
            return False
        return self.passed.get(record.worker_id) == record.status.incarnation


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
    # Workers that are not to be chosen, known or not; what they run goes on.
    cordoned: frozenset[str] = frozenset()

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
        return self._with(replace(record, state=state, detail=detail, late_answers=0, status=status,
                                  passed=_passed(record.passed, status)))  # fmt: skip

    def failed(self, worker_id: str, endpoint: str, error: GenlockError) -> Fleet:
        """A status call or a request could not reach the worker."""
        record = self.workers.get(worker_id)
        if record is None or record.endpoint != endpoint:
            return self
        late = record.late_answers + 1
        if not isinstance(error, Unavailable) and late < self.policy.late_answers:
            return self._with(replace(record, late_answers=late))
        return self._with(
            replace(record, state=WorkerState.UNREACHABLE, detail=error.message[:256], late_answers=late, status=None,
                    passed=None)
        )  # fmt: skip

    def checked(self, decode_id: str, endpoint: str, proof: worker_pb2.PeerProof) -> Fleet:
        """A decode worker told whether it may pull from one prefill worker."""
        record = self.workers.get(decode_id)
        if record is None or record.endpoint != endpoint or record.status is None:
            return self
        status = worker_pb2.WorkerStatus()
        status.CopyFrom(record.status)
        others = [peer for peer in status.peers if peer.worker_id != proof.worker_id]
        del status.peers[:]
        status.peers.extend([*others, proof])
        return self._with(replace(record, status=status, passed=_passed(record.passed, status)))

    def ready(self) -> Iterator[WorkerRecord]:
        """Workers that may be chosen: they answer, and nobody has cordoned them."""
        ready = WorkerState.READY
        return (one for one in self.workers.values() if one.state is ready and one.worker_id not in self.cordoned)

    def failing(self) -> tuple[tuple[str, worker_pb2.PeerProof], ...]:
        """Decode workers with what they said of each present prefill worker whose exchange did not pass."""
        return tuple(
            (record.worker_id, proof)
            for record in self.workers.values() if record.status is not None
            for proof in record.status.peers if not proof.passed and proof.worker_id in self.workers
        )  # fmt: skip

    def view(self, loads: Mapping[str, Load]) -> tuple[WorkerView, ...]:
        """What the router sees."""
        return tuple(self._view(record, loads.get(record.worker_id, Load())) for record in self.workers.values())

    def serving(self) -> bool:
        """True when a request can be served at all. Where no two ready workers have one layout, routing says so.

        Asked with every answer of every worker: it goes through workers, never through pairs, and stops at the first
        pair that serves.
        """
        decoders: list[WorkerRecord] = []
        prefillers: dict[str, WorkerRecord] = {}
        for record in self.ready():
            if record.role is Role.DECODE:
                decoders.append(record)
            else:
                prefillers[record.worker_id] = record
        if not decoders or not prefillers:
            return False
        layouts = {layout_of(prefill) for prefill in prefillers.values()}
        alike = False
        for decode in decoders:
            if not any(layouts_fit(layout_of(decode), layout) for layout in layouts):
                continue
            alike = True
            if decode.passed is None or self._proved_one(decode, prefillers):
                return True
        return not alike

    def get(self, worker_id: str) -> WorkerRecord:
        try:
            return self.workers[worker_id]
        except KeyError:
            known = ", ".join(sorted(self.workers)) or "none"
            raise NotFound("unknown_worker", f"no worker {worker_id[:64]!r}; known: {known}") from None

    def _proved_one(self, decode: WorkerRecord, prefillers: Mapping[str, WorkerRecord]) -> bool:
        """Whether it may pull from one of these."""
        for worker_id, incarnation in (decode.passed or {}).items():
            prefill = prefillers.get(worker_id)
            if prefill is None or prefill.status is None or prefill.status.incarnation != incarnation:
                continue
            if layouts_fit(layout_of(decode), layout_of(prefill)):
                return True
        return False

    def _with(self, record: WorkerRecord) -> Fleet:
        return replace(self, workers=MappingProxyType({**self.workers, record.worker_id: record}))

    def _view(self, record: WorkerRecord, load: Load) -> WorkerView:
        return WorkerView(
            worker_id=record.worker_id,
            role=record.role,
            endpoint=record.endpoint,
            ready=record.state is WorkerState.READY and record.worker_id not in self.cordoned,
            outstanding_tokens=load.tokens,
            outstanding_requests=load.requests,
            request_limit=self.policy.request_limit,
            layout_fingerprint=layout_of(record),
            proved_peers=None if record.passed is None else ProvedPeers(record.passed, self.workers),
            answers=record.state is not WorkerState.UNREACHABLE,
        )


def layout_of(record: WorkerRecord) -> str:
    """Empty: not known."""
    return record.status.layout_fingerprint if record.status is not None else ""


def _passed(before: Mapping[str, int] | None, status: worker_pb2.WorkerStatus) -> Mapping[str, int] | None:
    """The same object as before while it says the same, so that whoever compares is done at once."""
    if not status.proves_peers:
        return None
    now = {proof.worker_id: proof.incarnation for proof in status.peers if proof.passed}
    return before if before == now else MappingProxyType(now)


class Ledger:
    """Outstanding tokens and requests of one gateway, by worker."""

    def __init__(self, on_free: Callable[[], None] = lambda: None) -> None:
        """`on_free` is called when a part of a load was given back."""
        self._loads: dict[str, Load] = {}
        self._on_free = on_free

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
        self._on_free()


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
