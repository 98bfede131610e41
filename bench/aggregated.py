"""The peer without a split: prefill and decode in one process, on one model, one pool and one step loop.

Made of the cluster's own parts, behind the same gateway, so that only the split and the transfer are missing: a
request's pages are reserved by decode's core as ever, but its prompt is computed right there, in chunks, one chunk
between two decode steps (the chunked prefill of Sarathi-Serve, Agrawal et al. 2024, with chunk and decode rows as two
steps instead of one). Pages are sealed and every check on reads and writes runs. There is no prefix cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import grpc.aio

from cluster.launch.build import BuiltWorker
from cluster.launch.spec import Worker, WorkerSpec
from cluster.roles import Role
from cluster.settings import Config
from decode.core import DecodeCore, DecodeLimits, StartHandoff
from decode.engine import DecodeEngine, DecodeHooks
from decode.peers import PeerTable
from decode.pull import HandoffResult, Handoffs
from decode.service import DecodeService
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError
from kvstore.header import PageHeader
from kvstore.receive import PageReceiver
from kvstore.registry import IncarnationRegistry
from kvstore.step import PageRun, PlanRow, StepPlan
from model.base import LanguageModel
from model.runner import StepRunner
from model.sampler import SampledToken, SampleRow
from wire.options import server_options
from wire.worker_status import WorkerStatusService


def aggregated_config(config: Config) -> Config:
    """One process with the threads, pages and queues of all the cluster's workers."""
    workers, cache = config.workers, config.cache
    own = replace(
        workers,
        prefill=1,
        decode=1,
        threads=workers.threads * (workers.prefill + workers.decode),
        max_running=workers.max_running * workers.decode,
        max_waiting=workers.max_waiting * workers.decode,
    )
    pages = cache.prefill_pages * workers.prefill + cache.decode_pages * workers.decode
    return replace(config, workers=own, cache=replace(cache, decode_pages=pages))


def build_aggregated(spec: WorkerSpec) -> Worker:
    """The worker that does both, where decode is asked for; where prefill is, a name for the gateway's routes."""
    return AggregatedWorker(spec) if spec.role is Role.DECODE else NamedPlace(spec)


