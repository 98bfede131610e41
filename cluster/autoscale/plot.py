"""A run as a picture; matplotlib is an optional extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from cluster.autoscale.simulate import Comparison
from cluster.autoscale.traces import Trace
from kvstore.errors import InvalidInput

# Points of a request each: small, since there are tens of thousands, and large enough to be seen in the legend.
DOT_POINTS = 1.5
LEGEND_SCALE = 6


def draw(comparison: Comparison, trace: Trace, path: Path) -> None:
    """Load, workers and first tokens over time, as PNG, SVG or PDF by the name's ending. Raises InvalidInput."""
    figure = figure_of(comparison, trace)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidInput("bad_plot", f"{path} cannot be written: {error}", field="plot") from error


def figure_of(comparison: Comparison, trace: Trace) -> Any:
    """As matplotlib's figure. Raises InvalidInput where that is not installed."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "no_matplotlib", "--plot needs matplotlib: pip install 'genlock[plots]'", field="plot"
        ) from error
    figure: Any = figures.Figure(figsize=(10, 8), layout="constrained")
    load, workers, first = figure.subplots(3, 1, sharex=True)
    points = comparison.scaled.points
    minutes = [point.at_s / 60 for point in points]
    load.plot(minutes, [point.arriving_tokens_per_s for point in points], color="tab:blue", linewidth=1)
    load.set_ylabel("prompt tokens/s")
    load.set_title(f"{trace.name}: {len(trace.arrivals)} requests")
    workers.step(minutes, [point.target.prefill for point in points], where="post", label="prefill")
    workers.step(minutes, [point.target.decode for point in points], where="post", label="decode")
    fixed = comparison.fixed_counts
    workers.axhline(fixed.prefill + 0.03, linestyle=":", color="tab:blue", label=f"fixed {fixed.prefill}P")
    workers.axhline(fixed.decode - 0.03, linestyle=":", color="tab:orange", label=f"fixed {fixed.decode}D")
    workers.set_ylabel("workers wanted")
    workers.set_ylim(bottom=0)
    workers.legend(loc="upper right")
    for run, name, color in ((comparison.fixed, "fixed", "0.6"), (comparison.scaled, "autoscaled", "tab:green")):
        label = f"{name}: {100 * run.outcome.attainment:.1f} % within both targets"
        ordered = sorted(run.served, key=lambda one: one.at_s)
        minutes, values_ms = [one.at_s / 60 for one in ordered], [one.ttft_ms for one in ordered]
        # Not ",": a pixel stays one pixel in the legend.
        first.plot(minutes, values_ms, ".", markersize=DOT_POINTS, markeredgewidth=0, color=color, label=label)
    first.set_yscale("log")
    first.set_ylabel("first token, ms")
    first.set_xlabel("minutes")
    first.legend(loc="upper right", markerscale=LEGEND_SCALE)
    for begin, end in trace.outages:
        for axes in (load, workers, first):
            axes.axvspan(begin / 60, end / 60, color="0.9", zorder=0)
    return figure
