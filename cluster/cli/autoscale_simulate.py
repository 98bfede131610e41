"""`genlock autoscale simulate`: a policy on a trace, on a model of a fleet."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cluster.cli.options import NAMED_FILE
from cluster.output import emit, output_option
from kvstore.files import FileReader

if TYPE_CHECKING:
    from cluster.autoscale.policy import Policy
    from cluster.autoscale.simulate import Comparison, Outcome
    from cluster.autoscale.traces import Trace

MAX_TRACE_BYTES = 256 << 20
COLUMNS = ("fleet", "within targets", "ttft p50 ms", "p99 ms", "token p50 ms", "p99 ms", "unfinished", "GPU-hours")


@click.command(
    epilog="""\b
Examples:
  genlock autoscale simulate --trace bursty
  genlock autoscale simulate --trace diurnal --plot diurnal.png
  genlock autoscale simulate --trace requests.jsonl --policy policy.yaml --json

\b
A trace file has one request a line: {"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}, or is CSV with these
columns. A line {"outage_s": [600, 900]} takes the metrics away for that time."""
)
@click.option(
    "--trace", "trace_name", type=NAMED_FILE, required=True, metavar="TEXT",
    help="A file, or bursty, diurnal, long-prompt-storm, metric-outage, flapping.",
)  # fmt: skip
@click.option("--policy", "policy_file", type=click.Path(path_type=Path), help="YAML; by default 1 to 8 of each role.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of a drawn trace.")
@click.option("--start-seconds", type=click.FloatRange(0, 3600), default=60.0, show_default=True,
              help="How long a worker needs to start.")  # fmt: skip
@click.option("--prefill-speed", type=click.FloatRange(1, 1e9), default=8000.0, show_default=True,
              help="Prompt tokens a second of one prefill worker.")  # fmt: skip
@click.option("--slots", type=click.IntRange(1, 65_536), default=64, show_default=True,
              help="Requests that one decode worker runs at once.")  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), help="Draws the run: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@output_option
def command(
    trace_name: str, policy_file: Path | None, seed: int, start_seconds: float, prefill_speed: float, slots: int,
    plot: Path | None, as_json: bool, output: str,
) -> int:  # fmt: skip
    """Tries an autoscaling policy on a trace and compares it with the best fixed fleet of the same GPU-hours. Fleet and
    clock are models: thousands of seconds take one."""
    from rich.progress import Progress

    from cluster.autoscale.fleet import Speeds
    from cluster.autoscale.simulate import compare
    from cluster.cli import render

    policy = _policy(policy_file)
    trace = _trace(trace_name, seed)
    speeds = Speeds(prefill_tokens_per_s=prefill_speed, slots=slots, start_s=start_seconds)
    with Progress(console=render.stderr(), transient=True) as bar:
        task = bar.add_task(f"{trace.name}: {len(trace.arrivals)} requests", total=1.0)
        comparison = compare(policy, trace, speeds, lambda share: bar.update(task, completed=share))
    if plot is not None:
        from cluster.autoscale.plot import draw

        draw(comparison, trace, plot)
    form = "json" if as_json else output
    emit(form, lambda: as_tree(comparison, trace, policy), lambda wide: show(comparison, trace, wide))
    return 0


def _policy(path: Path | None) -> Policy:
    from cluster.autoscale.policy import POLICY_TEXT, Policy, policy_of

    if path is None:
        return Policy()
    return policy_of(POLICY_TEXT.tree(FileReader("bad_policy", "policy").text(path), str(path)))


def _trace(name: str, seed: int) -> Trace:
    from cluster.autoscale.traces import NAMES, drawn, parse

    if name in NAMES or not Path(name).exists():
        return drawn(name, seed)
    return parse(FileReader("bad_trace", "trace", MAX_TRACE_BYTES).text(name), name)


def show(comparison: Comparison, trace: Trace, wide: bool = False) -> None:
    """Tables on stdout. `wide`: also how each stage changed the numbers."""
    from cluster.cli import render

    fixed = comparison.fixed_counts
    rows = [
        _row("autoscaled", comparison.scaled.outcome),
        _row(f"fixed {fixed.prefill}P + {fixed.decode}D", comparison.fixed.outcome),
    ]
    out = render.stdout()
    out.print(render.table(f"{trace.name}: {len(trace.arrivals)} requests", COLUMNS, rows))
    changed = [decision for decision in comparison.scaled.decisions if not decision.held]
    if changed:
        names = ("before", "raw", "clamped", "delayed", "target") if wide else ("before", "target")
        lines = []
        for decision in changed:
            counts = [getattr(decision, name) for name in names]
            stages = [f"{count.prefill}P + {count.decode}D" for count in counts]
            lines.append((f"{decision.at_ms / 1000:.0f} s", *stages, "; ".join(decision.reasons)))
        columns = ("at", "from", *names[1:-1], "to", "why")
        out.print()
        out.print(render.table("Changes", columns, lines))


def _row(name: str, outcome: Outcome) -> tuple[object, ...]:
    return (
        name, f"{100 * outcome.attainment:.1f} %", outcome.ttft_p50_ms, outcome.ttft_p99_ms, outcome.token_p50_ms,
        outcome.token_p99_ms, outcome.unfinished, outcome.gpu_hours,
    )  # fmt: skip


def as_tree(comparison: Comparison, trace: Trace, policy: Policy) -> dict[str, Any]:
    """As data; numbers that do not exist are null."""
    from cluster.autoscale.policy import values

    return {
        "trace": trace.name,
        "requests": len(trace.arrivals),
        "policy": values(policy),
        "autoscaled": _outcome_tree(comparison.scaled.outcome),
        "fixed": {**asdict(comparison.fixed_counts), **_outcome_tree(comparison.fixed.outcome)},
        "changes": [
            {
                "at_s": decision.at_ms / 1000,
                "before": asdict(decision.before),
                "raw": asdict(decision.raw),
                "clamped": asdict(decision.clamped),
                "delayed": asdict(decision.delayed),
                "target": asdict(decision.target),
                "reasons": list(decision.reasons),
            }
            for decision in comparison.scaled.decisions
            if not decision.held
        ],
    }


def _outcome_tree(outcome: Outcome) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in asdict(outcome).items()}
