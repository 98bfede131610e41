"""What the guard costs in decode: the same steps of a real model with every check and with none, in turn.

Both sides share pages, weights, kernels and thread; only the checks differ: row seals, entry check, claims on the
pages to be written, the tag compare inside the kernels, exit check. The figures are medians over pairs of steps.

    genlock bench guard --batch 1 --batch 8
    python -m bench.guard --json
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.digest import Digester
from kvstore.errors import InvalidInput
from kvstore.guard import Guard
from kvstore.ids import draw_incarnation
from kvstore.layout import KvFormat
from kvstore.step import PageRun, PlanRow, StepPlan
from kvstore.tables import FLAG_ENTRY, FLAG_EXIT
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from model.attention.select import make_backend
from model.base import LanguageModel
from model.load import load_model
from model.runner import StepRunner
from model.sampler import SampleRow
from model.sampling import SamplingParams

BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 512
PAGE_TOKENS = 32
DISTINCT_PROMPTS = 2
TOKEN_IDS = (1000, 40_000)
KERNEL_PAIRS = 300
NO_CHECKS = ALL_CHECKS.without("rows", "entry", "kernel", "exit", "write")


@dataclass(frozen=True)
class GuardRow:
    """One batch size. Percentages are of the unguarded step; times are microseconds of one step."""

    batch: int
    context_tokens: int
    cost_percent: float  # median over pairs of (guarded / bare - 1)
    # Between these it is with 95 % confidence; where 0 is between them, no cost was seen.
    cost_low_percent: float
    cost_high_percent: float
    p95_percent: float  # 95th percentile of guarded steps over that of bare steps
    step_ms_guarded: float
    step_ms_bare: float
    tokens_per_s_guarded: float
    entry_us: float
    kernel_us: float  # all layers' attention and writes with the compare, less without
    exit_us: float
    pairs: int


def drawn_from(vocab_size: int) -> tuple[int, int]:
    """The ids of a prompt: ordinary tokens of a large vocabulary, all of a small one."""
    return TOKEN_IDS if vocab_size >= TOKEN_IDS[1] else (0, vocab_size)


class _Bench:
    def __init__(self, model: LanguageModel, batch: int, context_tokens: int, attention: str) -> None:
        layout = model.layout(PAGE_TOKENS, KvFormat.INT8)
        pages = layout.pages_for(context_tokens)
        self.guard = Guard(
            layout, batch * pages, MemoryEngine(MemoryFabric(), "bench"), draw_incarnation(os.urandom),
            Digester(b"benchmark secret", layout.slot_bytes),
        )  # fmt: skip
        self.backend = make_backend(attention, layout)
        self.backend.warm_up(layout)
        self.runner = StepRunner(model, self.backend, self.guard)
        rng = np.random.default_rng(7)
        rows: list[PlanRow] = []
        for number in range(1, batch + 1):
            run = PageRun(self.guard.allocate(number, pages))
            ids = tuple(int(t) for t in rng.integers(*drawn_from(model.info.vocab_size), context_tokens))
            if number <= DISTINCT_PROMPTS:
                self._prefill(number, ids, run)
            else:  # contents repeat, pages do not: time depends on the pages alone
                source = rows[number % DISTINCT_PROMPTS].pages.refs_P3[:, 0]
                self.guard._pool.slots_SU8[run.refs_P3[:, 0]] = self.guard._pool.slots_SU8[source]
            rows.append(PlanRow(number, ids[-1:], context_tokens - 1, run))
        self.rows = tuple(rows)
        greedy = SamplingParams()
        self.sampling = {r.request_no: SampleRow(greedy, context_tokens, 0) for r in self.rows}

    def _prefill(self, number: int, ids: tuple[int, ...], run: PageRun) -> None:
        """All tokens but the last."""
        last = len(ids) - 1
        for start in range(0, last, 128):
            end = min(start + 128, last)
            covered = PageRun(run.refs[: self.guard.layout.pages_for(end)])
            row = PlanRow(number, ids[start:end], start, covered, wants_logits=False)
            [result] = self.runner.run(StepPlan(1, (row,)), {})
            assert result.error is None, "prefill is healthy"

    def step_ns(self, checks: Checks) -> int:
        """One decode step; a fresh plan each time, as the scheduler makes it."""
        self.guard.checks = checks
        plan = StepPlan(2, tuple(PlanRow(r.request_no, r.token_ids, r.first_position, r.pages) for r in self.rows))
        start = time.perf_counter_ns()
        results = self.runner.run(plan, self.sampling)
        elapsed = time.perf_counter_ns() - start
        assert all(r.error is None for r in results), "steps are healthy"
        return elapsed

    def parts_us(self) -> tuple[float, float, float]:
        """Median entry check, in-kernel compare of all layers, exit check."""
        self.guard.checks = ALL_CHECKS
        plan = StepPlan(2, self.rows)
        with self.guard.step(plan) as step:
            arrays = step.arrays

            def entry() -> None:
                self.guard._check(arrays, True, FLAG_ENTRY)

            def exit_() -> None:
                self.guard._check(arrays, True, FLAG_EXIT)

            with_check = self._attend(step.read)
            entry_us, exit_us = _median_us(entry, 200), _median_us(exit_, 200)
        self.guard.checks = NO_CHECKS
        with self.guard.step(plan) as step:
            without = self._attend(step.read)
            more_ns = statistics.median(
                on - off
                for on, off in (
                    in_turn(lambda: _time_ns(with_check), lambda: _time_ns(without), turn)
                    for turn in range(KERNEL_PAIRS)
                )
            )
        return entry_us, self.guard.layout.layers * more_ns / 1000, exit_us

    def _attend(self, table) -> Callable[[], object]:  # type: ignore[no-untyped-def] # a ReadTable
        layout = self.guard.layout
        query = torch.randn(len(self.rows), layout.kv_heads * 3, layout.key_width)
        return lambda: self.backend.attend(0, query, table, layout.key_width**-0.5)


def in_turn(one: Callable[[], int], other: Callable[[], int], turn: int) -> tuple[int, int]:
    """What both return, `one`'s first; which of them runs first changes with every turn."""
    if turn % 2:
        return one(), other()
    theirs = other()
    return one(), theirs


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what the values were drawn from is, with 95 % confidence, whatever their distribution: the
    values of rank n/2 -+ 0.98 sqrt(n), outwards. Of fewer than six no two values are so far apart: all of them then."""
    ordered, middle, reach = sorted(values), len(values) / 2, 0.98 * math.sqrt(len(values))
    low, high = math.floor(middle - reach), math.ceil(middle + reach + 1)  # ranks, from 1
    return ordered[max(low, 1) - 1], ordered[min(high, len(ordered)) - 1]


def _time_ns(work: Callable[[], object]) -> int:
    start = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start


def _median_us(work: Callable[[], object], rounds: int) -> float:
    return statistics.median(_time_ns(work) for _ in range(rounds)) / 1000


def measure(model: LanguageModel, batch: int, context_tokens: int, seconds: float, attention: str = "auto") -> GuardRow:
    """Alternates guarded and bare steps for about `seconds`, which of them goes first changing every pair."""
    bench = _Bench(model, batch, context_tokens, attention)
    for checks in (ALL_CHECKS, NO_CHECKS) * 2:
        bench.step_ns(checks)
    guarded: list[int] = []
    bare: list[int] = []
    deadline = time.perf_counter() + seconds
    while len(guarded) < 8 or time.perf_counter() < deadline:
        on, off = in_turn(lambda: bench.step_ns(ALL_CHECKS), lambda: bench.step_ns(NO_CHECKS), len(guarded))
        guarded.append(on)
        bare.append(off)
    entry_us, kernel_us, exit_us = bench.parts_us()
    ratios = [g / b for g, b in zip(guarded, bare, strict=True)]
    cost, low, high = (_percent(ratio) for ratio in (statistics.median(ratios), *median_interval(ratios)))
    p95 = float(np.percentile(guarded, 95) / np.percentile(bare, 95))
    step_ms = statistics.median(guarded) / 1e6
    return GuardRow(
        batch, context_tokens, cost, low, high, _percent(p95), round(step_ms, 3),
        round(statistics.median(bare) / 1e6, 3), round(batch * 1000 / step_ms, 1), round(entry_us, 1),
        round(kernel_us, 1), round(exit_us, 1), len(guarded),
    )  # fmt: skip


def _percent(ratio: float) -> float:
    return round(100 * (ratio - 1), 3)


def run(
    model_name: str, batches: Sequence[int], context_tokens: int, seconds: float, threads: int, attention: str = "auto"
) -> list[GuardRow]:
    """All batch sizes, with progress on stderr."""
    torch.set_num_threads(threads)
    rows: list[GuardRow] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"loading {model_name}", total=len(batches))
        model, _ = load_model(model_name)
        if context_tokens > model.info.context_tokens:
            raise InvalidInput(
                "bad_context", f"{model_name} has a context of {model.info.context_tokens} tokens", field="--context"
            )
        for batch in batches:
            progress.update(task, description=f"batch {batch}, {context_tokens} tokens of context")
            rows.append(measure(model, batch, context_tokens, seconds, attention))
            progress.advance(task)
    return rows


@click.command(
    epilog="""\b
