"""Records to JSON and back. Pure. Unknown fields are passed over, missing ones take their defaults, and whatever cannot
be read is an InvalidInput (`bad_record`), or `record_newer` where a later release wrote it in a way of its own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from cluster.registry.records import Desired, Event, GatewayRecord, WorkerRecord
from cluster.registry.rules import MAX_TEXT_CHARS, check_gateway, check_worker
from cluster.roles import Role
from kvstore.errors import InvalidInput
from kvstore.json_text import parse_json

# Moves only when older readers would misread what is written; a new field alone does not move it.
VERSION = 1
MAX_RECORD_CHARS = 1 << 20
INT64 = 1 << 63

T = TypeVar("T")
Reader = Callable[[object], Any]


def encode_worker(record: WorkerRecord) -> str:
    return _dump(dataclasses.replace(record, detail=record.detail[:MAX_TEXT_CHARS]), ())


def decode_worker(text: str | bytes) -> WorkerRecord:
    """Raises InvalidInput."""
    record = _load(WorkerRecord, text, _WORKER)
    check_worker(record)
    return record


def encode_gateway(record: GatewayRecord) -> str:
    return _dump(record, ())


def decode_gateway(text: str | bytes) -> GatewayRecord:
    """Raises InvalidInput."""
    record = _load(GatewayRecord, text, _GATEWAY)
    check_gateway(record)
    return record


def encode_desired(desired: Desired) -> str:
    """Without its revision, which the store keeps beside it."""
    return _dump(desired, ("revision",))


def decode_desired(text: str | bytes, revision: int) -> Desired:
    """Raises InvalidInput."""
    return dataclasses.replace(_load(Desired, text, _DESIRED), revision=revision)


def encode_event(event: Event) -> str:
    """Without its sequence number, which the store keeps beside it."""
    cut = {name: getattr(event, name)[:MAX_TEXT_CHARS] for name in ("kind", "subject", "actor", "message", "reason")}
    return _dump(dataclasses.replace(event, **cut), ("sequence",))


def decode_event(text: str | bytes, sequence: int) -> Event:
    """Raises InvalidInput."""
    return dataclasses.replace(_load(Event, text, _EVENT), sequence=sequence)


def _dump(record: WorkerRecord | GatewayRecord | Desired | Event, without: tuple[str, ...]) -> str:
    tree: dict[str, object] = {"v": VERSION}
    for spec in dataclasses.fields(record):
        if spec.name in without:
            continue
        value = getattr(record, spec.name)
        if spec.name == "incarnation":
            value = str(value)  # 63 bits: more than a JSON number holds in Lua and elsewhere
        elif isinstance(value, frozenset):
            value = sorted(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        tree[spec.name] = value
    return json.dumps(tree, separators=(",", ":"))


def _load(kind: Callable[..., T], text: str | bytes, readers: Mapping[str, Reader]) -> T:
    if len(text) > MAX_RECORD_CHARS:
        raise _bad("text", f"longer than {MAX_RECORD_CHARS} characters")
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise _bad("text", "not JSON") from error
    if not isinstance(tree, dict):
        raise _bad("text", "not an object")
    version = tree.get("v")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _bad("v", "no version")
    if version > VERSION:
        raise InvalidInput("record_newer", f"version {version}; this release reads {VERSION}", field="v")
    values: dict[str, Any] = {}
    for name, read in readers.items():
        if name in tree:
            try:
                values[name] = read(tree[name])
            except (TypeError, ValueError) as error:
                raise _bad(name, "of a wrong type or out of range") from error
    try:
        return kind(**values)
    except TypeError as error:
        raise _bad("text", "a field that it needs is missing") from error


def _bad(field: str, what: str) -> InvalidInput:
    return InvalidInput("bad_record", f"{field}: {what}", field=field)


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _number(raw: object) -> int:
    if not isinstance(raw, int) or isinstance(raw, bool):
        raise TypeError
    if not -INT64 <= raw < INT64:
        raise ValueError
    return raw


def _count(raw: object) -> int:
    value = _number(raw)
    if value < 0:
        raise ValueError
    return value


def _flag(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise TypeError
    return raw


def _names(raw: object) -> frozenset[str]:
    if not isinstance(raw, list):
        raise TypeError
    return frozenset(_text(item) for item in raw)


def _counts(raw: object) -> Mapping[str, int]:
    if not isinstance(raw, dict):
        raise TypeError
    return MappingProxyType({key: _count(value) for key, value in raw.items()})


def _texts(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, dict):
        raise TypeError
    return MappingProxyType({key: _text(value) for key, value in raw.items()})


def _digits(raw: object) -> int:
    text = _text(raw)
    if len(text) > 20:
        raise ValueError
    return int(text)


_WORKER: Mapping[str, Reader] = MappingProxyType(
    {
        **dict.fromkeys(("worker_id", "endpoint", "layout_fingerprint", "detail", "node", "pod"), _text),
        **dict.fromkeys(("running", "waiting", "free_pages", "total_pages", "pid"), _count),
        **dict.fromkeys(("draining", "cordoned", "healthy"), _flag),
        "metrics_endpoint": _text,
        "told_ms": _number,
        "started_ms": _number,
        "role": lambda raw: Role(_text(raw)),
        "incarnation": _digits,
    }
)
_GATEWAY: Mapping[str, Reader] = MappingProxyType(
    {"gateway_id": _text, "arrived": _count, "waiting": _count, "endpoint": _text}
)
_DESIRED: Mapping[str, Reader] = MappingProxyType(
    {
        **dict.fromkeys(("prefill", "decode", "controller_starts", "refills", "refilled_ms"), _count),
        "cordoned": _names,
        "autoscale": _text,
        "controller_endpoint": _text,
        "autoscale_paused": _flag,
        **dict.fromkeys(("restarts", "cordoned_lives"), _counts),
        **dict.fromkeys(("closed", "cordoned_nodes"), _texts),
    }
)
_EVENT: Mapping[str, Reader] = MappingProxyType(
    {
        **dict.fromkeys(("kind", "subject", "actor", "message", "reason"), _text),
        "at_ms": _number,
        "revision": _count,
    }
)
