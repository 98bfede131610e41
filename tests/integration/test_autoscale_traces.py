"""Every named trace through `genlock autoscale simulate`: what docs/autoscaler.md says of each is what comes out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.autoscale.fleet import Speeds
from cluster.autoscale.policy import Policy
from cluster.autoscale.simulate import run_policy
from cluster.autoscale.traces import NAMES, drawn
from cluster.cli.main import run

PAGE = Path(__file__).parents[2] / "docs" / "autoscaler.md"
ROW = re.compile(
    r"^\| ([a-z-]+) \| (\d+) \| ([\d.]+) % \| .* \| (\d+)P \+ (\d+)D \| ([\d.]+) % \| .* \| (\d+) \|$", re.MULTILINE
)
TABLE = {row[0]: row[1:] for row in ROW.findall(PAGE.read_text())}

SERVES_MORE = {"diurnal", "long-prompt-storm"}


def test_the_page_tells_of_every_trace() -> None:
    assert tuple(TABLE) == NAMES


@pytest.mark.timeout(300)  # a day of 86,000 requests on seven fleets takes its time on a busy host
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_does_what_the_page_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autoscale", "simulate", "--trace", name, "--json"]) == 0
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    scaled, fixed = tree["autoscaled"], tree["fixed"]
    requests, attained, prefill, decode, fixed_attained, changes = TABLE[name]
    assert (tree["requests"], len(tree["changes"])) == (int(requests), int(changes))
    assert (fixed["prefill"], fixed["decode"]) == (int(prefill), int(decode))
    assert scaled["attainment"] * 100 == pytest.approx(float(attained), abs=0.1)
    assert fixed["attainment"] * 100 == pytest.approx(float(fixed_attained), abs=0.1)
    assert scaled["unfinished"] == 0, "nobody is lost, whatever the load does"
    # As the words below the table have it: for about the same money.
    assert fixed["gpu_hours"] == pytest.approx(scaled["gpu_hours"], rel=0.15)
    if name in SERVES_MORE:
        assert scaled["attainment"] > fixed["attainment"] + 0.15
    else:
        assert scaled["attainment"] < fixed["attainment"], "bursts shorter than a start want a fleet that is there"


def test_flapping_changes_next_to_nothing() -> None:
    made = run_policy(Policy(), drawn("flapping", 1), Speeds())
    assert made.changes <= 2


def test_without_metrics_the_fleet_stays_as_it_is_and_goes_on_after() -> None:
    trace = drawn("metric-outage", 1)
    made = run_policy(Policy(), trace, Speeds())
    for begin, end in trace.outages:
        blind = [one for one in made.decisions if begin <= one.at_ms / 1000 < end]
        assert blind
        assert all(one.held for one in blind)
        assert all({line.split(":")[0] for line in one.reasons} >= {"prefill holds", "decode holds"} for one in blind)
        after = [one for one in made.decisions if end <= one.at_ms / 1000 < end + 60]
        assert after
        assert not any("holds" in line for one in after for line in one.reasons), "it decides again"
