"""What the gateway tells Prometheus: how each request ended and why, its times, and the fleet as the gateway sees it.

Counted on the event loop, once a request or an answer; the rest is read when it is scraped.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.gateway.fleet import Fleet, WorkerState
from cluster.operators.explain import SHAPED, listed
from cluster.roles import Role
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import GenlockError
from wire.causes import MAX_CAUSES, OTHER
from wire.metrics import build_info, new_registry
from wire.metrics_http import Target

OK = "ok"
MS = 1000.0
# From a small model's token to a long prompt's prefill.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
ROLE = "gateway"
# Reasons of this release: each is counted by itself, whatever else is told.
LISTED = listed()
# Whose statuses say that the request itself, or its caller, was not to be served.
REFUSING = frozenset(
    {
        "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION",
    }
)  # fmt: skip


class Outcome(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"  # by the caller
    REFUSED = "refused"  # what was asked, or who asked, is not served
    SHED = "shed"  # for want of room; the caller may retry
    FAILED = "failed"  # everything that an operator should look at


def outcome_of(error: GenlockError | None) -> tuple[Outcome, str]:
    """How a request ended, and the cause."""
    if error is None:
        return Outcome.OK, OK
    if error.status == "CANCELLED":
        return Outcome.CANCELLED, error.reason
    if error.status == "RESOURCE_EXHAUSTED":
        return Outcome.SHED, error.reason
    return (Outcome.REFUSED if error.status in REFUSING else Outcome.FAILED), error.reason


@dataclass(frozen=True)
class GatewayReading:
    """The gateway at one moment."""

    version: str
    model: str
    running: int
    max_running: int
    draining: bool
    surprises: int
    fleet: Fleet
    # Of the running ones, those that have no worker yet because all are full.
    waiting: int = 0


# There from the start, so that a rate sees the first one.
EXPECTED = (
    (Outcome.OK, OK),
    (Outcome.CANCELLED, "cancelled"),
    (Outcome.SHED, "gateway_full"),
    (Outcome.FAILED, "internal"),
)
# The worker that it had, another one, or nobody.
RECOMPUTED = ("kept", "moved", "none")


class GatewayMetrics:
    """Counts, and the registry that shows them. `read` gives what is not counted here."""

    def __init__(self, read: Callable[[], GatewayReading]) -> None:
        self._ended: Count[tuple[Outcome, str]] = Count(dict.fromkeys(EXPECTED, 0))
        self._recomputed: Count[str] = Count(dict.fromkeys(RECOMPUTED, 0))
        self._times = {
            name: Histogram(f"genlock_request_{name}_seconds", doc, buckets=SECONDS, registry=None)
            for name, doc in _TIMES.items()
        }
        self._tokens = {
            name: Counter(f"genlock_request_{name}_tokens", doc, registry=None) for name, doc in _TOKENS.items()
        }
        self._turned_away = Counter(
            "genlock_turned_away",
            "Answers that a draining worker turned away and that another pair took.",
            registry=None,
        )
        counted = (*self._times.values(), *self._tokens.values(), self._turned_away)
        self.registry: CollectorRegistry = new_registry(_GatewayCollector(read, self._ended, self._recomputed, counted))

    def ended(self, error: GenlockError | None, total_ms: float) -> str:
        """A request has ended: counted once, whatever happened. Returns the cause that it is counted under: one for all
        reasons that workers made up."""
        outcome, cause = outcome_of(error)
        if cause != OK and cause not in LISTED and (outcome, cause) not in self._ended:
            full = len(self._ended) >= MAX_CAUSES
            cause = cause if cause.startswith(SHAPED) and not full else OTHER
        self._ended[outcome, cause] += 1
        if outcome is Outcome.OK:
            self._times["duration"].observe(total_ms / MS)
        return cause

    def recomputed(self, result: str) -> None:
        """A preempted answer asked for a prefill worker anew. `result`: one of RECOMPUTED."""
        self._recomputed[result] += 1

    def turned_away(self) -> None:
        """A worker that drains turned an answer away, and another pair took it."""
        self._turned_away.inc()

    def first_token(self, after_ms: float) -> None:
        """An answer's first token has come."""
        self._times["first_token"].observe(after_ms / MS)

    def answered(self, finished: pb.Finished) -> None:
        """An answer is whole."""
        usage, timings = finished.usage, finished.timings
        for name, count in (
            ("prompt", usage.prompt_tokens), ("answer", usage.completion_tokens), ("cached", usage.cached_tokens),
        ):  # fmt: skip
            self._tokens[name].inc(count)
        if usage.completion_tokens > 1:
            self._times["per_token"].observe(timings.per_token_ms / MS)
        # Of an answer that a stop string ended there is no verification, but what the handoff cost is known.
        if finished.HasField("verification") or timings.prefill_ms:
            self._times["queue"].observe(timings.queue_ms / MS)
            self._times["prefill"].observe(timings.prefill_ms / MS)
            self._times["transfer"].observe(timings.transfer_ms / MS)


