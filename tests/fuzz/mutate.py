"""Hostile values: messages that are changed a little, a lot, or made of extremes. All from one seeded generator."""

from __future__ import annotations

import json
import random
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

M = TypeVar("M", bound=Message)
INTS = (0, 1, -1, 2, 7, 16, 31, 32, 255, 256, 4096, (1 << 31) - 1, -(1 << 31), (1 << 32) - 1, (1 << 63) - 1, -(1 << 63),
        (1 << 64) - 1)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e30, 3e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "a", "\x00", "\u202e", "é" * 9, "{}", "[" * 2000, "null", "../../etc/passwd", "127.0.0.1:1",
         "a" * 300, "'; --", "<|im_start|>", "\ufffd", "\U0001f642" * 70)  # fmt: skip
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 100),
}


def mutated(rng: random.Random, message: M) -> M | None:
    """A changed copy; None where the bytes are no message any more, which the transport refuses by itself."""
    if rng.random() < 0.2:
        return _of_bytes(rng, message)
    copy = type(message).FromString(message.SerializeToString())
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change(rng, copy)
    return copy


def _of_bytes(rng: random.Random, message: M) -> M | None:
    raw = bytearray(message.SerializeToString())
    for _ in range(rng.choice((1, 1, 2, 8))):
        way = rng.randrange(4)
        at = rng.randrange(len(raw) + 1)
        if way == 0 and raw:
            raw[at % len(raw)] = rng.randrange(256)
        elif way == 1:
            del raw[at : at + rng.randrange(1, 20)]
        elif way == 2:
            raw[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            raw[at:at] = raw[: rng.randrange(len(raw) + 1)]
    try:
        return type(message).FromString(bytes(raw))
    except DecodeError:
        return None


def _change(rng: random.Random, message: Message) -> None:
    """One field somewhere in the message."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if rng.random() < 0.1:
        message.ClearField(field.name)
        return
    inner = field.message_type is not None
    if inner and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[text(rng)] = text(rng)  # our maps are of text
    elif field.is_repeated:
        values = getattr(message, field.name)
        if values and rng.random() < 0.3:
            values.extend(list(values)[: rng.randrange(1, 40)])
        elif inner:
            if not values:
                values.add()
            _change(rng, rng.choice(values)) if hasattr(values[0], "DESCRIPTOR") else None
        else:
            del values[rng.randrange(len(values) + 1) :]
            values.extend(scalar(rng, field) for _ in range(rng.choice((1, 1, 3, 70))))
    elif inner:
        _change(rng, getattr(message, field.name))
    else:
        setattr(message, field.name, scalar(rng, field))


def scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    """A hostile value that the field's type can hold."""
    kind = field.cpp_type
    if kind in _LIMITS:
        low, high = _LIMITS[kind]
        value = rng.choice(INTS) if rng.random() < 0.7 else rng.getrandbits(64) - (1 << 63)
        return min(max(value, low), high)
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 15, 16, 16, 17, 31, 32, 32, 33, 400)))
    return text(rng)


def text(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(TEXTS)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) for _ in range(rng.randrange(30)))


def tree(rng: random.Random, depth: int = 0) -> object:
    """Any value of JSON."""
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(INTS)
    if kind == 2:
        return rng.choice((*FLOATS[:8], 10**400))
    if kind in (3, 4):
        return text(rng)
    if kind in (5, 6):
        return [tree(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {text(rng)[:20]: tree(rng, depth + 1) for _ in range(rng.randrange(4))}


def mutated_object(rng: random.Random, good: dict[str, Any]) -> str:
    """JSON text of an object whose fields are changed, or that is cut or broken."""
    changed = json.loads(json.dumps(good))
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice((*changed, text(rng))) if changed else text(rng)
        way = rng.randrange(4)
        if way == 0:
            changed.pop(name, None)
        elif way == 1 and isinstance(changed.get(name), str):
            at = rng.randrange(len(changed[name]) + 1)
            changed[name] = changed[name][:at] + text(rng) + changed[name][at + 1 :]
        else:
            changed[name] = tree(rng)
    raw = json.dumps(changed)
    if rng.random() < 0.15:
        at = rng.randrange(len(raw))
        raw = rng.choice((raw[:at], raw[:at] + text(rng) + raw[at:], "[" * 100_000, raw * 2))
    return raw
