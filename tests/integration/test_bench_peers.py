"""One case of the side-by-side comparison on a cluster in this process, with the probe model: its answers tell no
marker, but the way of a case is the same."""

from __future__ import annotations

import asyncio

from bench.peers import cases
from bench.peers.cases import CASES, Verdict
from bench.peers.genlock_cases import marked_subject, run_case


async def test_another_live_requests_pages_end_in_an_error_and_the_neighbour_is_served(monkeypatch):
    # The probe's tokens are bytes: the prompt of the comparison would not fit.
    monkeypatch.setattr(cases, "FILLERS", 2)
    case = next(case for case in CASES if case.name == "other-live")
    # The case makes a loop of its own.
    seen = await asyncio.to_thread(run_case, marked_subject("probe"), case, 0)
    assert (seen.told, seen.verdict) == ("ABORTED/foreign_prefix_key", Verdict.REFUSED)
    assert seen.others_served
    assert seen.note
