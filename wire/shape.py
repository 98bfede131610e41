"""How many fields a message has, counted on the wire before anybody builds objects of them. Pure.

Two bytes of a message can become an object of a hundred bytes, so that a limit of bytes alone bounds neither the memory
nor the time that parsing takes.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

from kvstore.errors import InvalidInput

_VARINT, _FIXED64, _BYTES, _BEGIN, _END, _FIXED32 = range(6)


def check_fields(data: bytes, message: Descriptor, most: int) -> None:
    """Raises InvalidInput (`too_many_values`) where `data`, as a `message`, has more than `most` fields, those of inner
    messages included. What is no message is left to the parser to refuse: counting ends there."""
    count = 0
    inner_of: dict[str, dict[int, Descriptor]] = {}
    # Spans that are yet to be counted, each as a message of its type.
    spans: list[tuple[int, int, Descriptor]] = [(0, len(data), message)]
    while spans:
        at, end, kind = spans.pop()
        inner = inner_of.get(kind.full_name)
        if inner is None:
            inner = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
            inner_of[kind.full_name] = inner
        while at < end:
            count += 1
            if count > most:
                raise InvalidInput("too_many_values", f"the request has more than {most} fields", field="request")
            tag, at = _varint(data, at, end)
            wire, number = tag & 7, tag >> 3
            if wire == _VARINT:
                _, at = _varint(data, at, end)
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            elif wire == _BYTES:
                size, at = _varint(data, at, end)
                if number in inner and at + size <= end:
                    spans.append((at, at + size, inner[number]))
                at += size
            elif wire not in (_BEGIN, _END):  # groups are unknown here, and what is inside of one counts as well
                break


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at `at`, and where it ends; what is cut ends at `end`."""
    value = shift = 0
    while at < end:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 63:
            break
        shift += 7
    return value, at
