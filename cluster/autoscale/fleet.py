"""A model of a fleet for trying policies on traces: queues and speeds, no pages. Pure, on a virtual clock.

Prefill workers serve one queue in order, each prompt at a fixed speed. A decode worker shares its time evenly: a token
of each of its b requests takes `token_ms + b * token_ms_each`. Workers need a time to start; one that is told to go
takes nothing new, finishes what it has and is paid for until then.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.autoscale.decide import Counts
from cluster.autoscale.signals import DecodeSignals, PrefillSignals, Signals
from cluster.autoscale.traces import Arrival


@dataclass(frozen=True)
class Speeds:
    """Defaults: a mid-size model on one 8-GPU node, rounded; what matters is the comparison of policies."""

    prefill_tokens_per_s: float = 8000.0
    prompt_ms: float = 30.0
    token_ms: float = 15.0
    token_ms_each: float = 0.4
    slots: int = 64
    pages: int = 8192
    page_tokens: int = 32
    start_s: float = 60.0


@dataclass
class _Prefill:
    ready_s: float
    free_s: float
    leaving: bool = False


@dataclass
class _Decode:
    ready_s: float
    leaving: bool = False
    # Tokens that each request of this worker has had since it came; a request that came at v ends at v + output.
    progress: float = 0.0
    ends: list[tuple[float, int, _Request]] = field(default_factory=list)
    pages: int = 0


@dataclass
class _Request:
    arrival: Arrival
    prefilled_s: float = 0.0
    joined_s: float = 0.0
    started_prefill_s: float = 0.0
    pages: int = 0


W = TypeVar("W", "_Prefill", "_Decode")


@dataclass(frozen=True)
class Served:
    """One finished request, seconds and milliseconds as a client sees them."""

    at_s: float
    ttft_ms: float
    token_ms: float


class ModelFleet:
    def __init__(self, speeds: Speeds, counts: Counts) -> None:
        self.speeds = speeds
        self.wanted = counts
        self._prefills = [_Prefill(0.0, 0.0) for _ in range(counts.prefill)]
        self._decodes = [_Decode(0.0) for _ in range(counts.decode)]
        self._queue: deque[_Request] = deque()
        self._computing: list[tuple[float, int, _Request]] = []
        self._joining: deque[_Request] = deque()
        self._numbers = itertools.count()
        self.served: list[Served] = []
        self.worker_s = [0.0, 0.0]
        self._window: deque[tuple[float, float]] = deque()
        self._recent: deque[tuple[float, Served]] = deque()
        self._waits: deque[tuple[float, float]] = deque()

    @property
    def unfinished(self) -> int:
        running = sum(len(worker.ends) for worker in self._decodes)
        return len(self._queue) + len(self._computing) + len(self._joining) + running

    def scale(self, counts: Counts, now_s: float) -> None:
        """Starts workers, or tells the last ones to go; one that was leaving stays where it is wanted again."""
        self.wanted = counts
        start_s = now_s + self.speeds.start_s
        self._prefills = _scaled(self._prefills, counts.prefill, lambda: _Prefill(start_s, start_s))
        self._decodes = _scaled(self._decodes, counts.decode, lambda: _Decode(start_s))

    def arrive(self, arrival: Arrival) -> None:
        self._queue.append(_Request(arrival))
        self._window.append((arrival.at_s, float(arrival.prompt_tokens)))

    def advance(self, now_s: float, step_s: float) -> None:
        """Everything that happens in (now - step, now]."""
        self.worker_s[0] += len(self._prefills) * step_s
        self.worker_s[1] += len(self._decodes) * step_s
        self._start_prefills(now_s)
        while self._computing and self._computing[0][0] <= now_s:
            _end_s, _number, request = heapq.heappop(self._computing)
            self._joining.append(request)
        self._decode(now_s, step_s)
        self._join(now_s)
        self._prefills = [worker for worker in self._prefills if not (worker.leaving and worker.free_s <= now_s)]
        self._decodes = [worker for worker in self._decodes if not (worker.leaving and not worker.ends)]

    def signals(self, now_s: float, window_s: float = 30.0) -> Signals:
        for past in (self._window, self._recent, self._waits):
            while past and past[0][0] < now_s - window_s:
                past.popleft()
        at_ms = now_s * 1000
        backlog = sum(request.arrival.prompt_tokens for request in self._queue)
        backlog += sum(request.arrival.prompt_tokens for _end, _number, request in self._computing)
        recent = [served for _at, served in self._recent]
        ready = [worker for worker in self._decodes if not worker.leaving and worker.ready_s <= now_s]
        pages = len(ready) * self.speeds.pages
        used = sum(worker.pages for worker in ready)
        mean_prompt = sum(size for _at, size in self._window) / len(self._window) if self._window else 900.0
        # Of a busy worker: a prompt's fixed cost is part of its speed.
        speed = mean_prompt / (mean_prompt / self.speeds.prefill_tokens_per_s + self.speeds.prompt_ms / 1000)
        waits = [wait for _at, wait in self._waits]
        return Signals(
            PrefillSignals(
                at_ms=at_ms,
                ready=sum(not worker.leaving and worker.ready_s <= now_s for worker in self._prefills),
                backlog_tokens=float(backlog),
                arriving_tokens_per_s=sum(size for _at, size in self._window) / window_s,
                worker_tokens_per_s=speed,
                queue_ms=sum(waits) / len(waits) if waits else 0.0,
                ttft_ms=_mean([served.ttft_ms for served in recent]),
            ),
            DecodeSignals(
                at_ms=at_ms,
                ready=len(ready),
                running=float(sum(len(worker.ends) for worker in self._decodes)),
                waiting=float(len(self._joining)),
                worker_slots=float(self.speeds.slots),
                pages=float(pages),
                free_pages=float(pages - used),
                quarantined_pages=0.0,
                token_ms=_mean([served.token_ms for served in recent if served.token_ms > 0]),
            ),
            arrivals=float(len(self._window)),
        )

    def _start_prefills(self, now_s: float) -> None:
        """Hands queued prompts to the worker that is free first, at the moment it was free."""
        open_ones = [worker for worker in self._prefills if not worker.leaving and worker.ready_s <= now_s]
        while self._queue and open_ones:
            worker = min(open_ones, key=lambda one: one.free_s)
            request = self._queue[0]
            begin_s = max(worker.free_s, request.arrival.at_s)
            if begin_s > now_s:
                return
            self._queue.popleft()
            cost_s = request.arrival.prompt_tokens / self.speeds.prefill_tokens_per_s + self.speeds.prompt_ms / 1000
            request.started_prefill_s, request.prefilled_s = begin_s, begin_s + cost_s
            worker.free_s = request.prefilled_s
            self._waits.append((now_s, (begin_s - request.arrival.at_s) * 1000))
            heapq.heappush(self._computing, (request.prefilled_s, next(self._numbers), request))

    def _join(self, now_s: float) -> None:
        """First come, first served, into the emptiest worker with a slot and pages."""
        while self._joining:
            request = self._joining[0]
            total = request.arrival.prompt_tokens + request.arrival.output_tokens
            request.pages = min(self.speeds.pages, -(-total // self.speeds.page_tokens))
            fitting = [
                worker
                for worker in self._decodes
                if not worker.leaving
                and worker.ready_s <= now_s
                and len(worker.ends) < self.speeds.slots
                and worker.pages + request.pages <= self.speeds.pages
            ]
            if not fitting:
                return
            worker = min(fitting, key=lambda one: len(one.ends))
            self._joining.popleft()
            request.joined_s = now_s
            worker.pages += request.pages
            # The first token came with the handoff.
            end = worker.progress + request.arrival.output_tokens - 1
            heapq.heappush(worker.ends, (end, next(self._numbers), request))

    def _decode(self, now_s: float, step_s: float) -> None:
        for worker in self._decodes:
            if not worker.ends:
                continue
            token_s = (self.speeds.token_ms + len(worker.ends) * self.speeds.token_ms_each) / 1000
            worker.progress += step_s / token_s
            while worker.ends and worker.ends[0][0] <= worker.progress:
                _end, _number, request = heapq.heappop(worker.ends)
                worker.pages -= request.pages
                self._finish(request, now_s)

    def _finish(self, request: _Request, now_s: float) -> None:
        further = request.arrival.output_tokens - 1
        served = Served(
            request.arrival.at_s,
            (max(request.prefilled_s, request.joined_s) - request.arrival.at_s) * 1000,
            (now_s - request.joined_s) * 1000 / further if further else 0.0,
        )
        self.served.append(served)
        self._recent.append((now_s, served))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _scaled(workers: list[W], count: int, make: Callable[[], W]) -> list[W]:
    """Stays, returns, comes or goes: as many as `count` are not leaving. Those that still start go first."""
    staying: list[W] = [worker for worker in workers if not worker.leaving]
    for worker in workers:
        if worker.leaving and len(staying) < count:
            worker.leaving = False
            staying.append(worker)
    for worker in sorted(staying, key=lambda one: -one.ready_s)[: max(0, len(staying) - count)]:
        worker.leaving = True
    return workers + [make() for _ in range(count - len(staying))]
