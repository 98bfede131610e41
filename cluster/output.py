"""The forms of an answer, for every command that lists or shows something: -o table, wide, json or yaml."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
FORMATS = ("table", "wide", "json", "yaml")
YAML_COLUMNS = 120


def output_option(command: F) -> F:
    """-o with a table for people as the default."""
    return output_option_of("table")(command)


def output_option_of(default: str) -> Callable[[F], F]:
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default=default, show_default=True,
        help="Form of the answer. wide: what the table leaves out, where there is more.",
    )  # fmt: skip


def emit(output: str, tree: Callable[[], Any], show: Callable[[bool], None]) -> None:
    """On stdout: `tree` as data, or what `show` prints for people (`True`: the wide form)."""
    if output in ("json", "yaml"):
        click.echo(text(output, tree()))
    else:
        show(output == "wide")


def emit_one_of_many(output: str, tree: Callable[[], Any], show: Callable[[bool], None]) -> None:
    """`emit` for something that goes on: JSON one line each, YAML documents that begin with ---."""
    if output == "json":
        click.echo(json.dumps(tree(), ensure_ascii=False))
        return
    if output == "yaml":
        click.echo("---")
    emit(output, tree, show)


def text(output: str, value: Any) -> str:
    """A tree as JSON or as YAML, without the last line's end."""
    if output == "json":
        return json.dumps(value, ensure_ascii=False, indent=2)
    import yaml

    # Through JSON: both forms say the same, and tuples and enums become what YAML knows.
    plain = json.loads(json.dumps(value))
    dumped: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=YAML_COLUMNS)
    return dumped.rstrip()
