"""The soak: very many short requests through a real cluster in this process, and nothing may grow.

Gateway, prefill and decode workers talk gRPC and move pages through the shared-memory engine as they always do; they
share one process so that every table of every part can be looked at. Every answer is judged, and every wave of
requests must leave the pages where they were. Between waves the prefill worker is replaced a few times, so that what
belongs to a former life shows if it stays.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cluster.chaos.flat import MIN_SAMPLES, Allowance, Judged, judge_all
from cluster.chaos.load import Crowd
from cluster.chaos.plan import Ask
from cluster.chaos.run import Progress
from cluster.chaos.verdict import Totals, judge
from cluster.chaos.watch import of_process, table_sizes
from cluster.config import load
from cluster.gateway.served import ServedModel, Sources
from cluster.gateway.server import Gateway
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from kvstore.errors import InvalidInput
from kvstore.layout import KvFormat
from model.probe import build_probe, echo_of
from model.sampling import SamplingParams
from prefill.engine import PrefillEngine
from sim.oracle import Oracle
from wire.clocks import now_ms

MAX_REQUESTS = 10_000_000
LAG_TOKENS = 16  # of the probe: prompts can be short and are still spelled by the answer
PAGE_TOKENS = 8
PROMPT_TOKENS = (16, 30)
ANSWER_TOKENS = (2, 4)
AT_ONCE = 24
SAMPLES = 100
ORACLE_SAMPLES = 4
DEADLINE_S = 30.0
SETTLE_S = 20.0
READY_TIMEOUT_MS = 30_000
ALLOWANCES = {
    "resident_bytes": Allowance(share=0.05, number=float(8 << 20)),
    "descriptors": Allowance(number=4),
    # Pools make their threads when that many are needed at once, which a busy host does late: of each decode worker
    # AT_ONCE pulls and four proofs; the loop's own, the step threads and gRPC's beside them.
    "threads": Allowance(limit=2 * (AT_ONCE + 4) + 24),
    # A thread may hold its last copy's region until its next copy.
    "shared_regions": Allowance(number=2),
    "registered_regions": Allowance(),
    # Dead incarnations are remembered on purpose, at most so many.
    "IncarnationRegistry._dead": Allowance(limit=65_536),
    # The last requests that ended, for `genlock explain`.
    "EndedRequests._kept": Allowance(limit=512),
    # A channel to each former endpoint of a prefill worker, of each decode worker.
    "Channels._open": Allowance(limit=2 * 1024),
    "Channels._retired": Allowance(limit=2 * 64),
}
TABLES = Allowance(share=0.1, number=8)


@dataclass(frozen=True)
class SoakSettings:
    requests: int = 100_000
    seed: int = 0
    engine: str = "shm"
    decode: int = 2
    restarts: int = 5  # of the prefill worker, spread over the run

    def __post_init__(self) -> None:
        if not SAMPLES // MIN_SAMPLES <= self.requests <= MAX_REQUESTS:
            raise InvalidInput("bad_soak", f"requests must be 10 to {MAX_REQUESTS}", field="requests")


@dataclass(frozen=True)
class SoakReport:
    """A soak as it is printed."""

    requests: int
    seed: int
    engine: str
    seconds: float
    requests_per_s: float
    ok: int
    errors_by_cause: dict[str, int]
    hung: int
    wrong: int
    foreign_tokens: int
    restarts: int
    samples: int
    pages_back: bool
    not_back: tuple[str, ...]
    series: tuple[Judged, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the soak failed, in words; empty when it passed."""
        grown = [j for j in self.series if not j.flat]
        checks = (
            (
                self.ok == self.requests,
                f"{self.requests - self.ok} of {self.requests} answers were not right",
            ),
            (self.pages_back, "pages did not come back: " + "; ".join(self.not_back[:5])),
            (not grown, "not flat: " + "; ".join(f"{j.name} {j.first:g} -> {j.last:g}" for j in grown)),
        )
        return tuple(text for good, text in checks if not good)


