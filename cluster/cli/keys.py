"""`genlock keys`: API keys in the registry."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pwd
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.cli.options import load_settings, read_input, settings_options
from cluster.output import emit, output_option
from kvstore.errors import GenlockError, InvalidInput, NotFound
from kvstore.files import FileReader
from kvstore.json_text import parse_json
from wire.clocks import now_ms, unix_ms

if TYPE_CHECKING:
    from cluster.registry.base import Registry

T = TypeVar("T")


@click.group(
    epilog="""\b
Examples:
  genlock keys create acme --config cluster.yaml
  genlock keys create ops --operator --label "on call"
  genlock keys list
  genlock keys revoke 3f9c0a1b

\b
Gateways take these keys with auth.registry_keys: true and a Redis registry (registry.url). Only SHA-256 digests are
kept; a key that is revoked is refused by all gateways within registry.poll_ms. Each key that is made or
revoked is an event: genlock events. For a tenants file: genlock keys digest."""
)
def command() -> None:
    """Makes and revokes keys of tenants and operators, for all gateways of a registry at once."""


@command.command(
    epilog="""\b
Examples:
  genlock keys create acme
  genlock keys create acme --max-requests 32 --max-priority normal
  genlock keys create ops --operator"""
)
@click.argument("tenant")
@click.option("--operator", is_flag=True, help="For the fleet instead of the model.")
@click.option("--label", default="", help="For people.")
@click.option("--max-requests", type=click.IntRange(0), help="At once; default: api.tenant_max_requests.")
@click.option("--max-priority", type=click.Choice(["low", "normal", "high"]), default="high", show_default=True)
@settings_options
def create(
    tenant: str, operator: bool, label: str, max_requests: int | None, max_priority: str, config_file: Path | None,
    assignments: tuple[str, ...],
) -> int:  # fmt: skip
    """Makes a key and prints it, this once, on stdout."""
    from cluster.gateway.credentials import key_record

    key_id = secrets.token_hex(4)
    token = f"gl_{key_id}_{secrets.token_urlsafe(32)}"
    record = key_record(
        key_id, tenant, operator=operator, created_ms=unix_ms(), label=label,
        max_requests=max_requests, max_priority=max_priority,
    )  # fmt: skip
    digest = hashlib.sha256(token.encode()).hexdigest()

    async def work(registry: Registry) -> None:
        await registry.put_key(digest, record)
        await _log(registry, key_id, f"key created for {_owner(parse_json(record))}")

    _with_registry(config_file, assignments, work)
    click.echo(f"Key {key_id} of {tenant}{' (operator)' if operator else ''}; it is not kept anywhere:", err=True)
    click.echo(token)
    return 0


@command.command(
    name="list",
    epilog="""\b
Examples:
  genlock keys list
  genlock keys list -o wide
  genlock keys list -o json""",
)
@output_option
@settings_options
def list_keys(output: str, config_file: Path | None, assignments: tuple[str, ...]) -> int:
    """Lists keys by their ids. The keys themselves are not known to anybody."""
    from cluster.cli import render

    kept = _records(_with_registry(config_file, assignments, lambda registry: registry.keys()))
    records = [record for _digest, record in kept]

    def show(wide: bool) -> None:
        columns = ("id", "tenant", "role", "label", "created", *(("max requests", "max priority") if wide else ()))
        rows = [_row(record, wide) for record in records]
        render.stdout().print(render.table("", columns, rows))

    emit(output, lambda: records, show)
    return 0


def _row(record: dict[str, Any], wide: bool) -> tuple[object, ...]:
    created = time.strftime("%Y-%m-%d", time.gmtime(record.get("created_ms", 0) / 1000))
    role = "operator" if record.get("operator") else "inference"
    most = record.get("max_requests")
    more = ("default" if most is None else most, record.get("max_priority", "high")) if wide else ()
    return (record.get("id", "?"), record.get("tenant", "?"), role, record.get("label", ""), created, *more)


@command.command(
    epilog="""\b
Examples:
  genlock keys revoke 3f9c0a1b"""
)
@click.argument("key_id", metavar="ID")
@settings_options
def revoke(key_id: str, config_file: Path | None, assignments: tuple[str, ...]) -> int:
    """Takes a key back. Requests that run with it go on to their end."""

    async def work(registry: Registry) -> int:
        kept = _records(await registry.keys())
        gone = [(digest, record) for digest, record in kept if record.get("id") == key_id]
        for digest, record in gone:
            await registry.remove_key(digest)
            await _log(registry, key_id, f"key of {_owner(record)} revoked")
        return len(gone)

    if not _with_registry(config_file, assignments, work):
        raise NotFound("unknown_key", f"no key {key_id[:64]!r}; `genlock keys list` lists them", field="id")
    click.echo(f"Revoked {key_id}.", err=True)
    return 0


@command.command(
    name="digest",
    epilog="""\b
Examples:
  genlock keys digest < token.txt""",
)
def print_digest() -> int:
    """Reads a token on stdin and prints its digest, for tokens_sha256 of a tenants file."""
    token = read_input("-", FileReader("bad_token", "token", limit=16 << 10)).strip()
    if not token:
        raise InvalidInput("empty_token", "no token on stdin", field="token")
    click.echo(hashlib.sha256(token.encode()).hexdigest())
    return 0


async def _log(registry: Registry, key_id: str, message: str) -> None:
    """Keeps an event. The change is made by now: what cannot be kept is said, or a new key would be lost with it."""
    from cluster.registry.records import Event

    try:
        await registry.append_event(Event(unix_ms(), "key", key_id, _local_user(), message))
    except GenlockError as error:
        click.echo(f"Not in the event log: {error.reason}: {error.message}", err=True)


def _owner(record: dict[str, Any]) -> str:
    return f"tenant {record.get('tenant', '?')}{' (operator)' if record.get('operator') else ''}"


def _local_user() -> str:
    """Who runs this command, as the host knows them. No tenant's name has a colon."""
    number = os.getuid()
    try:
        return f"local:{pwd.getpwuid(number).pw_name}"
    except KeyError:  # a container may know no names
        return f"local:{number}"


def _records(kept: Any) -> list[tuple[str, dict[str, Any]]]:
    out = []
    for token_digest, text in kept.items():
        try:
            record = parse_json(text)
        except ValueError:
            record = {}
        out.append((token_digest, record if isinstance(record, dict) else {}))
    return sorted(out, key=lambda one: (str(one[1].get("tenant")), str(one[1].get("id"))))


def _with_registry(
    config_file: Path | None, assignments: tuple[str, ...], work: Callable[[Registry], Awaitable[T]]
) -> T:
    from cluster.registry.make import is_shared, registry_from

    config = load_settings(config_file, assignments).config
    if not is_shared(config):
        raise InvalidInput(
            "no_shared_registry", "keys are kept in a Redis registry: set registry.url, as --set "
            "registry.url=redis://127.0.0.1:6379/0; for one gateway alone use api.tenants_file",
            field="registry.url",
        )  # fmt: skip

    async def run() -> T:
        registry = registry_from(config, now_ms)
        await registry.open()
        try:
            return await work(registry)
        finally:
            await registry.close()

    return asyncio.run(run())
