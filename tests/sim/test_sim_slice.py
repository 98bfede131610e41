"""A few seeds, and that one seed is one run. `tests/integration/test_sim_swarm.py` plays more."""

from collections import Counter

import pytest

from sim.coverage import GAPS
from sim.faults import NO_FAULTS, Faults, sample_faults, site_names
from sim.laws import LAWS
from sim.minimise import minimise
from sim.runner import play, run
from sim.world import make_kit

SLICE = range(30)


def test_slice_finds_nothing():
    report = play(SLICE, (), tuple(LAWS))
    assert report.seeds == len(SLICE)
    assert report.violations == 0, report.failures
    assert report.outcomes["ok"] > 60
    assert report.page_operations > 40_000


def test_same_seed_same_run():
    first, again, other = run(7), run(7), run(8)
    assert first == again
    assert first.trace != other.trace


def test_a_quarter_of_the_seeds_has_each_fault():
    sampled = [sample_faults(seed) for seed in range(400)]
    armed = {site: sum(getattr(faults, site) > 0 for faults in sampled) for site in site_names()}
    assert all(60 < count < 130 for count in armed.values()), armed


def test_a_calm_seed_answers_everything():
    result = run(3, faults=NO_FAULTS)
    assert not result.violations
    assert result.injected.total() == 0
    assert set(result.outcomes) <= {"ok", "pool_exhausted", "too_many_leases"}
    assert result.outcomes["ok"]


def test_a_failing_seed_becomes_a_small_test():
    small = minimise(1, make_kit(), without=("stream_end",))
    assert small is not None
    assert small.law == "waits_for_nobody"
    assert "kernel_stalls" in small.faults.armed
    assert len(small.faults.armed) <= 3
    namespace: dict[str, object] = {}
    exec("from sim.faults import Faults\nfrom sim.runner import run\n" + small.as_test(), namespace)
    test = next(value for name, value in namespace.items() if name.startswith("test_"))
    with pytest.raises(AssertionError, match="waits_for_nobody"):
        test()


def test_a_clean_seed_is_not_minimised():
    assert minimise(7, make_kit()) is None


def test_leases_that_end_in_any_gap_break_no_law():
    met: Counter[str] = Counter()
    for seed in range(8):
        result = run(seed, faults=Faults(lease_expires=0.3))
        assert not result.violations, result.violations[0]
        met.update(result.met)
    assert all(met[f"lease ends {gap}"] for gap in GAPS), met


def test_an_emptied_list_takes_nobody_away_for_long():
    emptied = 0
    for seed in range(8):
        result = run(seed, faults=Faults(list_emptied=0.3, cordon=0.05))
        assert not result.violations, result.violations[0]
        emptied += result.injected["list_emptied"]
    assert emptied
