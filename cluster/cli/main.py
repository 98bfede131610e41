"""Entry point: the commands, and what their failures mean as exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from cluster.cli.lazy import LazyCommand, LazyGroup
from kvstore.errors import Conflict, DeadlineExceeded, GenlockError, InvalidInput, Refused

OK, FAILED, USAGE, UNREACHABLE, CONFLICT, TIMED_OUT, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130

COMMANDS = {
    "up": LazyCommand("cluster.cli.up:command", "Start a cluster here and serve until Ctrl-C."),
    "controller": LazyCommand("cluster.cli.controller:command", "The controller of a Ray cluster, kept and watched."),
    "gateway": LazyCommand("cluster.cli.gateway:command", "A gateway alone, for the workers of a shared registry."),
    "demo": LazyCommand("cluster.cli.demo:command", "Private cluster, one answer, and what was verified for it."),
    "generate": LazyCommand("cluster.cli.generate:command", "Answer one prompt."),
    "chat": LazyCommand("cluster.cli.chat:command", "Talk with the model."),
    "status": LazyCommand("cluster.cli.status:command", "Workers, pools, checks and outcomes."),
    "get": LazyCommand("cluster.cli.get:command", "List workers, pools, requests, leases or nodes."),
    "top": LazyCommand("cluster.cli.top:command", "The fleet, live."),
    "scale": LazyCommand("cluster.cli.scale:command", "How many workers are wanted: prefill=4 decode=10."),
    "cordon": LazyCommand("cluster.cli.drain:cordon", "Send no new requests to a worker or node."),
    "uncordon": LazyCommand("cluster.cli.drain:uncordon", "Send it requests again."),
    "drain": LazyCommand("cluster.cli.drain:drain", "Let its requests end, then stop it."),
    "restart": LazyCommand("cluster.cli.drain:restart", "Drain a worker and start it anew."),
    "events": LazyCommand("cluster.cli.events:command", "What happened, who did it and why."),
    "describe": LazyCommand("cluster.cli.describe:command", "All about one worker or request."),
    "explain": LazyCommand("cluster.cli.explain:command", "What an error means and what to do."),
    "apply": LazyCommand("cluster.cli.apply:apply", "Make the fleet what a file says."),
    "diff": LazyCommand("cluster.cli.apply:diff", "What a file would change."),
    "config": LazyCommand("cluster.cli.config:command", "Effective settings and where each one came from."),
    "selftest": LazyCommand("cluster.selftest.cli:command", "Check this installation with injected faults."),
    "chaos": LazyCommand("cluster.chaos.cli:command", "Break a private cluster under load and judge every answer."),
    "soak": LazyCommand("cluster.chaos.soak_cli:command", "Very many short requests; nothing may grow."),
    "sim": LazyCommand("sim.cli:sim_command", "Search for broken promises in simulated clusters, seed by seed."),
    "autoscale": LazyCommand("cluster.cli.autoscale:command", "Decide how many workers there are, and why."),
    "manifest": LazyCommand("cluster.cli.manifest:command", "Kubernetes manifests, rendered and checked."),
    "keys": LazyCommand("cluster.cli.keys:command", "API keys of tenants and operators."),
    "certs": LazyCommand("cluster.cli.certs:command", "Certificates for trying TLS out."),
    "doctor": LazyCommand("cluster.cli.doctor:command", "Check this host: Ray, Redis, engines, ports, clocks."),
    "completion": LazyCommand("cluster.cli.completion:command", "Completion for bash, zsh or fish."),
    "bench": LazyCommand("cluster.cli.bench:command", "Measure on this machine."),
}


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  genlock demo "What is the capital of France?"
  genlock up --prefill 1 --decode 2
  genlock generate "What is the capital of France?" --max-tokens 32
  genlock status -o json

\b
Exit codes: 0 ok, 1 failed or differs, 2 wrong usage or bad input, 3 nobody reached, 4 conflict,
5 timed out, 6 refused by policy.""",
)
@click.version_option(package_name="genlock", message="genlock %(version)s")
def cli() -> None:
    """Genlock serves open-weight language models from separate prefill and decode workers, and never answers from
    another request's KV pages."""


class Unreachable(click.ClickException):
    """Nobody answers at the endpoint."""

    exit_code = UNREACHABLE


# Reasons that say that nobody was reached. `prefill_unreachable` and the like are of one request: a gateway told them.
UNREACHED = frozenset({
    "controller_not_serving", "controller_silent", "controller_unreachable", "kube_unreachable", "no_controller",
    "gateways_unreached", "peer_unreachable", "registry_unreachable",
})  # fmt: skip


def exit_code_of(error: GenlockError) -> int:
    for kind, code in (
        (InvalidInput, USAGE),
        (Conflict, CONFLICT),
        (DeadlineExceeded, TIMED_OUT),
        (Refused, REFUSED),
    ):
        if isinstance(error, kind):
            return code
    if error.reason not in UNREACHED:
        return FAILED
    if error.reason == "peer_unreachable":
        from wire.errors import told_by_peer

        # The gateway was reached, and told that a worker of this request was not.
        return FAILED if told_by_peer(error.__cause__) else UNREACHABLE
    return UNREACHABLE


def run(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    # Before gRPC is imported: it tells on stderr that each start of a process by Ray is harmless. Its errors stay.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        result = cli.main(args=None if args is None else list(args), prog_name="genlock", standalone_mode=False)
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except GenlockError as error:
        where = f" [{error.field}]" if error.field and error.field not in error.message else ""
        click.echo(f"Error: {error.message}{where} ({error.reason})", err=True)
        return exit_code_of(error)
    except KeyboardInterrupt:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    # Commands return their exit code; click's own exits (--help, --version) come back as numbers too.
    return result if isinstance(result, int) else OK


def main() -> None:
    sys.exit(run())


if __name__ == "__main__":
    main()
