"""Labels that callers choose, ids that servers make, and Abort: what each carelessness costs, by a pinned seed."""

import pytest

from sim.callers import Callers
from sim.controls import AT_THE_CALLER
from sim.coverage import named_cells
from sim.faults import Faults
from sim.runner import run
from sim.world import make_kit
from tests.sim import label_holes
from tests.sim.label_holes import CROSSED, HOLES, opened

KIT = make_kit()
BUSY = Faults(
    label_shared=0.7, client_repeat=0.4, client_abort=0.3, abort_twice=0.3, abort_by_other=0.2, abort_unknown=0.2,
    abort_near_end=0.2,
)  # fmt: skip
# hole: (seed, law that is broken first), by `python -m tests.sim.label_holes`
FIRST = {
    "tenant_ignored": (0, "aborted_unnamed"),
    "label_ignored": (0, "aborted_unnamed"),
    "first_found": (3, "abort_missed"),
    "kept_by_label": (3, "abort_missed"),
    "empty_label_names": (3, "aborted_unnamed"),
    "stopped_again": (3, "abort_miscounted"),
    "told_and_not_stopped": (3, "abort_missed"),
    "never_off_the_roll": (0, "claims_left"),
    "decode_not_told": (1, "overdue"),
    "one_id_for_all_answers": (0, "id_repeats"),
    "id_kept_by_the_next_attempt": (44, "id_repeats"),
    "handoff_takes_its_tickets_id": (0, "id_repeats"),
    "ids_of_labels": (0, "id_repeats"),
}
AT_THE_CALLER_FIRST = 2


def test_every_hole_has_its_seed():
    assert FIRST.keys() == {hole.__name__ for hole in HOLES}


@pytest.mark.parametrize("hole", HOLES, ids=lambda hole: hole.__name__)
def test_with_a_hole_a_law_breaks(hole):
    seed, law = FIRST[hole.__name__]
    assert not run(seed, kit=KIT).violations
    with opened(hole):
        assert [v.law for v in run(seed, kit=KIT).violations] == [law]


def test_with_ids_of_labels_a_caller_is_told_another_prompts_token():
    """Each answer is its own prompt's though labels are equal and completions cross, and that is the ids' doing."""
    clean = run(AT_THE_CALLER_FIRST, kit=KIT, faults=CROSSED)
    assert not clean.violations
    assert clean.injected["label_shared"]
    assert clean.injected["completion_crossed"]
    with opened(label_holes.ids_of_labels):
        found = run(AT_THE_CALLER_FIRST, kit=KIT, faults=CROSSED, laws=AT_THE_CALLER).violations
    assert [v.law for v in found] == ["wrong_token"]


def test_labels_that_meet_everywhere_cost_no_answer_but_the_aborted():
    """Nothing else goes wrong here: whoever is not aborted is answered, or there is no room."""
    met = {}
    for seed in range(12):
        result = run(seed, kit=KIT, faults=BUSY)
        assert not result.violations, result.violations[0]
        rooms = {"no_decode_worker", "no_prefill_worker", "decode_full", "pool_exhausted", "too_many_leases"}
        assert set(result.outcomes) <= {"ok", "aborted_by_caller", *rooms}, result.outcomes
        met |= result.met
    unmet = [cell for cell in named_cells() if cell.startswith("label") and cell not in met]
    assert not unmet


def test_an_abort_that_no_checker_judges_is_not_noticed(monkeypatch):
    """The holes show what these two checkers see, and nothing else sees it."""
    monkeypatch.setattr(Callers, "_judge", lambda self, *seen: None)
    seed, law = FIRST["first_found"]
    with opened(label_holes.first_found):
        assert law not in [v.law for v in run(seed, kit=KIT).violations]
