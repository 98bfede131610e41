"""`genlock config`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from cluster.cli.options import load_settings, settings_options
from cluster.config import MASK, Setting
from cluster.output import emit, output_option


@click.command(
    epilog="""\b
Examples:
  genlock config
  genlock config --set cache.page_tokens=64 -o yaml
  GENLOCK_WORKERS_DECODE=2 genlock config -o json"""
)
@settings_options
@output_option
def command(config_file: Path | None, assignments: tuple[str, ...], output: str) -> None:
    """Shows all settings with their effective values and where each came from: a default, the file, an environment
    variable (GENLOCK_SECTION_FIELD) or a flag. Secrets are masked."""
    settings = load_settings(config_file, assignments).settings()
    if output == "yaml":
        # A file with remarks, which no dump of a tree is.
        click.echo(_file(settings), nl=False)
        return

    def show(_wide: bool) -> None:
        from cluster.cli import render

        rows = [(setting.key, _yaml(setting.value), setting.source, setting.doc) for setting in settings]
        render.stdout().print(render.table("", ("setting", "value", "from", "meaning"), rows))

    emit(output, lambda: {s.key: {"value": s.value, "source": s.source, "meaning": s.doc} for s in settings}, show)


def _file(settings: Sequence[Setting]) -> str:
    """A file that --config takes back; where a value came from is a remark, and so is a masked secret."""
    lines: list[str] = []
    section = ""
    for setting in settings:
        own, name = setting.key.split(".")
        if own != section:
            section = own
            lines.append(f"{section}:")
        masked = setting.value == MASK
        lines.append(f"  # {name} is masked" if masked else f"  {name}: {_yaml(setting.value)}  # {setting.source}")
    return "\n".join(lines) + "\n"


def _yaml(value: object) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
