"""`genlock bench`: the commands live beside what they measure."""

from __future__ import annotations

import click

from cluster.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "guard": LazyCommand("bench.guard:command", "What the page checks cost."),
    "transfer": LazyCommand("bench.transfer:command", "How fast pages move, by engine."),
    "serve": LazyCommand("bench.serve:command", "Throughput and latency of a cluster under load."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    epilog="""\b
Examples:
  genlock bench guard
  genlock bench transfer
  genlock bench serve --help""",
)
def command() -> None:
    """Measures on this machine, with the peers of each measurement in the same run."""
