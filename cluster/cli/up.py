"""`genlock up`: a cluster in the foreground."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from cluster.cli.options import cluster_options, load_settings, settings_options
from cluster.settings import Config

if TYPE_CHECKING:
    from cluster.gateway.identity import Authenticator
    from cluster.launch.up import Cluster

INTERRUPTED = 130


@click.command(
    epilog="""\b
Examples:
  genlock up
  genlock up --prefill 1 --decode 2 --port 50051
  genlock up --model /models/my-model --set cache.page_tokens=64
  genlock up --config cluster.yaml
  genlock up --tls

\b
Ctrl-C drains and stops; a second Ctrl-C does not wait for running requests."""
)
@cluster_options
@click.option("--host", help="Address of the gateway.")
@click.option("--port", type=int, help="Port of the gateway; 0 is any free one.")
@click.option("--http-port", type=int, help="Port of the OpenAI-compatible API; 0 is any free one, -1 is off.")
@click.option("--tls", is_flag=True, help="TLS at both doors and between workers, with certificates of a CA made here.")
@click.option("--tls-folder", type=click.Path(file_okay=False, path_type=Path),
              help="Where --tls keeps them. Default: ~/.local/state/genlock/tls")  # fmt: skip
@settings_options
def command(
    in_process: bool, prefill: int | None, decode: int | None, model: str | None, engine: str | None,
    host: str | None, port: int | None, http_port: int | None, tls: bool, tls_folder: Path | None,
    config_file: Path | None, assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Starts workers and a gateway on this machine and serves until Ctrl-C. Printed to stdout: the gRPC endpoint, then
    the base URL of the OpenAI-compatible API."""
    flags: dict[str, object] = {
        **cluster_flags(prefill, decode, model, engine),
        "api.host": host,
        "api.port": port,
        # One option for both doors; a setting for each.
        "api.http_host": host,
        "api.http_port": http_port,
        **(tls_flags(tls_folder, host) if tls or tls_folder else {}),
    }
    config = load_settings(config_file, assignments, flags).config
    from cluster.launch.logs import start_logging

    start_logging(config.log, "gateway")
    return asyncio.run(serve(lambda report: make_cluster(config, report, in_process=in_process, http=True)))


def cluster_flags(prefill: int | None, decode: int | None, model: str | None, engine: str | None) -> dict[str, object]:
    """The short options of a cluster as settings."""
    return {
        **model_flags(model),
        "workers.prefill": prefill,
        "workers.decode": decode,
        "transfer.engine": engine,
    }


def tls_flags(folder: Path | None, host: str | None) -> dict[str, object]:
    """Makes certificates, and names them as settings."""
    import datetime

    from cluster.cli.reach import CA_VARIABLE
    from cluster.devca import make

    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    hosts = [host] if host and host not in ("0.0.0.0", "::") else []
    made = make(folder or state / "genlock" / "tls", hosts, datetime.datetime.now(datetime.UTC))
    click.echo(f"For clients: export {CA_VARIABLE}={made.ca}", err=True)
    return {"tls.cert_file": str(made.cert), "tls.key_file": str(made.key), "tls.ca_file": str(made.ca)}


def model_flags(model: str | None) -> dict[str, object]:
    """A model's name or place as settings."""
    known = model is None or model in ("smollm2", "probe")
    return {
        "model.name": model if known or model is None else Path(model).stem,
        "model.path": None if known else model,
    }


def make_cluster(config: Config, report: Callable[[str], None], *, in_process: bool, http: bool = False) -> Cluster:
    """A cluster of real workers, not started. `http`: with the OpenAI-compatible API, where its port is not off."""
    from cluster.launch.build import build_worker
    from cluster.launch.doors import Seams
    from cluster.launch.launcher import InProcessLauncher, Launcher
    from cluster.launch.ray_launcher import RayLauncher
    from cluster.launch.served import load_served
    from cluster.launch.up import Cluster

    make_door = None
    if http:
        from cluster.openai.server import HttpDoor

        make_door = HttpDoor
    launcher: Launcher = (
        InProcessLauncher(build_worker) if in_process else RayLauncher(build_worker, control=config.control)
    )
    seams = Seams(authenticator=authenticator_of(config))
    return Cluster(config, launcher, load_served, seams=seams, report=report, make_door=make_door)


class Served(Protocol):
    """What runs in the foreground: a cluster, or a gateway alone."""

    @property
    def url(self) -> str: ...

    async def start(self) -> str: ...

    async def stop(self, grace_ms: int | None = None) -> None: ...


async def serve(make: Callable[[Callable[[str], None]], Served]) -> int:
    """Runs the cluster or gateway that `make(report)` gives until a signal. Returns the exit code."""
    from cluster.cli import render

    console = render.stderr()
    asked = _Signals()
    with asked.installed(), console.status("Starting…") as spinner:

        def report(text: str) -> None:
            console.print(text, markup=False)
            spinner.update(f"Starting: {text}")

        cluster = make(report)
        starting = asyncio.create_task(cluster.start())
        if not await asked.or_done(starting):
            spinner.update("Stopping before everything was up…")
            starting.cancel()
            await asyncio.wait([starting])
            console.print("Stopped.")
            return INTERRUPTED
        endpoint = starting.result()
        spinner.stop()
        click.echo(endpoint)
        if cluster.url:
            click.echo(cluster.url)
        console.print("Ctrl-C drains and stops.", markup=False)
        await asked.wait()
        spinner.update("Draining; Ctrl-C again does not wait…")
        spinner.start()
        stopping = asyncio.create_task(cluster.stop())
        if not await asked.or_done(stopping):
            spinner.update("Stopping now…")
            stopping.cancel()
            await asyncio.wait([stopping])
        elif stopping.exception() is not None:
            raise stopping.exception() or AssertionError
    console.print("Stopped.")
    return 0


class _Signals:
    """SIGINT and SIGTERM, one after the other. The third ends the process on the spot."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._count = 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._heard)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()

    async def or_done(self, task: asyncio.Task[object]) -> bool:
        """Waits for the task or a signal; True when the task came first."""
        waiting = asyncio.create_task(self.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return task.done()

    def _heard(self) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(INTERRUPTED)
        self._event.set()


def authenticator_of(config: Config) -> Authenticator | None:
    """What the settings name; None where they name nobody: then everybody is the one tenant. Raises InvalidInput."""
    from cluster.launch.credentials import credentials_of

    return credentials_of(config)
