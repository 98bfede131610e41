"""`genlock autoscale`: the policy that decides how many workers there are."""

from __future__ import annotations

import click

from cluster.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "show": LazyCommand("cluster.cli.autoscale_policy:show_policy", "The policy and its last decision."),
    "set": LazyCommand("cluster.cli.autoscale_policy:set_policy", "Give the fleet a policy, or change fields of it."),
    "off": LazyCommand("cluster.cli.autoscale_policy:off", "Take the policy away; the counts stay."),
    "pause": LazyCommand("cluster.cli.autoscale_policy:pause", "Keep the policy and decide nothing."),
    "resume": LazyCommand("cluster.cli.autoscale_policy:resume", "Decide again."),
    "explain": LazyCommand("cluster.cli.autoscale_policy:explain", "The last decisions: inputs, stages, reasons."),
    "simulate": LazyCommand("cluster.cli.autoscale_simulate:command", "Try a policy on a trace of requests."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    epilog="""\b
Examples:
  genlock autoscale set -f policy.yaml
  genlock autoscale set slo.ttft_ms=1500 decode.high=8
  genlock autoscale explain
  genlock autoscale simulate --trace bursty --plot out.png""",
)
def command() -> None:
    """Decides how many prefill and decode workers there are, and says why."""
