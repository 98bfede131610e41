"""Choice of workers for one request: the least outstanding tokens among ready workers. Pure: a view in, a route out.

Outstanding tokens are what this gateway has sent to a worker and has not seen finished: prompt tokens at prefill until
the first token came, prompt and at most generated tokens at decode until the stream ended.

A request may carry an affinity. Requests of one affinity go to one pair while that pair may serve them, so that they
find the pages of earlier ones in its prefix cache. Each worker has a score for each affinity (rendezvous hashing), and
the best one of those that are ready and proved is taken: a worker that leaves moves its own affinities and no other. An
affinity is a wish; where its pair is full, the load decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from cluster.roles import Role
from kvstore.errors import GenlockError, NoCapacity, Unavailable

# So often an answer may be turned away by workers that drain; then its caller is told.
MAX_MOVES = 3


@dataclass(frozen=True)
class WorkerView:
    """One worker as the router sees it."""

    worker_id: str
    role: Role
    endpoint: str
    ready: bool
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    # Requests that the worker may hold: running and waiting.
    request_limit: int = 1
    # Two workers with different layouts cannot exchange pages; empty: not known.
    layout_fingerprint: str = ""
    # Prefill workers from which this decode worker has proved that pages arrive; None: it needs no proof.
    proved_peers: Container[str] | None = None
    # It answers: whoever is drained or cordoned still computes what was promised to running requests.
    answers: bool = False


@dataclass(frozen=True)
class Route:
    decode: WorkerView
    prefill: WorkerView


def affinity_of(tenant: str, key: str) -> bytes:
    """16 bytes for one tenant's key; keys of two tenants are two affinities, whatever they are called."""
    # The length keeps the border between tenant and key.
    tenant_bytes = tenant.encode()
    text = len(tenant_bytes).to_bytes(4, "little") + tenant_bytes + key.encode()
    return hashlib.blake2b(text, digest_size=16, person=b"affinity").digest()


def route(workers: Iterable[WorkerView], *, retry_after_ms: int = 500, affinity: bytes = b"") -> Route:
    """The decode and the prefill worker for one request.

    With an `affinity`, its pair where that has room. Else least outstanding tokens, then fewest requests, then the
    smaller worker id. The prefill worker has the layout of the decode worker and is proved to it. Raises Unavailable
    (reason `no_prefill_worker`, `no_decode_worker`, `no_matching_layout` or `no_proved_pair`) when nobody is ready,
    NoCapacity (`prefill_full`, `decode_full`, `pairs_full`) when all who are ready are full.
    """
    fleet = tuple(workers)
    kept = _pair_of(fleet, affinity) if affinity else None
    if kept is not None and has_room(kept.decode) and has_room(kept.prefill):
        return kept
    decoders = _open(fleet, Role.DECODE, retry_after_ms)
    prefillers = _open(fleet, Role.PREFILL, retry_after_ms)
    for decode in decoders:
        for prefill in prefillers:
            if same_layout(decode, prefill) and proved(decode, prefill):
                return Route(decode, prefill)
    alike = [pair for pair in _ready_pairs(fleet) if same_layout(*pair)]
    if any(proved(*pair) for pair in alike):
        raise NoCapacity(
            "pairs_full",
            "of the ready workers that may exchange pages, one of each pair holds as many requests as it may",
            retry_after_ms=retry_after_ms,
        )
    if alike:
        raise _not_proved()
    raise _no_layout(decoders[0].worker_id)


def route_many(
    workers: Iterable[WorkerView], tokens: int, count: int, *, retry_after_ms: int = 500, affinity: bytes = b""
) -> list[Route]:
    """Routes for `count` requests of `tokens` each, every one seeing the load of those before it. All or nothing."""
    fleet = {worker.worker_id: worker for worker in workers}
    routes: list[Route] = []
    for _ in range(count):
        chosen = route(fleet.values(), retry_after_ms=retry_after_ms, affinity=affinity)
        routes.append(chosen)
        for worker in (chosen.decode, chosen.prefill):
            fleet[worker.worker_id] = replace(
                worker,
                outstanding_tokens=worker.outstanding_tokens + tokens,
                outstanding_requests=worker.outstanding_requests + 1,
            )
    return routes


def may_go_elsewhere(error: GenlockError, *, begun: bool, moves: int) -> bool:
    """Whether an answer that a worker refused is sent to another pair. Only where the worker refused it at its door
    because it drains, so that nothing was spent on it; never once anything was told of it (`begun`); and not for ever.
    """
    return error.reason == "draining" and not begun and moves < MAX_MOVES


def route_elsewhere(
    workers: Iterable[WorkerView], left: tuple[str, str], *, retry_after_ms: int = 500, affinity: bytes = b""
) -> Route:
    """Another pair for a request that a worker of its pair `left` (decode, prefill) turned away because it drains.

    Which of the two it was need not be known: a pair without both is looked for first, then one with another decode
    worker, then one with another prefill worker. Raises what `route` raises.
    """
    fleet = tuple(workers)
    decode, prefill = left
    for gone in ((decode, prefill), (decode,)):
        try:
            others = [worker for worker in fleet if worker.worker_id not in gone]
            return route(others, retry_after_ms=retry_after_ms, affinity=affinity)
        except (Unavailable, NoCapacity):
            continue
    return route(
        [worker for worker in fleet if worker.worker_id != prefill], retry_after_ms=retry_after_ms, affinity=affinity
    )


