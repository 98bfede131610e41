"""Runs the layers: so many cases of each, every one reproducible by its seed and its number."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

from tests.fuzz import calls, codecs, doors, numbers, pages
from tests.fuzz.layer import Finding, Layer, Report

PURE: tuple[Layer, ...] = codecs.LAYERS + pages.LAYERS
LIVE = {**calls.LIVE, **numbers.LIVE, **doors.LIVE}
BLOCK = 60  # live cases beside one healthy neighbour
AT_ONCE = 6
DRAINS = 40
MAX_FINDINGS = 20


def share(of_hundred_thousand: int, cases: int) -> int:
    return max(1, of_hundred_thousand * cases // 100_000)


def run_pure(layer: Layer, cases: int, seed: int) -> Report:
    """Cases 0..cases-1 of a layer without a network."""
    report = Report(layer.name)
    began = time.monotonic()
    under = layer.make(seed)
    for number in range(cases):
        try:
            report.outcomes[under.case(number)] += 1
        except Exception as error:  # also a Finding: a fuzzer goes on
            report.findings.append(f"{layer.name}, seed {seed}, case {number}: {type(error).__name__}: {error}")
            if len(report.findings) >= MAX_FINDINGS:
                break
        report.cases += 1
    try:
        under.close()
    except Finding as finding:
        report.findings.append(f"{layer.name}, seed {seed}, at the end: {finding}")
    report.seconds = time.monotonic() - began
    return report


async def run_live(amounts: dict[str, int], seed: int) -> list[Report]:
    """Cases against one live cluster; at its end everything is back, and then it is drained."""
    reports = {name: Report(name) for name in amounts}
    end = Report("the live cluster's end")
    try:
        async with calls.live_cluster() as live:
            for name, amount in amounts.items():
                await _run_live_layer(live, reports[name], amount, seed)
            await calls.require_baseline(live)
            await calls.drains(live, DRAINS, random.Random(seed))
            end.cases += DRAINS
            end.outcomes["drained"] += DRAINS
    except Exception as error:
        end.findings.append(f"seed {seed}, at the end: {type(error).__name__}: {error}")
    return [*reports.values(), end]


async def _run_live_layer(live: calls.Live, report: Report, amount: int, seed: int) -> None:
    began = time.monotonic()
    case = LIVE[report.layer][1]
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with gate:
            try:
                report.outcomes[await case(live, random.Random(f"{seed}/{report.layer}/{number}"))] += 1
            except Exception as error:
                report.findings.append(f"{report.layer}, seed {seed}, case {number}: {type(error).__name__}: {error}")
            report.cases += 1

    for start in range(0, amount, BLOCK):

        async def block(first: int = start) -> None:
            await asyncio.gather(*(one(n) for n in range(first, min(first + BLOCK, amount))))

        await calls.beside(live, block)
        if len(report.findings) >= MAX_FINDINGS:
            break
    report.seconds = time.monotonic() - began


def run_all(cases: int, seed: int, on_report: Callable[[Report], None] = lambda report: None) -> list[Report]:
    """All layers, in proportion to their shares."""
    reports: list[Report] = []
    for layer in PURE:
        reports.append(run_pure(layer, share(layer.share, cases), seed))
        on_report(reports[-1])
    amounts = {name: share(part, cases) for name, (part, _) in LIVE.items()}
    for report in asyncio.run(run_live(amounts, seed)):
        reports.append(report)
        on_report(report)
    return reports


def findings(reports: Sequence[Report]) -> list[str]:
    return [finding for report in reports for finding in report.findings]
