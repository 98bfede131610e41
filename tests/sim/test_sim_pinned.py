"""Seeds that once found a fault. Each runs with its own minimised faults and must stay clean."""

import pytest

from kvstore.prefix_index import PrefixIndex
from sim.callers import Callers
from sim.decode_side import Attempt
from sim.faults import Faults
from sim.runner import run

PINNED = [
    pytest.param(5, Faults(cache_rot=1.0), id="rot-in-a-cached-header-ended-prefills-turn"),
    pytest.param(
        1_008_938,
        Faults(
            page_taken_before=0.3,
            stream_slow=0.06,
            event_lost=0.05,
            cancel_twice=0.06,
            release_early=0.06,
            cache_rot=0.1,
        ),
        id="a-page-that-went-took-its-successors-cache-entry-along",
    ),
]


@pytest.mark.parametrize(("seed", "faults"), PINNED)
def test_pinned(seed, faults):
    result = run(seed, faults=faults)
    assert not result.violations, result.violations[0]


# What undoes a repair must be seen, or the seed shows nothing any more.


def test_control_a_page_that_goes_takes_its_successors_entry_along(monkeypatch):
    # The seed is of a time in which answers of one request ended apart.
    monkeypatch.setattr(Callers, "_give_up", lambda self, request, error: None)
    seed, faults = PINNED[1].values
    assert not run(seed, faults=faults).violations
    monkeypatch.setattr(PrefixIndex, "remove", lambda self, key, ref: self._pages.pop(key, None))
    assert "pages_not_back" in {violation.law for violation in run(seed, faults=faults).violations}


def test_control_a_connection_that_broke_and_is_kept_is_noticed(monkeypatch):
    faults = Faults(connection_lost=0.05)
    assert not run(3, faults=faults).violations
    monkeypatch.setattr(Attempt, "_lose", lambda self, error: None)
    assert "not_in_service" in {violation.law for violation in run(3, faults=faults).violations}
