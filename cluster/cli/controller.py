"""`genlock controller`: the controller of a Ray cluster, kept alive there and watched from here."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from cluster.cli.options import load_settings, settings_options
from cluster.settings import Config
from kvstore.errors import Unavailable

if TYPE_CHECKING:
    from cluster.launch.ray_controller import RayController

UNREACHABLE = 3
START_S = 120.0
LOOK_S = 2.0
# Silence for longer than Ray needs to start an actor again on another node.
SILENCE_S = 120.0


@click.command(
    epilog="""\b
Examples:
  genlock controller --registry redis://127.0.0.1:6379/0 --ray auto
  genlock controller --config cluster.yaml
  genlock controller --config cluster.yaml --stop

\b
The controller lives on the Ray cluster, which starts it again wherever it dies; Ctrl-C ends only this watch. What is
wanted is kept in the registry: --prefill and --decode count only where that knows nothing yet.
Exit codes: 0 left or stopped, 2 a setting is missing, 3 Ray or the controller is not to be reached."""
)
@click.option("--registry", metavar="URL", help="Redis or Valkey server: redis://, rediss:// or unix://.")
@click.option("--ray", "address", metavar="ADDRESS", help="Ray cluster: host:port of its head, or auto.")
@click.option("--prefill", type=int, help="Prefill workers at the very first start.")
@click.option("--decode", type=int, help="Decode workers at the very first start.")
@click.option("--stop", is_flag=True, help="End the controller; its workers go on.")
@settings_options
def command(
    registry: str | None, address: str | None, prefill: int | None, decode: int | None, stop: bool,
    config_file: Path | None, assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Makes sure that the Ray cluster has a controller with these settings, prints its endpoint to stdout, and watches
    it until Ctrl-C."""
    flags: dict[str, object] = {
        "registry.url": registry,
        "control.ray_address": address,
        "workers.prefill": prefill,
        "workers.decode": decode,
    }
    config = load_settings(config_file, assignments, flags).config
    controller = _controller(config)
    controller.open()
    try:
        if stop:
            controller.stop()
            click.echo("Stopped; its workers go on.", err=True)
            return 0
        return _watch(controller)
    finally:
        controller.close()


def _controller(config: Config) -> RayController:
    tenants = _tenants(config.api.tenants_file)
    from cluster.launch.build import build_worker
    from cluster.launch.ray_controller import RayController

    return RayController(config, build_worker, tenants)


def _tenants(name: str) -> str:
    """The text, for an actor that may be on another host. Raises InvalidInput."""
    if not name:
        return ""
    from cluster.gateway.identity import TENANTS_FILE, authenticator_from

    text = TENANTS_FILE.text(name)
    authenticator_from(text, name)
    return text


def _watch(controller: RayController) -> int:
    asked = threading.Event()

    def heard(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    made = controller.ensure()
    click.echo("A controller was started." if made else "The controller runs already.", err=True)
    endpoint, silent_s = controller.wait_serving(START_S).endpoint, 0.0
    click.echo(endpoint)
    while not asked.wait(LOOK_S):
        try:
            pulse = controller.pulse(LOOK_S)
        except Unavailable as error:
            silent_s += 2 * LOOK_S
            click.echo(f"{error.message}; Ray starts it again", err=True)
            if silent_s >= SILENCE_S:
                return UNREACHABLE
            continue
        silent_s = 0.0
        if pulse.error:
            click.echo(f"The controller does not serve: {pulse.error}", err=True)
        elif pulse.endpoint != endpoint:
            endpoint = pulse.endpoint
            click.echo(endpoint)
    click.echo("Left; the controller goes on. `genlock controller --stop` ends it.", err=True)
    return 0
