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
    "handoff_id": (155, "wrong_token"),
    "exact_set": (4, "wrong_token"),
    "stream_end": (0, "waits_for_nobody"),
    "bounds": (32, "blames_the_caller"),
    "incarnation": (212, "forged_descriptor"),
    "layout": (5, "forged_descriptor"),
    "header": (63, "forged_descriptor"),
    "prefix_key": (7, "forged_descriptor"),
    "digest": (18, "adopted_wrong_bytes"),
    "source_tag": (3, "adopted_stale"),
    "entry": (14, "stale_row_admitted"),
    "kernel": (3, "kernel_read_stale"),
    "exit": (0, "published_stale"),
    "rows": (64, "wrong_token"),
    "write": (6, "kernel_wrote_foreign"),
    "quarantine": (3, "counts_differ"),
    "tag_bump": (0, "tag_repeats"),
    "pins": (1, "pinned_page_retired"),
}

# set of checks: seed whose caller is told a wrong token
FIRST_AT_THE_CALLER = {
    ("handoff_id",): 155,
    ("exact_set",): 4,
    ("stream_end",): 0,
    ("layout",): 7,
    ("prefix_key",): 89,
    ("digest",): 43,
    ("rows",): 64,
    ("quarantine",): 21,
    ("tag_bump",): 3,
    ("kernel", "exit"): 3,
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
