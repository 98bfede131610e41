"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from cluster.cli.reach import parsed
from cluster.config import LoadedConfig, load
from cluster.strict_yaml import YamlReader
from kvstore.errors import InvalidInput
from kvstore.files import FileReader

F = TypeVar("F", bound=Callable[..., Any])
TEXT_REASONS = frozenset({"bad_cluster_file", "bad_policy"})
# Shells complete it as a file; whether there is one, its reader tells.
NAMED_FILE = click.Path(readable=False)


def settings_options(command: F) -> F:
    """--config and --set: any setting, from a file or from the command line."""
    command = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="SECTION.FIELD=VALUE",
        help="Any setting, as `--set cache.page_tokens=64`. May repeat.",
    )(command)
    return click.option(
        "--config",
        "config_file",
        envvar="GENLOCK_CONFIG",
        type=click.Path(dir_okay=False, path_type=Path),
        help="YAML or TOML file of settings.  [env: GENLOCK_CONFIG]",
    )(command)


def cluster_options(command: F) -> F:
    """The settings that one changes most often, under short names."""
    for option in (
        click.option("--engine", help="Transfer engine."),
        click.option(
            "--model", type=NAMED_FILE, metavar="TEXT", help="Model to serve: a name, a .gguf file, or a folder."
        ),
        click.option("--decode", type=int, help="Decode workers."),
        click.option("--prefill", type=int, help="Prefill workers."),
        click.option(
            "--in-process", is_flag=True, help="All workers in this process instead of Ray actors: quick, one core."
        ),
    ):
        command = option(command)
    return command


def checked_endpoint(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Raises click.BadParameter."""
    if value and parsed(value) is None:
        raise click.BadParameter(f"{value[:64]!r} must read HOST:PORT, as 127.0.0.1:50051 or [::1]:50051")
    return value


def client_options(command: F) -> F:
    """--endpoint, --token, --timeout."""
    for option in (
        click.option(
            "--timeout", "timeout_s", type=click.FloatRange(0.001, 86_400), default=120.0, show_default=True,
            help="Longest time for an answer, seconds; beside --wait also for the wait.",
        ),
        click.option("--token", envvar="GENLOCK_TOKEN", help="Bearer token.  [env: GENLOCK_TOKEN]"),
        click.option(
            "--endpoint", envvar="GENLOCK_ENDPOINT", metavar="HOST:PORT", callback=checked_endpoint,
            help="The cluster's gateway. Default: where `genlock up` serves with the same settings.  "
            "[env: GENLOCK_ENDPOINT]",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def load_settings(
    config_file: Path | None, assignments: tuple[str, ...], flags: dict[str, object] | None = None
) -> LoadedConfig:
    """The effective configuration. Raises InvalidInput."""
    merged: dict[str, object] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise InvalidInput(
                "bad_setting", f"--set {assignment!r} must read SECTION.FIELD=VALUE", field=key or assignment
            )
        merged[key.strip()] = value.strip()
    merged.update({key: value for key, value in (flags or {}).items() if value is not None})
    return load(
        file_text=None if config_file is None else FileReader("bad_config_file", "config").text(config_file),
        file_name=str(config_file or ""),
        environ=os.environ,
        flags=merged,
    )


def read_input(path: str, reader: FileReader) -> str:
    """Text of a file, or of stdin where `path` is `-`. Raises InvalidInput."""
    return reader.stream(sys.stdin.buffer, "stdin") if path == "-" else reader.text(path)


@contextmanager
def judged_elsewhere(reader: YamlReader, text: str, name: str, prefix: str = "") -> Iterator[None]:
    """Says file and line of what a cluster finds wrong with a text: it does not know the file. `prefix`: what it calls
    the whole text."""
    try:
        yield
    except InvalidInput as error:
        if error.reason not in TEXT_REASONS:
            raise
        line = reader.line(text, error.field.removeprefix(prefix))
        where = f"{name} line {line}" if line else name
        raise InvalidInput(error.reason, f"{where}: {error.message}", field=error.field) from error


def endpoint_or_default(endpoint: str | None) -> str:
    """The given endpoint, or that of a local cluster with the environment's settings."""
    if endpoint:
        return endpoint
    config_file = os.environ.get("GENLOCK_CONFIG")
    api = load_settings(Path(config_file) if config_file else None, ()).config.api
    host = "127.0.0.1" if api.host in ("0.0.0.0", "::", "[::]") else api.host
    return f"{host}:{api.port}"
