"""What the benchmark of the guard makes of its pairs, and that it runs with a small vocabulary."""

from __future__ import annotations

import json
import random

import pytest
from click.testing import CliRunner

from bench.guard import command, drawn_from, in_turn, median_interval, run
from kvstore.errors import InvalidInput


@pytest.mark.parametrize(
    ("count", "ranks"),
    # Of 100 the published ranks of a 95 % interval are 40 and 61.
    [(1, (1, 1)), (5, (1, 5)), (8, (1, 8)), (20, (5, 16)), (100, (40, 61)), (400, (180, 221))],
)
def test_the_interval_of_a_median_is_between_two_ranks(count: int, ranks: tuple[int, int]):
    values = [float(rank) for rank in range(1, count + 1)]
    random.Random(1).shuffle(values)
    assert median_interval(values) == ranks


def test_the_interval_holds_the_median_about_as_often_as_it_says():
    draw, held, runs = random.Random(7), 0, 2000
    for _ in range(runs):
        low, high = median_interval([draw.expovariate(1.0) for _ in range(50)])
        held += low <= 0.6931 <= high
    assert 0.93 <= held / runs <= 0.98


def test_who_goes_first_changes_and_who_is_whose_does_not():
    order: list[str] = []

    def said(name: str, value: int) -> int:
        order.append(name)
        return value

    for turn in range(4):
        assert in_turn(lambda: said("one", 1), lambda: said("other", 2), turn) == (1, 2)
    assert order == ["other", "one", "one", "other"] * 2


def test_ids_are_of_the_models_vocabulary():
    assert drawn_from(260) == (0, 260)
    assert drawn_from(49_152) == (1000, 40_000)


def test_a_small_model_is_measured_and_its_cost_is_between_its_bounds():
    args = ["--model", "probe", "--context", "64", "--batch", "1", "--seconds", "0.1", "--threads", "1", "--json"]
    [row] = json.loads(CliRunner().invoke(command, args, catch_exceptions=False, standalone_mode=False).stdout)["rows"]
    assert row["cost_low_percent"] <= row["cost_percent"] <= row["cost_high_percent"]


def test_a_context_that_the_model_has_not_is_refused_with_the_option():
    with pytest.raises(InvalidInput) as caught:
        run("probe", [1], 4096, 0.1, 1)
    assert (caught.value.field, "2048" in caught.value.message) == ("--context", True)
