"""How things look on a terminal. Answers go to stdout, everything else to stderr."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import click
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.output import text
from genlock.v1 import inference_pb2 as pb

# A table that is piped somewhere must not be cut to 80 columns.
PIPED_COLUMNS = 200


def stdout() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPED_COLUMNS)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> RenderableType:
    """A plain table; numbers are aligned to the right. Cells are text, never markup. The title is a line of its own:
    as the table's it would be as narrow as the table."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    numeric = [bool(rows) and all(isinstance(row[at], int | float) for row in rows) for at in range(len(columns))]
    for name, right in zip(columns, numeric, strict=True):
        out.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        out.add_row(*(Text(cell(value)) for value in row))
    return Group(Text(title, style="table.title"), out) if title else out


def cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}" if math.isfinite(value) else "-"
    return str(value)


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    click.echo(text("json", value))


def as_dict(message: Message) -> dict[str, Any]:
    """A message with the schema's own names and real numbers (protobuf's JSON writes 64-bit ones as texts). Messages
    and optional fields that are not set are left out."""
    out: dict[str, Any] = {}
    for spec in message.DESCRIPTOR.fields:
        value = getattr(message, spec.name)
        if spec.message_type is not None and spec.message_type.GetOptions().map_entry:
            out[spec.name] = {str(key): value[key] for key in sorted(value)}
        elif spec.is_repeated:
            out[spec.name] = [_plain(spec, item) for item in value]
        elif not spec.has_presence or message.HasField(spec.name):
            out[spec.name] = _plain(spec, value)
    return out


def size(count_bytes: int) -> str:
    """Bytes for people."""
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def finish_name(reason: pb.FinishReason.ValueType) -> str:
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def summary(finished: pb.Finished) -> str:
    """One line about an answer."""
    usage, times, checks = finished.usage, finished.timings, finished.verification
    parts = [
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens ({finish_name(finished.finish_reason)})",
        f"first after {times.first_token_ms:.0f} ms",
    ]
    if usage.completion_tokens > 1:
        parts.append(f"then {times.per_token_ms:.1f} ms each")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} from the prefix cache")
    if checks.pages_received:
        parts.append(f"{checks.pages_received} pages ({size(checks.bytes_received)}) verified")
    parts.append(f"{finished.prefill_worker} → {finished.decode_worker}")
    return " · ".join(parts)


def _plain(spec: Any, value: Any) -> Any:
    if spec.message_type is not None:
        return as_dict(value)
    if spec.enum_type is not None:
        known = spec.enum_type.values_by_number.get(value)
        return known.name if known is not None else value
    return value.hex() if isinstance(value, bytes) else value
