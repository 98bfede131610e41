"""The judge of a chaos run can see: every way to be wrong fails a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.chaos.verdict import End, Report, Seen, Totals, Verdict, judge
from kvstore.errors import GenlockError, Unavailable

WANTED = (5, 6, 7)
GONE = Unavailable("prefill_gone", "gone")


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (Seen(WANTED, finished=True), Verdict(End.OK)),
        (Seen((5, 9, 7), finished=True), Verdict(End.WRONG, "wrong_answer", 1)),
        (Seen((5, 6), finished=True), Verdict(End.WRONG, "wrong_answer", 0)),
        (Seen((*WANTED, 8), finished=True), Verdict(End.WRONG, "wrong_answer", 1)),
        (Seen((5, 6)), Verdict(End.WRONG, "ended_without_a_word", 0)),
        (Seen((5,), error=GONE), Verdict(End.ERROR, "prefill_gone")),
        (Seen((6,), error=GONE), Verdict(End.ERROR, "prefill_gone", 1)),
        (Seen((5,), left=True), Verdict(End.CANCELLED, "cancelled_by_caller")),
        (Seen((6,), left=True), Verdict(End.CANCELLED, "cancelled_by_caller", 1)),
        (Seen(WANTED, finished=True, left=True), Verdict(End.OK)),
        (Seen((5,), hung=True), Verdict(End.HUNG, "hung")),
    ],
)
def test_a_stream_is_judged_by_its_tokens_and_its_end(seen: Seen, verdict: Verdict):
    assert judge(WANTED, seen) == verdict


def test_totals_add_up_to_the_requests_sent():
    totals = Totals()
    for seen in (Seen(WANTED, finished=True), Seen((5,), error=GONE), Seen((), left=True), Seen((), hung=True), Seen()):
        totals.sent += 1
        totals.count(seen, judge(WANTED, seen))
    assert (totals.ok, totals.cancels, totals.hung, totals.wrong) == (1, 1, 1, 1)
    assert totals.errors_by_cause == {"prefill_gone": 1, "cancelled_by_caller": 1, "ended_without_a_word": 1}
    assert totals.ok + totals.hung + sum(totals.errors_by_cause.values()) == totals.sent
    assert totals.add_up
    totals.sent += 1
    assert not totals.add_up


def test_a_surprise_is_not_a_typed_error():
    totals = Totals()
    totals.count(Seen(), judge(WANTED, Seen(error=GenlockError("internal", "internal error"))))
    assert totals.untyped == 1


PASSED = Report(
    seed=0, minutes=1, seconds=60, engine="shm", model="probe", rounds=5, sent=10, ok=9, cancels=0,
    errors_by_cause={"prefill_gone": 1}, hung=0, wrong=0, foreign_tokens=0, untyped=0, tokens=100, kills=1,
    faults={"kill": 1}, skipped={}, deaths=(), excused_deaths=0, fault_errors=(),
    pages_back=True, pages_back_ms={"p50": 1.0, "max": 2.0},
    not_back=(), refused_log_lines=0, foreign_pages=0, link_packets=0, balloon_mib=0, loop_lag_ms=1.0, adds_up=True,
)  # fmt: skip


def test_a_run_without_a_fault_of_the_product_passes():
    assert PASSED.failures == ()


@pytest.mark.parametrize(
    "change",
    [
        {"foreign_tokens": 1}, {"hung": 1}, {"wrong": 1}, {"untyped": 1}, {"adds_up": False}, {"pages_back": False},
        {"fault_errors": ("kill",)}, {"ok": 0},
        {"deaths": ("decode-0: gone",)},
    ],
)  # fmt: skip
def test_every_way_to_be_wrong_fails_a_run(change: dict[str, object]):
    assert len(replace(PASSED, **change).failures) == 1