Examples:
  genlock bench guard
  genlock bench guard --batch 8 --context 1024 --seconds 20
  genlock bench guard --json"""
)
@click.option("--batch", "batches", type=click.IntRange(1, 256), multiple=True, help="Batch size; default: 1, 8, 32.")
@click.option("--context", "context_tokens", type=click.IntRange(2, 8192), default=CONTEXT_TOKENS, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1, 3600), default=15.0, show_default=True, help="For each batch.")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True)
@click.option("--model", "model_name", default="smollm2", show_default=True)
@click.option("--attention", type=click.Choice(["auto", "cpu", "reference"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    batches: tuple[int, ...], context_tokens: int, seconds: float, threads: int, model_name: str, attention: str,
    as_json: bool,
) -> int:  # fmt: skip
    """What the page checks cost in decode, against the same steps without them."""
    rows = run(model_name, batches or BATCHES, context_tokens, seconds, threads, attention)
    if as_json:
        click.echo(json.dumps({"rows": [asdict(r) for r in rows]}))
        return 0
    click.echo(
        "batch  context  step guarded/bare ms   cost %      +-   p95 %   entry us  kernel us  exit us  tokens/s  pairs"
    )
    for r in rows:
        half = (r.cost_high_percent - r.cost_low_percent) / 2
        click.echo(
            f"{r.batch:5d}  {r.context_tokens:7d}  {r.step_ms_guarded:9.2f} / {r.step_ms_bare:8.2f}  "
            f"{r.cost_percent:+7.3f} {half:7.3f} {r.p95_percent:+7.3f}  {r.entry_us:9.1f}  {r.kernel_us:9.1f}  "
            f"{r.exit_us:7.1f}  {r.tokens_per_s_guarded:8.1f}  {r.pairs:5d}"
        )
    return 0


if __name__ == "__main__":
    command()
