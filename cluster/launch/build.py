"""Puts a worker together from its spec: the only place that knows all parts of both roles."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import grpc.aio
import torch
from grpc_health.v1 import health_pb2_grpc

from cluster.launch.ports import first_free, own_address
from cluster.launch.spec import WorkerSpec
from cluster.launch.telemetry import WorkerTelemetry, read_worker
from cluster.launch.telling import heartbeat_of
from cluster.registry.heartbeat import Heartbeat
from cluster.roles import Role
from cluster.tls import dialer_of
from decode.core import DecodeCore, DecodeLimits
from decode.engine import DecodeEngine, DecodeHooks
from decode.peers import PeerTable
from decode.pull import Handoffs, PullHooks
from decode.service import DecodeService, proof_to_proto
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.beacon import BEACON_SLOTS, LANDING_SLOTS, PeerProver, light_beacon
from kvstore.checks import ALL_CHECKS, Checks
from kvstore.digest import Digester
from kvstore.errors import InvalidInput, Unavailable
from kvstore.guard import Guard
from kvstore.ids import draw_incarnation
from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.layout import KvFormat
from kvstore.receive import PageReceiver
from kvstore.registry import IncarnationRegistry
from kvstore.transfer.base import TransferEngine
from kvstore.transfer.common import monotonic_ms
from kvstore.transfer.select import make_engine
from model.attention.select import make_backend
from model.base import LanguageModel, Tokenizer
from model.grammar import Grammars, grammars_of
from model.load import load_model
from model.runner import StepHooks, StepRunner
from model.sampler import SampledToken
from prefill.core import PrefillCore, PrefillLimits
from prefill.engine import PrefillEngine, PrefillHooks
from prefill.service import PrefillService
from wire.dial import Channels
from wire.health import HealthLimits, WorkerHealth
from wire.metrics import WorkerReading
from wire.options import server_options
from wire.tracing import Tracer
from wire.worker_status import WorkerStatusService, no_leases, pool_status

PULL_THREADS = 2  # at least
PROVE_THREADS = LANDING_SLOTS  # no more exchanges run at a time
LOOP_STOP_MS = 10_000
CUT_S = 1.0  # a step loop that stands still tells nobody


@dataclass(frozen=True)
class WorkerTuning:
    """What fault injection may replace in one worker. Never reachable from configuration."""

    checks: Checks = ALL_CHECKS
    clock: Callable[[], int] = monotonic_ms
    wrap_engine: Callable[[TransferEngine], TransferEngine] | None = None
    model: LanguageModel | None = None  # shared weights of workers in one process
    tokenizer: Tokenizer | None = None  # of that model; without one no answer is kept to a schema
    prefill: PrefillHooks = field(default_factory=PrefillHooks)
    decode: DecodeHooks = field(default_factory=DecodeHooks)
    pull: PullHooks = field(default_factory=PullHooks)
    step: StepHooks = field(default_factory=StepHooks)
    tracer: Tracer | None = None  # in place of the configured one


NO_TUNING = WorkerTuning()


class BuiltWorker:
    """A worker of either role. `guard`, `engine` and the like are there once `start` has returned."""

    def __init__(self, spec: WorkerSpec, tuning: WorkerTuning = NO_TUNING) -> None:
        self.spec = replace(spec, host=own_address(spec.host))
        self.dialer = dialer_of(spec.config.tls)
        self.tuning = tuning
        self.endpoint = ""
        self.guard: Guard
        self.transfer: TransferEngine
        self.engine: PrefillEngine | DecodeEngine
        self._server: grpc.aio.Server | None = None
        self._handoffs: Handoffs | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._prover: ThreadPoolExecutor | None = None
        self._grammars: Grammars | None = None
        self._status: WorkerStatusService | None = None
        self._decode: DecodeService | None = None
        self._stopped = False
        self._started = False
        self.telemetry = WorkerTelemetry(self.spec, self.reading, tuning.tracer)
        # There with a registry that other processes see, once started.
        self.heartbeat: Heartbeat | None = None

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    @property
    def role(self) -> Role:
        return self.spec.role

    async def start(self) -> str:
        """Loads the model, warms the kernels, listens. Raises InvalidInput or Unavailable; `stop` cleans up then."""
        heartbeat = heartbeat_of(self.spec, self.facts, lambda: self.endpoint)
        loop = asyncio.get_running_loop()
        model, runner = await loop.run_in_executor(None, self._build)
        servicer: PrefillService | DecodeService
        if self.role is Role.PREFILL:
            servicer = self._build_prefill(model, runner)
        else:
            servicer = self._build_decode(model, runner)
        leases: Callable[[int], worker_pb2.WorkerLeases] = no_leases
        server = grpc.aio.server(interceptors=self.dialer.interceptors(), options=server_options())
        if isinstance(servicer, PrefillService):
            worker_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server)
            leases = servicer.leases
        else:
            self._decode = servicer
            worker_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
        self._status = WorkerStatusService(self.facts, self._drain, self._idle, leases)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._status, server)
        config = self.spec.config
        limits = HealthLimits(config.workers.stall_ms, config.workers.stall_ms + config.control.kill_ms)
        health_pb2_grpc.add_HealthServicer_to_server(WorkerHealth(self.facts, limits), server)
        port = first_free(
            partial(self.dialer.listen, server), self.spec.host, self.spec.port or self.spec.config.workers.port
        )
        self._server = server
        if isinstance(self.engine, DecodeEngine):
            self.engine.start(loop)
        else:
            self.engine.loop.start()
        self._started = True
        self.telemetry.start()
        await server.start()
        self.endpoint = f"{self.spec.host}:{port}"
        self.heartbeat = heartbeat
        if heartbeat is not None:
            heartbeat.start()
        return self.endpoint

    async def stop(self, grace_ms: int) -> None:
        """Drains for at most `grace_ms`, then ends everything. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        if self._status is not None and self._started and not await self._status.drained(grace_ms / 1000):
            await self._cut()
        if self.heartbeat is not None:
            await self.heartbeat.stop()
        if self._decode is not None:
            self._decode.finish()
        if self._server is not None:
            await self._server.stop(0.2)
        if self._decode is not None:
            await self._decode.ended()
        loop = asyncio.get_running_loop()
        if self._started:
            await loop.run_in_executor(None, self.engine.loop.stop, LOOP_STOP_MS)
        await loop.run_in_executor(None, self.telemetry.stop)
        if self._handoffs is not None:
            await self._handoffs.close()
        if self._grammars is not None:
            self._grammars.turns.close()
        for executor in (self._executor, self._prover):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        if hasattr(self, "transfer"):
            await loop.run_in_executor(None, self.transfer.close)

    def facts(self) -> worker_pb2.WorkerStatus:
        """A snapshot for operators and the router."""
        engine, guard = self.engine, self.guard
        facts = engine.facts()
        prefill = facts if isinstance(engine, PrefillEngine) else None
        peers = engine.peers if isinstance(engine, DecodeEngine) else None
        return worker_pb2.WorkerStatus(
            worker_id=self.worker_id,
            role=self.role.value,
            incarnation=guard.incarnation,
            layout_fingerprint=f"{guard.layout.fingerprint:016x}",
            draining=engine.admission.draining,
            pool=pool_status(guard, engine.core.cached_pages if isinstance(engine, PrefillEngine) else 0),
            running_requests=facts.running,
            waiting_requests=facts.waiting,
            leases=len(engine.core.leases) if isinstance(engine, PrefillEngine) and prefill else 0,
            steps=facts.steps,
            step_age_ms=max(0, self.tuning.clock() - engine.loop.last_turn_ms),
            verification={key: int(value) for key, value in sorted(guard.counters.items())},
            outcomes=facts.outcomes,
            tokens=facts.tokens,
            pid=os.getpid(),
            transfer_engine=self.transfer.name,
            metrics_endpoint=self.telemetry.endpoint,
            peers=[proof_to_proto(verdict) for verdict in peers.verdicts] if peers is not None else [],
            proves_peers=peers is not None and peers.proves,
            untried_peers=peers.untried if peers is not None else 0,
            owed_handoffs=engine.owed() if isinstance(engine, DecodeEngine) else {},
            load=engine.load.read(
                backlog_tokens=engine.core.backlog_tokens if isinstance(engine, PrefillEngine) else 0,
                slots=self.spec.config.workers.max_running,
            ),
        )

    def reading(self) -> WorkerReading:
        """For a scrape, from any thread."""
        return read_worker(self.spec, self.engine, self.transfer, self.facts(), self.tuning.clock())

    # --- parts --------------------------------------------------------------------------------------------------

    def _build(self) -> tuple[LanguageModel, StepRunner]:
        config = self.spec.config
        torch.set_num_threads(config.workers.threads)
        model, tokenizer = self.tuning.model, self.tuning.tokenizer
        if model is None:
            model, tokenizer = load_model(config.model.path or config.model.name, linears=config.model.linears)
        self._grammars = None if tokenizer is None else grammars_of(model.info, tokenizer)
        layout = model.layout(config.cache.page_tokens, KvFormat(config.cache.kv_format))
        secret = self._secret()
        digester = Digester(secret, layout.slot_bytes)
        digester.warm_up()
        engine = make_engine(
            config.transfer.engine,
            digester=digester,
            host=self.spec.host,
            nixl_transport=config.transfer.nixl_transport,
        )
        self.transfer = engine if self.tuning.wrap_engine is None else self.tuning.wrap_engine(engine)
        slots = config.cache.prefill_pages if self.role is Role.PREFILL else config.cache.decode_pages
        self.guard = Guard(
            layout, slots, self.transfer, draw_incarnation(os.urandom), digester,
            checks=self.tuning.checks, scrub=config.cache.scrub,
            spares=BEACON_SLOTS if self.role is Role.PREFILL else LANDING_SLOTS,
        )  # fmt: skip
        backend = make_backend(config.cache.attention, layout)
        backend.warm_up(layout)
        StepRunner(model, backend, self.guard).warm_up()
        identity = PrefixIdentity(model.info.revision, model.info.tokenizer_digest, layout.fingerprint)
        self._keyer = PrefixKeyer(secret, identity)
        if self.role is Role.PREFILL:
            light_beacon(self.guard, self._keyer)
        return model, StepRunner(model, backend, self.guard, self.tuning.step)

    def _build_prefill(self, model: LanguageModel, runner: StepRunner) -> PrefillService:
        workers, info = self.spec.config.workers, model.info
        limits = PrefillLimits(
            chunk_tokens=workers.chunk_tokens,
            max_running=workers.max_running,
            max_waiting=workers.max_waiting,
            lease_ms=self.spec.config.transfer.lease_ms,
            context_tokens=info.context_tokens,
        )
        core: PrefillCore[SampledToken] = PrefillCore(self.guard, self._keyer, limits, os.urandom)
        self.engine = PrefillEngine(
            core, runner, self.guard, info.eos_token_ids, self.tuning.clock, self.tuning.prefill, self._grammars
        )
        return PrefillService(self.engine, info, self.telemetry.tracer, self.worker_id)

    def _build_decode(self, model: LanguageModel, runner: StepRunner) -> DecodeService:
        workers, info = self.spec.config.workers, model.info
        limits = DecodeLimits(workers.max_running, workers.max_waiting, context_tokens=info.context_tokens)
        core: DecodeCore[SampledToken] = DecodeCore(self.guard, self._keyer, limits, info.eos_token_ids, os.urandom)
        receiver = PageReceiver(self.guard, self.transfer)
        # One for each request that may be in handoff, so that a peer that hangs keeps only its own requests waiting.
        threads = max(PULL_THREADS, workers.max_running)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"pull-{self.worker_id}")
        self._prover = ThreadPoolExecutor(PROVE_THREADS, thread_name_prefix=f"prove-{self.worker_id}")
        timeout_ms = self.spec.config.transfer.timeout_ms
        prover = PeerProver(self.guard, receiver, self._keyer, timeout_ms)
        self._handoffs = Handoffs(
            self.guard, receiver, PeerTable(self.transfer, IncarnationRegistry(), prover), self._executor,
            self.tuning.clock, timeout_ms, info.vocab_size, self.tuning.pull, self._prover,
            Channels(self.dialer),
        )  # fmt: skip
        self.engine = DecodeEngine(
            core, runner, self.guard, receiver, self._handoffs, info.eos_token_ids, self.tuning.clock,
            self.tuning.decode, self._grammars,
        )  # fmt: skip
        return DecodeService(self.engine, info, self.tuning.clock, self.telemetry.tracer, self.worker_id)

    def _secret(self) -> bytes:
        text = self.spec.config.cluster.secret
        if not text:
            raise InvalidInput("no_secret", "the launcher must draw a cluster secret first", field="cluster.secret")
        return bytes.fromhex(text)

    def _drain(self, open_ms: int) -> None:
        self.engine.admission.drain(open_ms)

    async def _cut(self) -> None:
        """What still runs ends with a typed error, as long as there is somebody to tell."""
        error = Unavailable("drain_cut", f"{self.worker_id} stopped before the request was complete")
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(CUT_S):
                await self.engine.end_all(error)

    def _idle(self) -> bool:
        with contextlib.suppress(AttributeError):
            if not self.engine.admission.closed:
                return False
            facts = self.engine.facts()
            leases = len(self.engine.core.leases) if isinstance(self.engine, PrefillEngine) else 0
            return facts.waiting + facts.running + leases == 0
        return True


def build_worker(spec: WorkerSpec) -> BuiltWorker:
    """The worker of a spec, not started."""
    return BuiltWorker(spec)
