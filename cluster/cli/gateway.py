"""`genlock gateway`: a gateway on its own, in front of the workers that a shared registry names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cluster.cli.options import NAMED_FILE, load_settings, settings_options
from cluster.cli.up import authenticator_of, model_flags, serve
from cluster.settings import Config

if TYPE_CHECKING:
    from cluster.launch.front import Front


@click.command(
    epilog="""\b
Examples:
  genlock gateway --registry redis://127.0.0.1:6379/0 --model smollm2
  genlock gateway --config cluster.yaml --port 50052 --http-port 8001
  GENLOCK_REGISTRY_PASSWORD=... genlock gateway --registry rediss://redis.internal:6380/0

\b
Any number may run beside each other; each finds all workers. The model and the layout must be the workers' own.
Ctrl-C drains and stops; a second Ctrl-C does not wait for running requests."""
)
@click.option("--registry", metavar="URL", help="Redis or Valkey server: redis://, rediss:// or unix://.")
@click.option(
    "--model", type=NAMED_FILE, metavar="TEXT", help="Model that the workers serve: a name, a .gguf file, or a folder."
)
@click.option("--host", help="Address of the gateway.")
@click.option("--port", type=int, help="Port of the gateway; 0 is any free one.")
@click.option("--http-port", type=int, help="Port of the OpenAI-compatible API; 0 is any free one, -1 is off.")
@settings_options
def command(
    registry: str | None, model: str | None, host: str | None, port: int | None, http_port: int | None,
    config_file: Path | None, assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Serves the workers of a registry until Ctrl-C, without workers of its own. Printed to stdout: the gRPC endpoint,
    then the base URL of the OpenAI-compatible API. While no worker is known it refuses requests and its health is
    NOT_SERVING."""
    flags: dict[str, object] = {
        **model_flags(model),
        "registry.url": registry,
        "api.host": host,
        "api.port": port,
        # One option for both doors; a setting for each.
        "api.http_host": host,
        "api.http_port": http_port,
    }
    config = load_settings(config_file, assignments, flags).config
    from cluster.launch.logs import start_logging

    start_logging(config.log, "gateway")
    return asyncio.run(serve(lambda report: make_front(config, report)))


def make_front(config: Config, report: Callable[[str], None]) -> Front:
    """Not started. Raises InvalidInput."""
    from cluster.launch.doors import Seams
    from cluster.launch.front import Front
    from cluster.launch.served import load_served
    from cluster.openai.server import HttpDoor

    seams = Seams(authenticator=authenticator_of(config))
    return Front(config, load_served, seams=seams, report=report, make_door=HttpDoor)