class SoakCluster:
    """One prefill worker, some decode workers and a gateway, all in this process on one model."""

    def __init__(self, settings: SoakSettings) -> None:
        self.model, self._tokenizer = build_probe(lag_tokens=LAG_TOKENS)
        self._config = load(
            flags={
                "model.name": "probe",
                "cluster.secret": os.urandom(16).hex(),
                "cache.page_tokens": PAGE_TOKENS,
                "cache.prefill_pages": 256,
                "cache.decode_pages": 256,
                "transfer.engine": settings.engine,
                "workers.max_running": AT_ONCE,
                "workers.max_waiting": 4 * AT_ONCE,
                "workers.status_poll_ms": 500,
                "api.port": 0,
                "api.default_deadline_ms": int(DEADLINE_S * 1000),
            }
        ).config
        self._decode_names = [f"decode-{n}" for n in range(settings.decode)]
        self.workers: dict[str, BuiltWorker] = {}
        self.gateway: Gateway
        self.endpoint = ""

    async def start(self) -> None:
        for name in ("prefill-0", *self._decode_names):
            await self._start_worker(name)
        served = ServedModel(self.model.info, self._tokenizer)
        self.gateway = Gateway(self._config, served, Sources(now_ms=now_ms, random_bytes=os.urandom))
        self.endpoint = await self.gateway.start()
        for worker in self.workers.values():
            self.gateway.add_worker(worker.worker_id, worker.role, worker.endpoint)
        await self.gateway.wait_ready(READY_TIMEOUT_MS)

    async def stop(self) -> None:
        if hasattr(self, "gateway"):
            await self.gateway.stop(0)
        for worker in self.workers.values():
            await worker.stop(0)

    async def restart_prefill(self) -> None:
        """Another life of the prefill worker, same name."""
        await self.gateway.remove_worker("prefill-0")
        await self.workers.pop("prefill-0").stop(0)
        worker = await self._start_worker("prefill-0")
        self.gateway.add_worker(worker.worker_id, worker.role, worker.endpoint)
        await self.gateway.wait_ready(READY_TIMEOUT_MS)

    async def not_back(self) -> str:
        """What is not where it was, in words, after waiting for it; empty when every page is nobody's."""
        deadline = time.monotonic() + SETTLE_S
        while left := [text for text in map(_held, self.workers.values()) if text]:
            if time.monotonic() >= deadline:
                return "; ".join(left)
            await asyncio.sleep(0.01)
        return ""

    async def empty_cache(self) -> str:
        """Gives up the prefix cache; then every page must be free. Returns what is not."""
        for worker in self.workers.values():
            if isinstance(worker.engine, PrefillEngine):
                await worker.engine.loop.call(worker.engine.core.evict_all)
        counts = {name: worker.guard.counts() for name, worker in self.workers.items()}
        return "; ".join(f"{name}: {c.free} of {c.total} pages free" for name, c in counts.items() if c.free != c.total)

    async def _start_worker(self, name: str) -> BuiltWorker:
        role = Role(name.split("-")[0])
        worker = self.workers[name] = BuiltWorker(WorkerSpec(role, name, self._config), WorkerTuning(model=self.model))
        await worker.start()
        return worker


def _held(worker: BuiltWorker) -> str:
    status = worker.facts()
    pool = status.pool
    busy = status.running_requests + status.waiting_requests + status.leases
    if pool.free + pool.cached == pool.pages and not pool.quarantined and not busy:
        return ""
    return f"{worker.worker_id}: {pool.free}+{pool.cached} of {pool.pages} pages, {busy} requests or leases"


@dataclass(frozen=True)
class _Wave:
    prompts: list[tuple[int, ...]]
    asks: list[Ask]


def waves(settings: SoakSettings) -> Iterator[_Wave]:
    """The requests, a sample's worth at a time. Every prompt is its own; every fourth begins like the one before."""
    rng = random.Random(f"soak {settings.seed}")
    done = 0
    last: tuple[int, ...] = ()
    for sample in range(1, SAMPLES + 1):
        until = settings.requests * sample // SAMPLES
        prompts: list[tuple[int, ...]] = []
        for number in range(done, until):
            own = tuple(rng.randrange(33, 127) for _ in range(rng.randint(*PROMPT_TOKENS)))
            last = last[:PAGE_TOKENS] + own[PAGE_TOKENS:] if last and number % 4 == 3 else own
            prompts.append(last)
        asks = [Ask(done + n, 0, n, rng.randint(*ANSWER_TOKENS), label=f"soak-{done + n}") for n in range(until - done)]
        done = until
        if asks:
            yield _Wave(prompts, asks)


