"""Negative controls: with a check off, a law is broken, and by the seed that is pinned here.

The seeds are those of `python -m sim --controls`, started near the first violation so that the tests are short.
"""

import pytest

from kvstore.checks import check_names
from sim.controls import ALONE, ANY_LAW, AT_THE_CALLER, HIDDEN_BY, TOGETHER
from sim.coverage import REJECTS
from sim.runner import run
from sim.world import make_kit

KIT = make_kit()

# check: (seed, law that is broken first when it is off)
FIRST = {
    "handoff_id": (0, "wrong_token"),
    "exact_set": (7, "wrong_token"),
    "stream_end": (1, "waits_for_nobody"),
    "bounds": (17, "blames_the_caller"),
    "incarnation": (13, "forged_descriptor"),
    "layout": (0, "forged_descriptor"),
    "header": (6, "forged_descriptor"),
    "prefix_key": (6, "forged_descriptor"),
    "digest": (6, "adopted_wrong_bytes"),
    "source_tag": (36, "adopted_stale"),
    "entry": (2, "stale_row_admitted"),
    "kernel": (1, "kernel_read_stale"),
    "exit": (1, "published_stale"),
    "rows": (27, "wrong_token"),
    "write": (0, "kernel_wrote_foreign"),
    "quarantine": (0, "counts_differ"),
    "tag_bump": (0, "tag_repeats"),
    "pins": (6, "pinned_page_retired"),
}

# set of checks: seed whose caller is told a wrong token
FIRST_AT_THE_CALLER = {
    ("handoff_id",): 0,
    ("exact_set",): 7,
    ("stream_end",): 1,
    ("layout",): 1,
    ("prefix_key",): 54,
    ("digest",): 6,
    ("rows",): 27,
    ("quarantine",): 10,
    ("tag_bump",): 5,
    ("kernel", "exit"): 5,
}


def test_every_check_has_its_control():
    assert [c.checks for c in ALONE] == [(name,) for name in check_names()]
    assert FIRST.keys() == set(check_names()) == REJECTS.keys()
    singles = {c.checks[0] for c in TOGETHER if len(c.checks) == 1}
    assert singles | HIDDEN_BY.keys() == set(check_names())
    assert not singles & HIDDEN_BY.keys()
    assert FIRST_AT_THE_CALLER.keys() == {c.checks for c in TOGETHER}


@pytest.mark.parametrize("check", check_names())
def test_without_a_check_a_law_breaks(check):
    seed, law = FIRST[check]
    assert not run(seed, kit=KIT).violations
    found = run(seed, kit=KIT, without=(check,), laws=ANY_LAW).violations
    assert [v.law for v in found] == [law]


@pytest.mark.parametrize("control", TOGETHER, ids=lambda c: c.name)
def test_without_these_the_caller_is_told_something_wrong(control):
    seed = FIRST_AT_THE_CALLER[control.checks]
    assert not run(seed, kit=KIT).violations
    found = run(seed, kit=KIT, without=control.checks, laws=AT_THE_CALLER).violations
    assert [v.law for v in found] == ["wrong_token"]
