"""Workers that are killed as real processes: what their requests hear, and what the survivors keep."""

from __future__ import annotations

import pytest

from cluster.selftest.lab import Subject, load_subject
from cluster.selftest.rows import ROWS
from cluster.selftest.run import is_fail_closed, run_row, run_trial
from kvstore.checks import ALL_CHECKS
from kvstore.errors import Unavailable

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
KILLS = {row.number: row for row in ROWS if row.run is None}
# A control doubles the time; these two show both ends of a stream that is taken for its end.
WITH_CONTROL = ("17c", "18")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@pytest.mark.parametrize("number", WITH_CONTROL)
async def test_a_kill_fails_closed_and_its_control_does_not(number: str, subject: Subject):
    result = await run_row(KILLS[number], subject)
    assert result.fail_closed, f"{result.error} after {result.tokens_sent} tokens; {result.detail}"
    assert result.neighbour_ok
    assert result.pages_back
    assert result.control_wrong, result.detail


@pytest.mark.parametrize("number", sorted(set(KILLS) - set(WITH_CONTROL)))
async def test_a_kill_fails_closed(number: str, subject: Subject):
    row = KILLS[number]
    trial = await run_trial(row, subject, ALL_CHECKS)
    reply = trial.seen.reply
    assert is_fail_closed(subject, row, reply, trial.seen), reply.error
    assert isinstance(reply.error, Unavailable)
    assert trial.neighbour_ok
    assert trial.pages_back
