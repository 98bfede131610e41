"""What a worker shows to operators: its metrics port, its tracer, and the reading that a scrape takes."""

from __future__ import annotations

from collections.abc import Callable

from cluster.launch.spec import WorkerSpec
from decode.engine import DecodeEngine
from genlock.v1 import worker_pb2
from kvstore.transfer.base import TransferEngine
from prefill.engine import PrefillEngine
from wire.metrics import WorkerCollector, WorkerReading, new_registry
from wire.metrics_http import ANY, OFF, PORTS_TO_TRY, MetricsServer, reachable
from wire.tracing import Tracer, make_tracer
from wire.version import app_version


class WorkerTelemetry:
    """Of one worker. `endpoint` is where Prometheus finds it; "" where that is off."""

    def __init__(self, spec: WorkerSpec, read: Callable[[], WorkerReading], tracer: Tracer | None = None) -> None:
        """Raises InvalidInput where tracing is on and its extra is missing."""
        config = spec.config
        self.endpoint = ""
        self.registry = new_registry(WorkerCollector(read))
        self.tracer = tracer or make_tracer(config.tracing.endpoint, spec.worker_id, config.tracing.sample_ratio)
        self._spec = spec
        self._server = MetricsServer(self.registry)

    def start(self) -> None:
        """Once the worker can be read. Raises Unavailable (`port_taken`)."""
        metrics = self._spec.config.metrics
        if metrics.worker_port == OFF:
            return
        tries = 1 if metrics.worker_port == ANY else PORTS_TO_TRY
        port = self._server.start(metrics.host, metrics.worker_port, tries=tries, setting="metrics.worker_port")
        self.endpoint = reachable(metrics.host, self._spec.host, port)

    def stop(self) -> None:
        """Blocks for a moment; may be called twice."""
        self._server.stop()
        self.tracer.close()


def read_worker(
    spec: WorkerSpec,
    engine: PrefillEngine | DecodeEngine,
    transfer: TransferEngine,
    status: worker_pb2.WorkerStatus,
    now_ms: int,
) -> WorkerReading:
    """One worker at this moment, from any thread."""
    prefill = engine if isinstance(engine, PrefillEngine) else None
    facts = None if prefill is None else prefill.facts()
    return WorkerReading(
        version=app_version(),
        kv_format=spec.config.cache.kv_format,
        status=status,
        steps=engine.tally.read(),
        prompt_tokens=0 if facts is None else facts.prompt_tokens,
        cached_tokens=0 if facts is None else facts.cached_tokens,
        lease_ages_ms=() if prefill is None else prefill.core.leases.ages_ms(now_ms),
        transfer_regions=transfer.regions(),
        unproved_transfers=engine.facts().unproved_transfers if isinstance(engine, DecodeEngine) else 0,
        surprises=engine.loop.surprises,
        refused=engine.refused.read(),
    )
