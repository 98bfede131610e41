"""Click groups whose commands are imported when they are used: torch and Ray cost seconds, `--help` must not."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click


@dataclass(frozen=True)
class LazyCommand:
    """`target` is `module:attribute` of a click command; `summary` is shown in the group's help without importing."""

    target: str
    summary: str


class LazyGroup(click.Group):
    """A group that knows its commands by name alone."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._lazy.get(cmd_name)
        if entry is None:
            return None
        module_name, _, attribute = entry.target.partition(":")
        missing = click.ClickException(f"`{cmd_name}` is not part of this installation ({entry.target})")
        try:
            command = getattr(importlib.import_module(module_name), attribute, None)
        except ModuleNotFoundError as error:
            # Only the module itself may be missing: anything that it imports and does not find is a fault.
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise
            raise missing from error
        if not isinstance(command, click.Command):
            raise missing
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self._lazy.items()])
