"""What a peer needs to pull and to judge one page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvstore.header import PageHeader
from kvstore.ids import PageRef


@dataclass(frozen=True)
class PageDescriptor:
    """Names a sealed page at its source. `logical_index` is the page's place in the request (0-based).

    `first_position` and `valid_rows` are token positions; `byte_length` is the slot's size;
    `digest` is the 61-bit keyed hash over header and body (see digest.py).
    """

    ref: PageRef
    logical_index: int
    first_position: int
    valid_rows: int
    byte_length: int
    layout_fingerprint: int
    prefix_key: bytes
    digest: int

    @cached_property
    def header(self) -> PageHeader:
        """The header that the source page must carry."""
        return PageHeader(self.ref.tag, self.layout_fingerprint, self.first_position, self.valid_rows, self.prefix_key)
