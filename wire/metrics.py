"""What a worker tells Prometheus. Everything is read when it is scraped; the step loop only counts plain integers.

Label values come from fixed sets or from the code: no tenant, no request, no peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from genlock.v1 import worker_pb2
from wire.causes import MAX_CAUSES, OTHER
from wire.tally import StepReading, TallyReading

OK = "ok"
COMPARED = "compared"
# Outcomes of workers that end no request.
EVENTS = frozenset({"preempted"})
PASSING = frozenset({OK, COMPARED})
READS = frozenset({"read_entry", "read_kernel", "read_exit", "write_rows"})


@dataclass(frozen=True)
class WorkerReading:
    """One worker at one moment. Ages in milliseconds."""

    version: str
    kv_format: str
    status: worker_pb2.WorkerStatus
    steps: StepReading
    prompt_tokens: int
    cached_tokens: int
    lease_ages_ms: tuple[int, ...]
    transfer_regions: int
    unproved_transfers: int
    surprises: int
    refused: Mapping[str, int]  # commands for what is not there, by cause


def verification(counters: Mapping[str, int]) -> tuple[dict[tuple[str, str], int], dict[str, int]]:
    """The guard's counters as `(check, result) -> count`, and the rest as `event -> count`.

    `receipt_digest/ok` is a check with its result; `read_entry` counts pages that were compared; `refused_*` counts
    rows of a step that were not answered, by reason.
    """
    checks: dict[tuple[str, str], int] = {}
    events: dict[str, int] = {}
    for name, count in counters.items():
        check, slash, result = name.partition("/")
        if slash:
            checks[check, result] = count
        elif name in READS:
            checks[name, COMPARED] = count
        elif name.startswith("refused_"):
            checks["step", name.removeprefix("refused_")] = count
        else:
            events[name] = count
    return checks, events


def bounded(counts: Mapping[str, int]) -> dict[str, int]:
    """At most MAX_CAUSES causes; what is beyond them is `other`. Causes come from the code, so this is for a peer that
    invents some."""
    kept = dict(list(counts.items())[:MAX_CAUSES])
    rest = sum(counts.values()) - sum(kept.values())
    if rest:
        kept[OTHER] = kept.get(OTHER, 0) + rest
    return kept


class WorkerCollector(Collector):
    """All families of one worker, made anew at each scrape."""

    def __init__(self, read: Callable[[], WorkerReading]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        role = reading.status.role
        yield build_info(
            version=reading.version, role=role, worker=reading.status.worker_id,
            transfer_engine=reading.status.transfer_engine, kv_format=reading.kv_format,
        )  # fmt: skip
        yield from _pool(reading.status.pool, role)
        yield from _sequences(reading, role)
        yield from _steps(reading, role)
        yield from _checks(reading, role)
        yield from _transfer(reading, role)


def build_info(**labels: str) -> InfoMetricFamily:
    return InfoMetricFamily("genlock_build", "What runs in this process; always 1.", value=labels)


def gauge(name: str, doc: str, role: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, doc, labels=("role",))
    family.add_metric((role,), value)
    return family


def counter(name: str, doc: str, role: str, value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, doc, labels=("role",))
    family.add_metric((role,), value)
    return family


def _pool(pool: worker_pb2.PoolStatus, role: str) -> Iterator[Metric]:
    pages = GaugeMetricFamily("genlock_pool_pages", "Pages of the pool by state.", labels=("role", "state"))
    for state in ("free", "open", "sealed", "quarantined"):
        pages.add_metric((role, state), getattr(pool, state))
    yield pages
    used = pool.pages - pool.free
    yield gauge("genlock_pool_capacity_bytes", "Bytes of all pages of the pool.", role, pool.pages * pool.page_bytes)
    yield gauge("genlock_pool_used_bytes", "Bytes of pages that are not free.", role, used * pool.page_bytes)
    yield gauge("genlock_pool_cached_pages", "Sealed pages that the prefix cache keeps.", role, pool.cached)


def _sequences(reading: WorkerReading, role: str) -> Iterator[Metric]:
    status = reading.status
    sequences = GaugeMetricFamily(
        "genlock_sequences", "Sequences that have pages (running) or wait for them.", labels=("role", "state")
    )
    sequences.add_metric((role, "running"), status.running_requests)
    sequences.add_metric((role, "waiting"), status.waiting_requests)
    yield sequences
    ended = CounterMetricFamily(
        "genlock_worker_requests", "Requests that this worker ended, by cause; ok is one.", labels=("role", "cause")
    )
    events = {name: count for name, count in status.outcomes.items() if name in EVENTS}
    for cause, count in bounded({n: c for n, c in status.outcomes.items() if n not in EVENTS}).items():
        ended.add_metric((role, cause), count)
    yield ended
    yield counter(
        "genlock_preemptions", "Times a sequence gave its pages back to be computed again.", role,
        events.get("preempted", 0),
    )  # fmt: skip
    refused = CounterMetricFamily(
        "genlock_refused_commands", "Commands of peers for requests and handoffs that are not there, by cause.",
        labels=("role", "cause"),
    )  # fmt: skip
    for cause, count in sorted(reading.refused.items()):
        refused.add_metric((role, cause), count)
    yield refused
    yield gauge("genlock_draining", "1 while this worker takes no new requests.", role, float(status.draining))
    ages = reading.lease_ages_ms
    yield gauge("genlock_leases", "Handoffs whose pages are kept for a decode worker.", role, len(ages))
    yield gauge(
        "genlock_lease_oldest_age_seconds", "Age of the oldest live lease; 0 without one.", role,
        max(ages, default=0) / 1000,
    )  # fmt: skip
    yield gauge(
        "genlock_lease_mean_age_seconds", "Mean age of live leases; 0 without one.", role,
        sum(ages) / len(ages) / 1000 if ages else 0.0,
    )  # fmt: skip
    yield counter("genlock_prompt_tokens", "Prompt tokens of completed prefills.", role, reading.prompt_tokens)
    yield counter(
        "genlock_prefix_hit_tokens", "Prompt tokens whose KV came from the prefix cache.", role, reading.cached_tokens
    )


def _steps(reading: WorkerReading, role: str) -> Iterator[Metric]:
    yield counter("genlock_tokens", "Tokens computed (prefill) or generated (decode).", role, reading.status.tokens)
    yield _histogram("genlock_step_tokens", "New tokens of one step.", role, reading.steps.tokens)
    yield _histogram("genlock_step_batch_size", "Sequences of one step.", role, reading.steps.rows)
    yield gauge(
        "genlock_step_loop_age_seconds", "Time since the step loop last turned; it also turns when idle.", role,
        reading.status.step_age_ms / 1000,
    )  # fmt: skip
    yield counter("genlock_step_loop_surprises", "Untyped errors that the step loop survived.", role, reading.surprises)


def _checks(reading: WorkerReading, role: str) -> Iterator[Metric]:
    checks, events = verification(reading.status.verification)
    family = CounterMetricFamily(
        "genlock_verification_checks", "Checks of pages and rows, by check and result.",
        labels=("role", "check", "result"),
    )  # fmt: skip
    for (check, result), count in sorted(checks.items()):
        family.add_metric((role, check, result), count)
    yield family
    # There from the start, unlike a cause's own series: an alert sees the first one.
    yield counter(
        "genlock_checks_failed", "Checks of pages and rows that found something wrong, all causes together.", role,
        sum(count for (_check, result), count in checks.items() if result not in PASSING),
    )  # fmt: skip
    other = CounterMetricFamily("genlock_page_events", "What else happened to pages.", labels=("role", "event"))
    for event, count in sorted(bounded(events).items()):
        other.add_metric((role, event), count)
    yield other


def _transfer(reading: WorkerReading, role: str) -> Iterator[Metric]:
    yield gauge(
        "genlock_transfer_regions", "Memory regions that the engine has registered: the pool, and each peer's.", role,
        reading.transfer_regions,
    )  # fmt: skip
    yield gauge(
        "genlock_unproved_transfers", "Transfers that ended without proof that the engine stopped writing.", role,
        reading.unproved_transfers,
    )  # fmt: skip


def _histogram(name: str, doc: str, role: str, reading: TallyReading) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, doc, labels=("role",))
    family.add_metric((role,), list(reading.cumulative()), reading.total)
    return family


def new_registry(collector: Collector) -> CollectorRegistry:
    """A registry with one collector and the facts of this process (memory, CPU time, descriptors, start)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(collector)
    return registry
