"""What every registry holds to: limits, who wins under one name, which revision comes next. Pure."""

from __future__ import annotations

from cluster.registry.records import GatewayRecord, WorkerRecord
from cluster.roles import MAX_FLEET
from kvstore.errors import Conflict, InvalidInput, NoCapacity
from kvstore.ids import INCARNATION_BITS

# Records of workers: those whose life ended without a word stay until their time is out.
MAX_RECORDS = 4 * MAX_FLEET
MAX_GATEWAYS = 1024
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 4096
MAX_ANSWER_BYTES = 1 << 20
MAX_ANSWERS = 10_000
MAX_KEYS = 100_000
MAX_EVENT_BATCH = 10_000
# Of the autoscaler, the last ones: seven hours at one every five seconds.
MAX_DECISIONS = 5_000
MAX_DECISION_BYTES = 16 << 10
MAX_TTL_MS = 7 * 86_400_000


def takes_over(new: WorkerRecord, kept: WorkerRecord) -> bool:
    """Whether `new` replaces `kept` under its name. A life that began earlier never replaces a later one, so the last
    heartbeats of a worker that was replaced do not bring it back."""
    return new.incarnation == kept.incarnation or new.started_ms >= kept.started_ms


def next_revision(stored: int, expected: int, carried: int) -> int:
    """The revision of a change: above the stored one, above what the caller expected, above the revision that the
    wanted state carries: the caller's high-water mark, which outlives a flush of the store."""
    return max(stored, expected, carried) + 1


def revision_moved(current: int, expected: int) -> Conflict:
    return Conflict(
        "revision_moved",
        f"the fleet's revision is {current}, not {expected}: look again and repeat the change",
        field="expected_revision",
    )


def too_many_keys() -> NoCapacity:
    return NoCapacity("too_many_keys", f"the registry keeps at most {MAX_KEYS} API keys: revoke some")


def too_many_workers() -> NoCapacity:
    return NoCapacity("too_many_workers", f"{MAX_RECORDS} workers are registered already", field="worker_id")


def too_many_gateways() -> NoCapacity:
    return NoCapacity("too_many_gateways", f"{MAX_GATEWAYS} gateways are registered already", field="gateway_id")


def check_gateway(record: GatewayRecord) -> None:
    """Raises InvalidInput naming the field."""
    if not 0 < len(record.gateway_id) <= MAX_NAME_CHARS:
        raise InvalidInput(
            "bad_gateway_record", f"gateway_id must have 1 to {MAX_NAME_CHARS} chars", field="gateway_id"
        )
    if len(record.endpoint) > MAX_NAME_CHARS:
        raise InvalidInput("bad_gateway_record", f"endpoint must have at most {MAX_NAME_CHARS} chars", field="endpoint")


def check_worker(record: WorkerRecord) -> None:
    """Raises InvalidInput naming the field."""
    if not 0 < len(record.worker_id) <= MAX_NAME_CHARS:
        raise InvalidInput("bad_worker_record", f"worker_id must have 1 to {MAX_NAME_CHARS} chars", field="worker_id")
    if not 0 < len(record.endpoint) <= MAX_NAME_CHARS:
        raise InvalidInput("bad_worker_record", f"endpoint must have 1 to {MAX_NAME_CHARS} chars", field="endpoint")
    if not 1 <= record.incarnation < 1 << INCARNATION_BITS:
        raise InvalidInput("bad_worker_record", "incarnation must be 1 to 2^63 - 1", field="incarnation")


def check_answer(key: str, answer: bytes) -> None:
    """Raises InvalidInput naming the field."""
    if not 0 < len(key) <= MAX_NAME_CHARS:
        raise InvalidInput("bad_idempotency_key", f"must have 1 to {MAX_NAME_CHARS} chars", field="idempotency_key")
    if len(answer) > MAX_ANSWER_BYTES:
        raise InvalidInput("answer_too_long", f"an answer has at most {MAX_ANSWER_BYTES} bytes", field="answer")


def check_decision(decision: bytes) -> None:
    """Raises InvalidInput."""
    if len(decision) > MAX_DECISION_BYTES:
        raise InvalidInput("decision_too_long", f"a decision has at most {MAX_DECISION_BYTES} bytes", field="decision")


def check_ttl(ttl_ms: int) -> None:
    """Raises InvalidInput."""
    if not 1 <= ttl_ms <= MAX_TTL_MS:
        raise InvalidInput("bad_ttl", f"ttl_ms must be between 1 and {MAX_TTL_MS}, is {ttl_ms}", field="ttl_ms")
