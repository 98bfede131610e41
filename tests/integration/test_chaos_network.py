"""Chaos over two network namespaces: the link between two workers on two hosts is cut and slowed."""

from __future__ import annotations

import pytest

from cluster.chaos.network import why_not
from cluster.chaos.plan import Fault, Shape
from cluster.chaos.run import ChaosRun, ChaosSettings
from kvstore.transfer.nixl import NixlEngine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


async def test_a_link_that_is_cut_and_slowed_costs_typed_errors_at_most():
    reason = NixlEngine.available() or why_not("nixl")
    if reason:
        pytest.skip(f"no link can be made here: {reason}")
    shape = Shape(
        seed=2, minutes=0.1, round_ms=8000, faults_per_round=2, kinds=(Fault.LINK_CUT, Fault.LINK_SLOW), prompts=8,
        answer_tokens=(4, 16),
    )  # fmt: skip
    report = await ChaosRun(ChaosSettings(shape, engine="nixl")).run()
    assert report.failures == ()
    assert report.faults == {"link_cut": 1, "link_slow": 1}
    assert report.skipped == {}
    assert report.link_packets, "no packet of the pair met a fault"