_TIMES: Mapping[str, str] = MappingProxyType(
    {
        "queue": "Waiting for admission at both workers, of whole answers.",
        "prefill": "Prefill's compute, of whole answers.",
        "transfer": "From the end of prefill until the last page was verified, of whole answers.",
        "first_token": "From the gateway's receipt to an answer's first token.",
        "per_token": "Mean time between the tokens of an answer after its first.",
        "duration": "From the gateway's receipt to the end, of requests that ended well.",
    }
)
_TOKENS: Mapping[str, str] = MappingProxyType(
    {
        "prompt": "Prompt tokens of whole answers.",
        "answer": "Generated tokens of whole answers.",
        "cached": "Prompt tokens of whole answers that came from the prefix cache.",
    }
)


class _GatewayCollector(Collector):
    def __init__(
        self,
        read: Callable[[], GatewayReading],
        ended: Mapping[tuple[Outcome, str], int],
        recomputed: Mapping[str, int],
        counted: tuple[Collector, ...],
    ) -> None:
        self._read = read
        self._ended = ended
        self._recomputed = recomputed
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        yield build_info(version=reading.version, role=ROLE, model=reading.model)
        requests = CounterMetricFamily(
            "genlock_requests", "Requests that ended, by outcome and cause; ok is both.", labels=("outcome", "cause")
        )
        for (outcome, cause), count in dict(self._ended).items():
            requests.add_metric((outcome.value, cause), count)
        yield requests
        recomputes = CounterMetricFamily(
            "genlock_recomputes", "Preempted answers that asked for a prefill worker anew, by who it was.",
            labels=("result",),
        )  # fmt: skip
        for result, count in dict(self._recomputed).items():
            recomputes.add_metric((result,), count)
        yield recomputes
        yield GaugeMetricFamily("genlock_running_requests", "Requests that run in this gateway.", reading.running)
        yield GaugeMetricFamily(
            "genlock_waiting_requests", "Of these, requests for which all workers are full.", reading.waiting
        )
        yield GaugeMetricFamily(
            "genlock_running_requests_limit", "Most requests that may run at once (api.max_requests).",
            reading.max_running,
        )  # fmt: skip
        yield GaugeMetricFamily(
            "genlock_gateway_draining", "1 while this gateway takes no new requests.", float(reading.draining)
        )
        yield CounterMetricFamily(
            "genlock_gateway_surprises", "Untyped errors that loops of this gateway survived.", value=reading.surprises
        )
        workers = GaugeMetricFamily(
            "genlock_workers", "Workers that this gateway knows, by state.", labels=("role", "state")
        )
        counts = Count((record.role, record.state) for record in reading.fleet.workers.values())
        for role in Role:
            for state in WorkerState:
                workers.add_metric((role.value, state.value.lower()), counts[role, state])
        yield workers
        for collector in self._counted:
            for family in collector.collect():
                # When a series was made is no news: it is when the process began.
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family


def targets_of(fleet: Fleet) -> tuple[Target, ...]:
    """The workers' own endpoints, of those that have told one. Their labels are for relabelling: they must not clash
    with those of the samples."""
    return tuple(
        Target(
            record.status.metrics_endpoint,
            {"__meta_genlock_role": record.role.value, "__meta_genlock_worker": record.worker_id},
        )
        for record in fleet.workers.values()
        if record.status is not None and record.status.metrics_endpoint
    )