class Soak:
    def __init__(self, settings: SoakSettings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._totals = Totals()
        self._not_back: list[str] = []
        self._answered: list[int] = []
        self._series: dict[str, list[float]] = {}

    async def run(self) -> SoakReport:
        self._progress("starting", 0.0)
        cluster = SoakCluster(self._settings)
        check_oracle(cluster, self._settings.seed)
        restarts = 0
        try:
            await cluster.start()
            gc.collect()
            gc.freeze()  # what is there now stays; looking through it at each sample would take most of the time
            begin = time.monotonic()
            every = SAMPLES // (self._settings.restarts + 1)
            for number, wave in enumerate(waves(self._settings), 1):
                await self._wave(cluster, wave)
                self._sample(cluster)
                self._progress(f"{self._totals.sent} requests", self._totals.sent / self._settings.requests)
                if number % every == 0 and restarts < self._settings.restarts:
                    await cluster.restart_prefill()
                    restarts += 1
            seconds = time.monotonic() - begin
            if left := await cluster.empty_cache():
                self._not_back.append(left)
        finally:
            gc.unfreeze()
            await cluster.stop()
        return self._report(seconds, restarts)

    async def _wave(self, cluster: SoakCluster, wave: _Wave) -> None:
        crowd = Crowd(cluster.endpoint, wave.prompts, DEADLINE_S)
        todo = iter(wave.asks)

        async def one_after_another() -> None:
            for ask in todo:
                self._totals.sent += 1
                seen = await crowd.one(ask)
                wanted = echo_of(wave.prompts[ask.prompt_no], ask.answer_tokens, LAG_TOKENS)
                self._totals.count(seen, judge(wanted, seen))

        try:
            await asyncio.gather(*(one_after_another() for _ in range(AT_ONCE)))
        finally:
            await crowd.close()
        if left := await cluster.not_back():
            self._not_back.append(f"after {self._totals.sent} requests: {left}")

    def _sample(self, cluster: SoakCluster) -> None:
        gc.collect()
        workers = cluster.workers.values()
        sizes = {**of_process(), **table_sizes([cluster.gateway, *workers])}
        sizes["registered_regions"] = float(sum(worker.transfer.regions() for worker in workers))
        for name in sizes.keys() | self._series.keys():
            values = self._series.setdefault(name, [0.0] * len(self._answered))
            values.append(sizes.get(name, 0.0))
        self._answered.append(self._totals.sent)

    def _report(self, seconds: float, restarts: int) -> SoakReport:
        totals = self._totals
        return SoakReport(
            requests=self._settings.requests,
            seed=self._settings.seed,
            engine=self._settings.engine,
            seconds=round(seconds, 1),
            requests_per_s=round(totals.sent / seconds, 1),
            ok=totals.ok,
            errors_by_cause=dict(sorted(totals.errors_by_cause.items())),
            hung=totals.hung,
            wrong=totals.wrong,
            foreign_tokens=totals.foreign_tokens,
            restarts=restarts,
            samples=len(self._answered),
            pages_back=not self._not_back,
            not_back=tuple(self._not_back),
            series=judge_all(self._answered, self._series, ALLOWANCES, TABLES),
        )


def check_oracle(cluster: SoakCluster, seed: int) -> None:
    """The probe's answer has a closed form; here the oracle computes some of them, so that the form is proved."""
    oracle = Oracle(cluster.model, page_tokens=PAGE_TOKENS, kv_format=KvFormat.INT8)
    first = next(waves(SoakSettings(requests=SAMPLES * ORACLE_SAMPLES, seed=seed)))
    for prompt in first.prompts:
        answer = oracle.answer(prompt, SamplingParams(max_tokens=ANSWER_TOKENS[1], ignore_eos=True))
        assert [t.token_id for t in answer] == echo_of(prompt, ANSWER_TOKENS[1], LAG_TOKENS), "the closed form holds"
