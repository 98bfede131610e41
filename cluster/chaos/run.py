"""One chaos run: an arena, a plan, round after round, a report."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

from cluster.chaos import balloon
from cluster.chaos.arena import Arena, Death, Place
from cluster.chaos.faults import Saboteur
from cluster.chaos.load import Crowd
from cluster.chaos.network import Network, links_of, network_of
from cluster.chaos.plan import REGISTRY_FAULTS, Ask, Fault, Round, Shape, make_plan
from cluster.chaos.registry import MISSING, RegistryServer, find_server
from cluster.chaos.verdict import Report, Seen, Totals, judge
from cluster.chaos.worker import Switch, build_for_chaos
from cluster.config import load
from cluster.gateway.served import ServedModel
from cluster.launch.launcher import Launcher
from cluster.launch.ray_launcher import RayLauncher
from cluster.launch.up import specs_of
from cluster.selftest.lab import PAGE_TOKENS, Subject, load_subject
from cluster.settings import Config
from model.probe import echo_of

DEADLINE_S = 10.0  # of a request; held by the gateway
SETTLE_S = 20.0  # longest wait for pages after a round
SETTLE_POLL_S = 0.05
POOL_PAGES = 96  # less than what eight long requests need: pools run dry
PROMPT_TOKENS = (64, 160)
ORACLE_SAMPLES = 4
# What must be off for a foreign page to reach an answer.
RECEIPT_CHECKS = ("header", "prefix_key", "digest", "source_tag")


class Progress(Protocol):
    """Hears in words what is done, and the share of the run that is over."""

    def __call__(self, text: str, share: float) -> None: ...


def no_progress(text: str, share: float) -> None:
    """For callers that do not want to hear."""


@dataclass(frozen=True)
class ChaosSettings:
    """`control`: receipt checks off and foreign pages injected all the time; the run must then fail."""

    shape: Shape
    engine: str = "shm"
    model: str = "probe"
    prefill: int = 2
    decode: int = 2
    control: bool = False
    flags: tuple[tuple[str, object], ...] = ()

    def config(self, nixl_transport: str, registry: Mapping[str, object]) -> Config:
        """The cluster's settings. Raises InvalidInput."""
        return load(
            flags={
                "model.name": self.model,
                "cache.page_tokens": PAGE_TOKENS,
                "cache.prefill_pages": POOL_PAGES,
                "cache.decode_pages": POOL_PAGES,
                "transfer.engine": self.engine,
                "transfer.nixl_transport": nixl_transport,
                "transfer.timeout_ms": 5000,
                "transfer.lease_ms": 5000,
                "workers.prefill": self.prefill,
                "workers.decode": self.decode,
                "workers.cpus": 0.1,
                "workers.status_poll_ms": 200,
                "workers.status_timeout_ms": 1000,
                "api.port": 0,
                "api.default_deadline_ms": int(DEADLINE_S * 1000),
                **registry,
                **dict(self.flags),
            }
        ).config


