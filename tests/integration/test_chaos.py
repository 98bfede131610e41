"""A short chaos run on a real cluster, and the control that shows that its judge can see."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.chaos.plan import Fault, Shape
from cluster.chaos.run import ChaosRun, ChaosSettings

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

# One of each that this host can have; foreign pages must be stopped by the checks.
SHORT = Shape(
    seed=1,
    minutes=0.2,
    round_ms=12_000,  # one round, so that all faults happen however slow the host is
    faults_per_round=11,
    kinds=(
        Fault.KILL, Fault.STOP, Fault.FOREIGN_PAGE, Fault.GATEWAY_RESTART, Fault.CANCEL_STORM, Fault.DISK_FULL,
        Fault.CLOCK_JUMP, Fault.SAME_IDS, Fault.REGISTRY_KILL, Fault.REGISTRY_FLUSH, Fault.MEMORY_PRESSURE,
    ),
    prompts=16,
    answer_tokens=(4, 24),
)  # fmt: skip


async def test_under_chaos_every_stream_is_right_or_ends_with_a_typed_error_and_every_page_comes_back():
    report = await ChaosRun(ChaosSettings(SHORT)).run()
    assert report.failures == ()
    assert report.ok > report.sent // 4
    assert report.kills == 1
    assert report.faults == {kind.value: 1 for kind in SHORT.kinds if kind.value not in report.skipped}
    assert report.balloon_mib or "memory_pressure" in report.skipped
    assert report.refused_log_lines
    assert report.errors_by_cause
    # A host with little memory may have none to spare.
    assert set(report.skipped) - {"memory_pressure"} == {"link_cut", "link_slow"}


async def test_without_the_receipt_checks_foreign_pages_reach_answers_and_the_judge_says_so():
    shape = replace(SHORT, minutes=0.05, round_ms=3000, kinds=(Fault.SAME_IDS,), faults_per_round=1)
    report = await ChaosRun(ChaosSettings(shape, prefill=1, decode=1, control=True)).run()
    assert report.foreign_pages
    assert report.foreign_tokens
    assert any("not the oracle's" in text for text in report.failures)
