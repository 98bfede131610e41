"""`genlock bench`: the commands live beside what they measure."""

from __future__ import annotations

import click

from cluster.cli.lazy import LazyCommand, LazyGroup

COMMANDS = {
    "guard": LazyCommand("bench.guard:command", "What the page checks cost."),
    "transfer": LazyCommand("bench.transfer:command", "How fast pages move, by engine."),
    "gateway": LazyCommand("bench.gateway:command", "Streamed tokens through one gateway on one core."),
    "peers": LazyCommand("bench.peers.cli:command", "The same broken handoffs here and on vLLM's split serving."),
    "faults": LazyCommand("bench.faults.cli:command", "The page of public faults: write or compare it."),
    "drift": LazyCommand("bench.drift:command", "How far a quantized cache is from an unquantized one."),
    "serve": LazyCommand("bench.serve:command", "Throughput and latency of a cluster under load."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    epilog="""\b
Examples:
  genlock bench guard
  genlock bench transfer
  genlock bench gateway
  genlock bench serve --help""",
)
def command() -> None:
    """Measures on this machine, with the peers of each measurement in the same run."""