def another_prefill(workers: Iterable[WorkerView], decode_id: str, present: str) -> WorkerView:
    """The prefill worker that computes a preempted request of a decode worker again.

    The one that it had (`present`) while that is ready, since it has the request's pages in its cache; else least
    outstanding tokens. A full one is taken where all are: the request was admitted long ago. Where nobody else may
    serve it goes back to its own one that drains or is cordoned: such a worker takes handoffs until it is stopped.
    Raises Unavailable (`no_prefill_worker`, `no_matching_layout` or `no_proved_pair`).
    """
    fleet = {worker.worker_id: worker for worker in workers}
    decode = fleet.get(decode_id)

    def fits(worker: WorkerView) -> bool:
        # A decode worker that this gateway lost sight of still asks: it judges its peers itself.
        return decode is None or (same_layout(decode, worker) and proved(decode, worker))

    had = fleet.get(present)
    ready = [worker for worker in fleet.values() if worker.role is Role.PREFILL and worker.ready]
    fit = [worker for worker in ready if fits(worker)]
    if had in fit:
        return had
    if fit:
        return min(fit, key=lambda worker: (not has_room(worker), *_load(worker)))
    if had is not None and had.answers and fits(had):
        return had
    if not ready:
        raise _nobody(fleet.values(), Role.PREFILL)
    if decode is not None and not any(same_layout(decode, worker) for worker in ready):
        raise _no_layout(decode_id)
    raise _not_proved()


def _pair_of(fleet: tuple[WorkerView, ...], affinity: bytes) -> Route | None:
    """The pair of an affinity among the pairs that may serve, full or not; None when there is no such pair.

    The prefill worker is chosen first: it keeps the prefix cache, and stays when another decode worker must be found.
    """
    pairs = [pair for pair in _ready_pairs(fleet) if same_layout(*pair) and proved(*pair)]
    if not pairs:
        return None
    prefill = max((pair[1] for pair in pairs), key=lambda worker: _score(affinity, worker))
    decode = max((d for d, p in pairs if p.worker_id == prefill.worker_id), key=lambda worker: _score(affinity, worker))
    return Route(decode, prefill)


def _score(affinity: bytes, worker: WorkerView) -> tuple[bytes, str]:
    digest = hashlib.blake2b(worker.worker_id.encode(), key=affinity, digest_size=8, person=worker.role.value.encode())
    return digest.digest(), worker.worker_id


def has_room(worker: WorkerView) -> bool:
    """Whether it may be given one more request."""
    return worker.outstanding_requests < worker.request_limit


def _open(fleet: tuple[WorkerView, ...], role: Role, retry_after_ms: int) -> list[WorkerView]:
    ready = [worker for worker in fleet if worker.role is role and worker.ready]
    if not ready:
        raise _nobody(fleet, role)
    free = [worker for worker in ready if has_room(worker)]
    if not free:
        raise NoCapacity(
            f"{role.value}_full",
            f"all {len(ready)} ready {role.value} workers hold as many requests as they may",
            retry_after_ms=retry_after_ms,
        )
    return sorted(free, key=_load)


def _load(worker: WorkerView) -> tuple[int, int, str]:
    return worker.outstanding_tokens, worker.outstanding_requests, worker.worker_id


def _nobody(fleet: Iterable[WorkerView], role: Role) -> Unavailable:
    known = sum(worker.role is role for worker in fleet)
    return Unavailable(
        f"no_{role.value}_worker",
        f"no {role.value} worker is ready ({known} known); `genlock status` tells why",
        field=f"workers.{role.value}",
    )


def _not_proved() -> Unavailable:
    return Unavailable(
        "no_proved_pair",
        "no ready decode worker has proved that pages of a ready prefill worker arrive as they were sealed; "
        "`genlock status` tells why",
        field="transfer.engine",
    )


def _no_layout(decode_id: str) -> Unavailable:
    return Unavailable(
        "no_matching_layout",
        f"no ready prefill worker has the page layout of decode worker {decode_id}: "
        "workers of one cluster need the same model, page_tokens and kv_format",
    )


def _ready_pairs(fleet: tuple[WorkerView, ...]) -> list[tuple[WorkerView, WorkerView]]:
    ready = [worker for worker in fleet if worker.ready]
    decoders = [worker for worker in ready if worker.role is Role.DECODE]
    return [(decode, prefill) for decode in decoders for prefill in ready if prefill.role is Role.PREFILL]


def proved(decode: WorkerView, prefill: WorkerView) -> bool:
    """Whether decode may pull from prefill as far as the start-up self-test goes."""
    return decode.proved_peers is None or prefill.worker_id in decode.proved_peers


def same_layout(decode: WorkerView, prefill: WorkerView) -> bool:
    """Whether their pages are alike, or not known to differ."""
    return layouts_fit(decode.layout_fingerprint, prefill.layout_fingerprint)


def layouts_fit(ours: str, theirs: str) -> bool:
    """Of two fingerprints; an empty one is not known."""
    return not ours or not theirs or ours == theirs
