"""Seeds that once found a fault. Each runs with its own minimised faults and must stay clean."""

import pytest

from sim.faults import Faults
from sim.runner import run

PINNED = [
    pytest.param(5, Faults(cache_rot=1.0), id="rot-in-a-cached-header-ended-prefills-turn"),
    pytest.param(
        1_008_810,
        Faults(
            sent_twice=0.06,
            stream_slow=0.06,
            stream_cut=0.005,
            event_lost=0.02,
            release_early=0.06,
            cancel_twice=0.06,
            page_taken_before=0.06,
        ),
        id="a-page-that-went-took-its-successors-cache-entry-along",
    ),
]


@pytest.mark.parametrize(("seed", "faults"), PINNED)
def test_pinned(seed, faults):
    result = run(seed, faults=faults)
    assert not result.violations, result.violations[0]
