"""Every row of the fault table that one process can show, with the probe model and with a real one: it fails closed,
its neighbour is right, every page comes back, and without the row's checks the fault reaches the answer."""

from __future__ import annotations

import pytest

from cluster.selftest.lab import Subject, load_subject
from cluster.selftest.rows import ROWS, Row
from cluster.selftest.run import run_row
from kvstore.checks import check_names

IN_PROCESS = [row for row in ROWS if row.run is not None]
# What the client is told. Each fault is met by the first check that can know of it.
TOLD = {
    "1": "ABORTED/unknown_handoff",
    "2": "DATA_LOSS/page_out_of_bounds",
    "3": "ABORTED/unknown_handoff",
    "4": "ABORTED/header_mismatch",
    "5": "ABORTED/header_mismatch",
    "6a": "DATA_LOSS/digest_mismatch",
    "6b": "DATA_LOSS/digest_mismatch",
    "6c": "ABORTED/header_mismatch",
    "7": "DATA_LOSS/digest_mismatch",
    "8": "ABORTED/header_mismatch",
    "9": "ABORTED/duplicate_page",
    "10": "DATA_LOSS/digest_mismatch",
    "11": "ABORTED/stale_incarnation",
    "12a": "ABORTED/stale_at_entry",
    "12b": "ABORTED/stale_in_kernel",
    "13": "ABORTED/stale_at_entry",
    "14": "ABORTED/header_mismatch",
    "15a": "FAILED_PRECONDITION/layout_mismatch",
    "15b": "FAILED_PRECONDITION/layout_mismatch",
    "15c": "FAILED_PRECONDITION/layout_mismatch",
    "15d": "FAILED_PRECONDITION/layout_mismatch",
    "16": "none",  # the victim has left; the one that is asked is its successor
    "19": "ABORTED/rows_disagree",
    "20": "ABORTED/foreign_prefix_key",
}
# The rows whose failure counters stayed 0 elsewhere.
FIVE_WAYS = ("1", "2", "3", "4", "5")


@pytest.fixture(scope="module", params=["probe", "smollm2"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return load_subject(request.param)


@pytest.mark.parametrize("row", IN_PROCESS, ids=lambda row: f"{row.number} {row.name}")
async def test_row(row: Row, subject: Subject):
    result = await run_row(row, subject)
    assert result.fail_closed, f"{result.error} after {result.tokens_sent} tokens; {result.detail}"
    assert result.neighbour_ok
    assert result.pages_back
    assert result.control_wrong, result.detail
    assert result.error == TOLD[row.number]
    if row.number in FIVE_WAYS:
        assert result.failures == {result.error.partition("/")[2]: 1}, "one failure, counted once by its cause"


def test_every_check_on_the_way_of_a_page_has_a_row():
    """The life cycle's own checks (tag_bump, pins) have their controls in the unit tests of the guard."""
    used = {name for row in ROWS for name in row.off}
    assert set(check_names()) - used == {"tag_bump", "pins"}
