"""`genlock completion`: needs no cluster."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="""\b
Examples:
  genlock completion bash >> ~/.bashrc
  genlock completion zsh > ~/.zfunc/_genlock
  genlock completion fish > ~/.config/fish/completions/genlock.fish"""
)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> int:
    """Prints a script that completes commands and options in a shell."""
    from click.shell_completion import get_completion_class

    from cluster.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three"
    click.echo(kind(cli, {}, "genlock", "_GENLOCK_COMPLETE").source())
    return 0
