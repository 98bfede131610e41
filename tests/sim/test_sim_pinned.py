"""Seeds that once found a fault. Each runs with its own minimised faults and must stay clean."""

import pytest

from sim.faults import Faults
from sim.runner import run

PINNED = [
    pytest.param(5, Faults(cache_rot=1.0), id="rot-in-a-cached-header-ended-prefills-turn"),
]


@pytest.mark.parametrize(("seed", "faults"), PINNED)
def test_pinned(seed, faults):
    result = run(seed, faults=faults)
    assert not result.violations, result.violations[0]