class NamedPlace:
    """A prefill worker in name: it answers status calls and nothing else. The gateway routes over pairs."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._server: grpc.aio.Server | None = None

    @property
    def worker_id(self) -> str:
        return self._spec.worker_id

    @property
    def role(self) -> Role:
        return self._spec.role

    async def start(self) -> str:
        server = grpc.aio.server(options=server_options())
        status = WorkerStatusService(
            lambda: worker_pb2.WorkerStatus(worker_id=self.worker_id, role=self.role.value, pid=os.getpid()),
            lambda _open_ms: None,
            lambda: True,
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(status, server)
        port = server.add_insecure_port(f"{self._spec.host}:{self._spec.port}")
        self._server = server
        await server.start()
        return f"{self._spec.host}:{port}"

    async def stop(self, grace_ms: int) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)


class AggregatedWorker(BuiltWorker):
    """A decode worker that prefills by itself."""

    def _build_decode(self, model: LanguageModel, runner: StepRunner) -> DecodeService:
        workers, info = self.spec.config.workers, model.info
        limits = DecodeLimits(workers.max_running, workers.max_waiting, context_tokens=info.context_tokens)
        core: DecodeCore[SampledToken] = DecodeCore(self.guard, self._keyer, limits, info.eos_token_ids, os.urandom)
        receiver = PageReceiver(self.guard, self.transfer)
        self._executor = ThreadPoolExecutor(1)  # never used: it starts no thread
        local = LocalPrefill(
            self.guard, receiver, PeerTable(self.transfer, IncarnationRegistry()), self._executor, self.tuning.clock,
            self.spec.config.transfer.timeout_ms, info.vocab_size,
        )  # fmt: skip
        self._handoffs = local
        self.engine = engine = DecodeEngine(
            core, runner, self.guard, receiver, local, info.eos_token_ids, self.tuning.clock,
            DecodeHooks(before_plan=local.turn),
        )  # fmt: skip
        local.bind(
            runner, info.eos_token_ids, workers.chunk_tokens, lambda number: core.request(number) is not None,
            engine.loop.post,
        )  # fmt: skip
        return DecodeService(engine, info, self.tuning.clock)


@dataclass(eq=False)
class _Job:
    """One prompt that is being computed."""

    start: StartHandoff
    submitted_s: float
    settle: Callable[[HandoffResult | GenlockError], None]
    started_s: float = -1.0
    done_tokens: int = 0


@dataclass
class LocalPrefill(Handoffs):
    """In the place of handoffs: computes prompts on decode's own step thread, oldest first."""

    _jobs: deque[_Job] = field(default_factory=deque)
    _steps: int = 0

    def bind(
        self,
        runner: StepRunner,
        eos_token_ids: tuple[int, ...],
        chunk_tokens: int,
        wanted: Callable[[int], bool],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """`wanted`: whether a request still lives; `post`: runs something on the step thread, which then turns."""
        self._runner, self._eos, self._chunk_tokens = runner, eos_token_ids, chunk_tokens
        self._wanted, self._post = wanted, post

    async def run(
        self,
        start: StartHandoff,
        endpoint: str,
        worker: str,
        ends_answer: Callable[[SampledToken], bool],
        deliver: Callable[[HandoffResult], None],
        trail: object = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[HandoffResult] = loop.create_future()

        def resolve(result: HandoffResult | GenlockError) -> None:
            if future.done():
                return
            if isinstance(result, GenlockError):
                future.set_exception(result)
            else:
                future.set_result(result)

        def settle(result: HandoffResult | GenlockError) -> None:
            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left to tell
                loop.call_soon_threadsafe(resolve, result)

        job = _Job(start, time.monotonic(), settle)
        self._post(lambda: self._jobs.append(job))
        deliver(await future)

    def turn(self) -> bool:
        """On the step thread, before each decode step: one chunk. Always lets decode go on."""
        rows: list[tuple[_Job, PlanRow]] = []
        budget = self._chunk_tokens
        for job in tuple(self._jobs):
            if not self._wanted(job.start.request_no):
                self._jobs.remove(job)
            elif budget > 0:
                row = self._row(job, budget)
                rows.append((job, row))
                budget -= len(row.token_ids)
        if rows:
            self._compute(rows)
        if self._jobs:
            self._post(_turn_again)
        return True

    def _row(self, job: _Job, budget: int) -> PlanRow:
        if job.started_s < 0:
            job.started_s = time.monotonic()
        ids, layout = job.start.ticket.token_ids, self.guard.layout
        end = min(job.done_tokens + budget, len(ids))
        pages = PageRun(job.start.local[: layout.pages_for(end)])
        return PlanRow(job.start.request_no, ids[job.done_tokens : end], job.done_tokens, pages, end == len(ids))

    def _compute(self, rows: list[tuple[_Job, PlanRow]]) -> None:
        self._steps += 1
        sampling = {
            row.request_no: SampleRow(t.sampling, row.context_len, t.generated_tokens, self._eos, t.token_ids)
            for job, row in rows
            for t in (job.start.ticket,)
            if row.wants_logits
        }
        plan = StepPlan(self._steps, tuple(row for _, row in rows))
        for (job, row), result in zip(rows, self._runner.run(plan, sampling), strict=True):
            try:
                if result.error is not None:
                    raise result.error
                self._seal_full(job, row)
            except GenlockError as error:
                self._jobs.remove(job)
                job.settle(error)
                continue
            job.done_tokens = row.context_len
            if result.output is not None:
                self._jobs.remove(job)
                job.settle(_result(job, result.output))

    def _seal_full(self, job: _Job, row: PlanRow) -> None:
        layout = self.guard.layout
        for index in range(row.first_position // layout.page_tokens, row.context_len // layout.page_tokens):
            ref, key = job.start.local[index], job.start.expected.keys[index]
            first = index * layout.page_tokens
            header = PageHeader(ref.tag, layout.fingerprint, first, layout.page_tokens, key)
            self.guard.seal(ref, row.request_no, header, index)


def _turn_again() -> None:
    """A command that only keeps the step loop from idling."""


def _result(job: _Job, first: SampledToken) -> HandoffResult:
    now_s = time.monotonic()
    return HandoffResult(
        first=first,
        cached_tokens=0,
        prefill_queue_ms=1000 * (job.started_s - job.submitted_s),
        prefill_ms=1000 * (now_s - job.started_s),
        transfer_ms=0.0,
        pages=job.start.expected.count,
        verified=False,
    )
