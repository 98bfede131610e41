"""The soak's rule: it passes what is flat, and a leak of one entry in many requests fails it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.chaos.flat import Allowance, judge_all, judge_series, slope_of
from cluster.chaos.soak import SoakSettings, waves
from cluster.chaos.watch import of_process, table_sizes
from cluster.gateway.fleet import Ledger
from kvstore.errors import InvalidInput

REQUESTS = [1000 * n for n in range(1, 101)]
NOISE = [float(n * 37 % 5) for n in range(100)]


def test_noise_is_flat_and_a_slow_growth_is_not():
    allowance = Allowance(share=0.1, number=8)
    assert judge_series("a", REQUESTS, [100 + n for n in NOISE], allowance).flat
    leak = judge_series("a", REQUESTS, [n + at for at, n in enumerate(NOISE)], allowance)
    assert not leak.flat
    assert leak.slope == pytest.approx(1.0, abs=0.05)
    assert leak.last > leak.allowed


def test_growth_during_the_warm_up_is_no_leak_and_growth_after_it_is():
    assert judge_series("a", REQUESTS, [min(at, 10) * 50.0 for at in range(100)], Allowance()).flat
    assert not judge_series("a", REQUESTS, [0.0] * 80 + [1.0] * 20, Allowance()).flat


def test_a_table_with_a_limit_of_its_own_is_held_to_that_alone():
    grows = [float(at) for at in range(100)]
    assert judge_series("a", REQUESTS, grows, Allowance(limit=100)).flat
    assert not judge_series("a", REQUESTS, grows, Allowance(limit=90)).flat


def test_a_few_samples_prove_nothing():
    assert not judge_series("a", REQUESTS[:9], [1.0] * 9, Allowance(number=8)).flat


def test_what_is_not_flat_comes_first():
    series = {"a": [1.0] * 100, "b": [float(at) for at in range(100)]}
    assert [j.name for j in judge_all(REQUESTS, series, {}, Allowance(number=8))] == ["b", "a"]


def test_slope_is_that_of_a_line():
    assert slope_of([1, 2, 3], [5, 7, 9]) == pytest.approx(2)
    assert slope_of([1], [5]) == 0


@dataclass
class Node:
    table: dict[int, object] = field(default_factory=dict)
    other: object = None


Node.__module__ = "cluster.tests"  # the walk looks into the product's own objects


def test_every_table_that_can_be_reached_is_counted_once():
    inner = Node({1: 0, 2: 0})
    outer = Node({7: [inner]}, other=inner)
    outer.table[8] = outer
    assert table_sizes([outer]) == {"Node.table": 4.0}
    ledger = Ledger()
    ledger.claim("a", 1)
    assert table_sizes([ledger]) == {"Ledger._loads": 1.0}


def test_the_process_has_descriptors_and_memory():
    before = of_process()
    with open("/dev/null") as _held:
        assert of_process()["descriptors"] >= before["descriptors"] + 1
    assert before["resident_bytes"] > 1 << 20


@pytest.mark.parametrize("requests", [10, 1500])
def test_all_requests_are_sent_and_the_same_ones_for_a_seed(requests: int):
    planned = list(waves(SoakSettings(requests=requests)))
    assert sum(len(wave.asks) for wave in planned) == requests
    assert planned == list(waves(SoakSettings(requests=requests)))
    assert planned != list(waves(SoakSettings(requests=requests, seed=1)))
    prompts = [p for wave in planned for p in wave.prompts]
    assert len(set(prompts)) == requests


@pytest.mark.parametrize("requests", [0, 9, 10**9])
def test_a_soak_of_no_size_is_refused(requests: int):
    with pytest.raises(InvalidInput) as refused:
        SoakSettings(requests=requests)
    assert refused.value.field == "requests"