class ChaosRun:
    """Owns what a run makes; `run` cleans up whatever happens."""

    def __init__(self, settings: ChaosSettings, progress: Progress = no_progress) -> None:
        self._progress = progress
        self._totals = Totals()
        self._back_ms: list[float] = []
        self._not_back: list[str] = []
        self._lag_s = 0.0
        self._network: Network | None
        self._network, self._skipped = network_of(settings.engine)
        self._server = find_server()
        if not self._server:
            self._skipped.update({kind.value: MISSING for kind in sorted(REGISTRY_FAULTS)})
        if no_balloon := balloon.why_not():
            self._skipped[Fault.MEMORY_PRESSURE.value] = no_balloon
        self._settings = settings
        names = tuple(spec.worker_id for spec in specs_of(self._config()))
        kinds = tuple(kind for kind in settings.shape.kinds if kind.value not in self._skipped)
        self.shape = replace(settings.shape, kinds=kinds, workers=names, links=links_of(names))

    def _config(self, registry: RegistryServer | None = None) -> Config:
        transport = "auto" if self._network is None else "tcp"
        return self._settings.config(transport, {} if registry is None else registry.flags())

    async def run(self) -> Report:
        """Raises what the start of a cluster raises; what happens after that is in the report."""
        plan = make_plan(self.shape)
        self._progress("computing the oracle's answers", 0.0)
        subject = await asyncio.to_thread(load_subject, self._settings.model)
        prompts, answers = await asyncio.to_thread(catalogue, subject, self.shape)
        folder = tempfile.mkdtemp(prefix="genlock-chaos-")
        off = RECEIPT_CHECKS if self._settings.control else ()
        builder = functools.partial(build_for_chaos, folder, off)
        launcher: Launcher = RayLauncher(builder)
        place: Place = lambda spec: spec  # noqa: E731 # replaced where there is a network
        if self._network is not None:
            launcher, place = self._network.launcher(builder), self._network.place
        served = ServedModel(subject.model.info, subject.tokenizer)
        registry: RegistryServer | None = None
        arena: Arena | None = None
        begin = time.monotonic()
        try:
            if self._network is not None:
                await self._network.start()
            if self._server:
                host = "127.0.0.1" if self._network is None else self._network.near_host
                registry = RegistryServer(self._server, Path(folder), host)
                await registry.start()
            report = functools.partial(self._progress, share=0.0)
            arena = Arena(self._config(registry), launcher, served, folder, report, place)
            saboteur = Saboteur(arena, self._network, registry)
            await arena.start()
            begin = time.monotonic()
            crowd = Crowd(arena.endpoint, prompts, DEADLINE_S)
            try:
                rounds = await self._rounds(plan, arena, saboteur, crowd, answers)
            finally:
                await crowd.close()
            return self._report(arena, saboteur, rounds, time.monotonic() - begin)
        finally:
            if arena is not None:
                await arena.stop()
            if registry is not None:
                registry.kill()
            if self._network is not None:
                await self._network.stop()
            shutil.rmtree(folder, ignore_errors=True)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _rounds(
        self, plan: Sequence[Round], arena: Arena, saboteur: Saboteur, crowd: Crowd, answers: Sequence[tuple[int, ...]]
    ) -> int:
        """Plays rounds until the time is over, at least one; returns how many."""
        limit_s = self.shape.minutes * 60
        begin = time.monotonic()
        if self._settings.control:
            for name in arena.names:
                arena.board(name).set(Switch.FOREIGN_PAGES, 1)
        for number, played in enumerate(plan):
            if number and time.monotonic() - begin >= limit_s:
                return number
            share = min(1.0, (time.monotonic() - begin) / limit_s)
            self._progress(f"round {number + 1}: {', '.join(f.kind.value for f in played.faults) or 'no fault'}", share)
            await self._round(number, played, arena, saboteur, crowd, answers)
        return len(plan)

    async def _round(
        self, number: int, played: Round, arena: Arena, saboteur: Saboteur, crowd: Crowd,
        answers: Sequence[tuple[int, ...]],
    ) -> None:  # fmt: skip
        def sent() -> None:
            self._totals.sent += 1

        def ended(ask: Ask, seen: Seen) -> None:
            self._totals.count(seen, judge(answers[ask.prompt_no][: ask.answer_tokens], seen))

        faults = [asyncio.create_task(saboteur.carry_out(fault)) for fault in played.faults]
        try:
            await crowd.run(played.asks, sent, ended)
            # Timed on the workers that no fault holds now; those have to be back, too, once they are healed.
            begin = time.monotonic()
            await self._settle(arena, lambda: set(arena.names) - saboteur.broken - arena.dead)
            self._back_ms.append((time.monotonic() - begin) * 1000)
            await asyncio.gather(*faults)
            await arena.rescued()
        finally:
            for task in faults:
                task.cancel()
        self._lag_s = max(self._lag_s, crowd.lag_s)
        left = await self._settle(arena, lambda: set(arena.names))
        if left:
            self._not_back.append(f"round {number + 1}: {'; '.join(left)}")

    async def _settle(self, arena: Arena, names: Callable[[], Collection[str]]) -> list[str]:
        """Waits for the baseline of these workers, within the limit. Returns what is not back."""
        deadline = time.monotonic() + SETTLE_S
        while left := await arena.not_at_baseline(names()):
            if time.monotonic() >= deadline:
                return left
            await asyncio.sleep(SETTLE_POLL_S)
        return []

    def _excused(self, death: Death) -> bool:
        """A known limit of UCX over TCP, see kvstore/transfer/nixl.py: an owner that was stopped in the middle of a
        read is aborted when it goes on."""
        return self._network is not None and self._settings.engine == "nixl" and death.was_stopped

    def _report(self, arena: Arena, saboteur: Saboteur, rounds: int, seconds: float) -> Report:
        totals = self._totals
        boards = [arena.board(name) for name in arena.names]
        return Report(
            seed=self.shape.seed,
            minutes=self.shape.minutes,
            seconds=round(seconds, 1),
            engine=self._settings.engine,
            model=self._settings.model,
            rounds=rounds,
            sent=totals.sent,
            ok=totals.ok,
            cancels=totals.cancels,
            errors_by_cause=dict(sorted(totals.errors_by_cause.items())),
            hung=totals.hung,
            wrong=totals.wrong,
            foreign_tokens=totals.foreign_tokens,
            untyped=totals.untyped,
            tokens=totals.tokens,
            kills=saboteur.kills,
            faults=dict(sorted(saboteur.done.items())),
            skipped=self._skipped,
            deaths=tuple(f"{d.worker_id}: {d.detail}" for d in arena.deaths if not self._excused(d)),
            excused_deaths=sum(self._excused(death) for death in arena.deaths),
            fault_errors=(*saboteur.errors, *arena.rescue_errors),
            pages_back=not self._not_back,
            pages_back_ms={"p50": round(median(self._back_ms), 1), "max": round(max(self._back_ms), 1)},
            not_back=tuple(self._not_back),
            refused_log_lines=sum(board.get(Switch.REFUSED_LINES) for board in boards),
            foreign_pages=sum(board.get(Switch.INJECTED_PAGES) for board in boards),
            link_packets=0 if self._network is None else self._network.packets,
            balloon_mib=saboteur.balloon_mib,
            loop_lag_ms=round(self._lag_s * 1000, 1),
            adds_up=totals.add_up,
        )


def catalogue(subject: Subject, shape: Shape) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The prompts of a run, each hiding its own marker in its last tokens, and the oracle's answers. Half of the
    prompts begin like their neighbour, so that pages are shared."""
    low, high = PROMPT_TOKENS
    prompts: list[tuple[int, ...]] = []
    for number in range(shape.prompts):
        length = low + (high - low) * number // max(1, shape.prompts - 1)
        prompt = subject.prompt(f"{shape.seed}.{number}", length)
        if number % 2:
            shared = min(length - low, 32)
            prompt = prompts[-1][:shared] + prompt[shared:]
        prompts.append(prompt)
    most = shape.answer_tokens[1]
    if subject.name != "probe":
        return prompts, [subject.answer(prompt, most).tokens for prompt in prompts]
    # The probe's answer has a closed form. The oracle proves it on some prompts; computing all takes minutes.
    for prompt in prompts[:: max(1, len(prompts) // ORACLE_SAMPLES)]:
        assert list(subject.answer(prompt, most).tokens) == echo_of(prompt, most), "the closed form holds"
    return prompts, [tuple(echo_of(prompt, most)) for prompt in prompts]
