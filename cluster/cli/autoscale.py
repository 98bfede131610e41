"""`genlock autoscale`: the policy that decides how many workers there are."""

from __future__ import annotations

import click

from cluster.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "simulate": LazyCommand("cluster.cli.autoscale_simulate:command", "Try a policy on a trace, against a fixed fleet"),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    epilog="""\b
Examples:
  genlock autoscale simulate --trace bursty
  genlock autoscale simulate --trace requests.jsonl --policy policy.yaml --plot out.png""",
)
def command() -> None:
    """Decides how many prefill and decode workers there are, and says why."""
