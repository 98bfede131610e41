"""The page header: what a page *is*. Packed little-endian at the start of every slot, under the digest.

offset  0  magic u32 | version u16 | format u16
offset  8  incarnation i64 | generation i64          the tag that was live when the page was sealed
offset 24  layout fingerprint i64
offset 32  first position i64 | valid rows i32 | pad i32
offset 48  prefix key, 32 bytes
offset 80  zeros up to 128
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.ids import Tag
from kvstore.layout import HEADER_BYTES

MAGIC = 0x4B4C4E47  # "GNLK"
VERSION = 1
_PACK = struct.Struct("<IHHqqqqii32s")
KEY_BYTES = 32


@dataclass(frozen=True)
class PageHeader:
    tag: Tag
    layout_fingerprint: int
    first_position: int
    valid_rows: int
    prefix_key: bytes

    def pack(self) -> bytes:
        """128 bytes."""
        body = _PACK.pack(
            MAGIC,
            VERSION,
            0,
            self.tag.incarnation,
            self.tag.generation,
            self.layout_fingerprint,
            self.first_position,
            self.valid_rows,
            0,
            self.prefix_key,
        )
        return body.ljust(HEADER_BYTES, b"\0")


def unpack_header(raw: bytes) -> PageHeader | None:
    """Parses 128 bytes; None when they are not a header of this version, reserved zeros included."""
    if len(raw) != HEADER_BYTES:
        return None
    _, _, _, incarnation, generation, fingerprint, position, rows, _, key = _PACK.unpack_from(raw)
    header = PageHeader(Tag(incarnation, generation), fingerprint, position, rows, key)
    return header if header.pack() == raw else None
