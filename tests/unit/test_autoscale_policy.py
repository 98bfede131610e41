"""Policies and traces as operators write them: read whole, or refused by the field."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cluster.autoscale.decide import Counts
from cluster.autoscale.fleet import ModelFleet, Speeds
from cluster.autoscale.plot import figure_of
from cluster.autoscale.policy import Mode, Policy, leaves, policy_from, text_of
from cluster.autoscale.simulate import compare, fixed_splits, run_policy
from cluster.autoscale.traces import NAMES, Arrival, Trace, drawn, parse
from cluster.cli.main import run
from kvstore.errors import InvalidInput


def test_defaults_and_round_trip() -> None:
    assert policy_from("") == Policy()
    text = "mode: utilisation\nslo: {ttft_ms: 900}\nprefill: {low: 2, high: 6}\nratio: {high: 1.5}\n"
    policy = policy_from(text)
    assert policy.mode is Mode.UTILISATION
    assert policy.slo.ttft_ms == 900
    assert policy.slo.token_ms == 50
    assert policy_from(text_of(policy)) == policy
    assert policy_from("slo: {token_ms: 20}", policy).prefill == policy.prefill, "merged into what was there"
    assert leaves(policy)["prefill.high"] == "6"
    assert len(leaves(policy)) == 22


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("mode: fast", "mode"),
        ("mode: [slo]", "mode"),
        ("slo: 5", "slo"),
        ("slo: {ttft: 5}", "slo.ttft"),
        ("slo: {ttft_ms: 0}", "slo.ttft_ms"),
        ("slo: {ttft_ms: .nan}", "slo.ttft_ms"),
        ("slo: {ttft_ms: .inf}", "slo.ttft_ms"),
        ("slo: {ttft_ms: '5'}", "slo.ttft_ms"),
        ("prefill: {low: 1.5}", "prefill.low"),
        ("prefill: {low: true}", "prefill.low"),
        ("prefill: {low: 9}", "prefill.low"),
        ("prefill: {low: 0}", "prefill.low"),
        ("to_zero: {enabled: true}\nprefill: {low: 0}", "prefill.low"),
        ("to_zero: {enabled: 1}", "to_zero.enabled"),
        ("gpus: {budget: 8}", "gpus.budget"),
        ("ratio: {low: 3, high: 2}", "ratio.low"),
        ("ratio: {high: 0.01}", "ratio.high"),
        ("ratio: {low: 100}", "ratio.low"),
        ("stale_ms: 1", "stale_ms"),
        ("[1, 2]", "policy"),
        ("{", "policy"),
        ("x" * 20_000, "policy"),
    ],
)
def test_a_bad_policy_names_the_field(text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        policy_from(text)
    assert caught.value.field in (field, f"autoscale.{field}")
    assert caught.value.reason == "bad_policy"


def test_traces_are_read_in_both_forms() -> None:
    lines = '{"at_s": 2, "prompt_tokens": 5, "output_tokens": 6}\n\n{"outage_s": [1, 2.5]}\n' \
            '{"at_s": 1, "prompt_tokens": 3, "output_tokens": 4}\n'  # fmt: skip
    trace = parse(lines, "t")
    assert trace.arrivals == (Arrival(1, 3, 4), Arrival(2, 5, 6))
    assert trace.outages == ((1.0, 2.5),)
    csv = "at_s,prompt_tokens,output_tokens\n1,3,4\n2,5,6\n"
    assert parse(csv, "t").arrivals == trace.arrivals


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "at_s,prompt_tokens,output_tokens\n1,x,4\n",
        "at_s,prompt_tokens,output_tokens\n-1,1,4\n",
        "at_s,prompt_tokens,output_tokens\n1,0,4\n",
        "at_s,prompt_tokens,output_tokens\nnan,1,4\n",
        '{"at_s": 1}',
        '{"at_s": 1, "prompt_tokens": true, "output_tokens": 2}',
        "{broken",
        '{"outage_s": [2, 1]}',
    ],
)
def test_a_bad_trace_names_the_line(text: str) -> None:
    with pytest.raises(InvalidInput, match="line"):
        parse(text, "t.jsonl")


@pytest.mark.parametrize("name", ["metric-outage", "flapping"])
def test_drawn_traces_repeat(name: str) -> None:
    assert name in NAMES
    assert drawn(name, 3) == drawn(name, 3) != drawn(name, 4)


def test_the_model_fleet_conserves_requests_and_pays_for_those_that_leave() -> None:
    fleet = ModelFleet(Speeds(start_s=1.0), Counts(1, 1))
    for number in range(20):
        fleet.arrive(Arrival(number * 0.01, 800, 10))
    fleet.scale(Counts(2, 2), 0.2)
    ticks = 0
    while fleet.unfinished:
        ticks += 1
        fleet.advance(ticks * 0.1, 0.1)
        if ticks == 5:
            fleet.scale(Counts(1, 1), 0.5)
        assert ticks < 1000
    assert len(fleet.served) == 20
    assert all(one.ttft_ms > 0 for one in fleet.served)
    assert fleet.worker_s[0] == pytest.approx(0.1 * ticks, rel=0.6)


def test_the_autoscaled_fleet_beats_the_fixed_one_where_load_has_a_day() -> None:
    shape = [(0.3, 900), *((rate, 60) for rate in (1.0, 2.0, 3.0, 4.0)), (4.0, 120), (0.3, 600)]
    arrivals, at_s = [], 0.0
    for rate, seconds in shape:
        end = at_s + seconds
        while at_s < end:
            at_s += 1 / rate
            arrivals.append(Arrival(at_s, 4500, 60))
    policy = policy_from("up: {delay_ms: 5000}\ndown: {delay_ms: 60000}")
    both = compare(policy, Trace("day", tuple(arrivals)), Speeds(start_s=5.0))
    assert len(arrivals) < 2000
    assert both.scaled.outcome.unfinished == 0
    assert both.scaled.changes >= 4
    assert both.scaled.outcome.attainment > both.fixed.outcome.attainment + 0.05
    assert both.fixed.outcome.gpu_hours == pytest.approx(both.scaled.outcome.gpu_hours, rel=0.25)


def test_missing_metrics_hold_for_the_whole_outage() -> None:
    trace = Trace("out", tuple(Arrival(n * 0.1, 900, 20) for n in range(2000)), ((20.0, 150.0),))
    run_ = run_policy(policy_from("up: {delay_ms: 10000}"), trace, Speeds())
    during = [decision for decision in run_.decisions if 20_000 <= decision.at_ms < 150_000]
    assert during
    assert all(decision.held for decision in during)
    assert any(not decision.held for decision in run_.decisions if decision.at_ms > 150_000)


def test_fixed_splits_spend_the_same() -> None:
    splits = fixed_splits(Policy(), 50.0)
    assert all(abs((counts.prefill + counts.decode) * 8 - 50) <= 4 for counts in splits)
    assert len(splits) == 5


def test_simulate_prints_both_fleets(tmp_path, capsys) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at_s,prompt_tokens,output_tokens\n" + "".join(f"{n / 2},900,20\n" for n in range(200)))
    assert run(["autoscale", "simulate", "--trace", str(trace), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["requests"] == 200
    policy = tree["policy"]
    assert {name: type(value) for name, value in policy.items() if not isinstance(value, int | float)} == {"mode": str}
    shown = (policy["mode"], policy["slo.ttft_ms"], policy["prefill.high"], policy["to_zero.enabled"])
    assert shown == ("slo", 2000.0, 8, False)
    assert {name: str(value) for name, value in policy.items()} == leaves(Policy())
    assert tree["autoscaled"]["attainment"] == 1.0
    assert {"prefill", "decode", "attainment"} <= set(tree["fixed"])
    assert math.isfinite(tree["fixed"]["gpu_hours"])
    assert run(["autoscale", "simulate", "--trace", str(trace), "--plot", str(tmp_path / "out.svg")]) == 0
    assert "autoscaled" in capsys.readouterr().out
    assert (tmp_path / "out.svg").stat().st_size > 1000
    assert run(["autoscale", "simulate", "--trace", "nowhere"]) == 2
    assert "bursty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("slo: {ttft: 3}", "slo.ttft is no field; did you mean slo.ttft_ms; known: slo.ttft_ms, slo.token_ms"),
        ("zzz: 1", "zzz is no field; known: mode, "),
    ],
)
def test_a_field_that_is_not_there_is_answered_by_those_that_are(text: str, told: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        policy_from(text)
    assert told in caught.value.message


def test_the_marks_of_a_plot_s_legends_can_be_seen() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb

    trace = Trace("short", tuple(Arrival(n / 2, 900, 20) for n in range(200)))
    canvas = FigureCanvasAgg(figure_of(compare(Policy(), trace, Speeds()), trace))
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3] / 255  # the lowest row first, as matplotlib counts
    marks = 0
    for axes in canvas.figure.axes[1:]:
        for handle in axes.get_legend().legend_handles:
            left, low, right, high = (round(value) for value in handle.get_window_extent().padded(3).extents)
            near = np.abs(pixels[low:high, left:right] - to_rgb(handle.get_color())).max(axis=2) < 0.1
            assert near.sum() >= 10, handle.get_label()
            marks += 1
    assert marks == 6
