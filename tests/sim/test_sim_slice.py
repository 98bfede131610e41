"""A slice of seeds, and that one seed is one run."""

from sim.runner import run
from sim.world import make_kit


def test_same_seed_same_trace():
    first, again, other = run(7), run(7), run(8)
    assert first.trace == again.trace
    assert first.operations == again.operations
    assert first.trace != other.trace


def test_slice_finds_nothing():
    kit = make_kit()
    for seed in range(60):
        result = run(seed, kit=kit)
        assert not result.violations, f"seed {seed}: {result.violations[0]}"
