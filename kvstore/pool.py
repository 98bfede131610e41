"""A pool's memory: the table of live tags, then the slots. Only the guard may import this module.

Buffer (made by the transfer engine): `[tags int64 [slots, 2], padded to 4096 B | slots * slot_bytes]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.errors import InvalidInput
from kvstore.header import PageHeader, unpack_header
from kvstore.ids import Tag
from kvstore.layout import HEADER_BYTES, HeadOrder, PageLayout
from kvstore.tables import I64, U8
from kvstore.transfer.base import pool_bytes, tag_table_bytes


class PoolStorage:
    """Views on one buffer uint8 [pool_bytes(slots, slot_bytes)]."""

    def __init__(self, layout: PageLayout, slots: int, buffer: U8) -> None:
        if buffer.nbytes < pool_bytes(slots, layout.slot_bytes):
            raise InvalidInput("bad_pool", "the engine gave too small a buffer", field="pool.slots")
        self._layout = layout
        start = tag_table_bytes(slots)
        self.live_S2: I64 = buffer[: slots * 16].view(np.int64).reshape(slots, 2)
        self.slots_SU8: U8 = buffer[start : start + slots * layout.slot_bytes].reshape(slots, layout.slot_bytes)

    def set_tag(self, page_id: int, tag: Tag) -> None:
        self.live_S2[page_id] = tag

    def write_header(self, page_id: int, header: PageHeader) -> bytes:
        raw = header.pack()
        self.slots_SU8[page_id, :HEADER_BYTES] = np.frombuffer(raw, dtype=np.uint8)
        return raw

    def write_body(self, page_id: int, body: bytes) -> None:
        self.slots_SU8[page_id, HEADER_BYTES:] = np.frombuffer(body, dtype=np.uint8)

    def header_bytes(self, page_id: int) -> bytes:
        return self.slots_SU8[page_id, :HEADER_BYTES].tobytes()

    def read_header(self, page_id: int) -> PageHeader | None:
        return unpack_header(self.header_bytes(page_id))

    def headers(self, page_ids: Sequence[int]) -> list[bytes]:
        """The headers of several pages, 128 bytes each."""
        raw = self.slots_SU8[list(page_ids), :HEADER_BYTES].tobytes()
        return [raw[at : at + HEADER_BYTES] for at in range(0, len(raw), HEADER_BYTES)]

    def write_headers(self, page_ids: Sequence[int], headers: Sequence[PageHeader]) -> None:
        raw = b"".join([header.pack() for header in headers])
        self.slots_SU8[list(page_ids), :HEADER_BYTES] = np.frombuffer(raw, np.uint8).reshape(-1, HEADER_BYTES)

    def wipe_headers(self, page_ids: Sequence[int]) -> None:
        self.slots_SU8[list(page_ids), :HEADER_BYTES] = 0

    def scrub(self, page_id: int) -> None:
        self.slots_SU8[page_id] = 0

    def zero_tail(self, page_id: int, valid_rows: int) -> None:
        """Zeros the slot's padding, and codes and scales of rows that hold no token, so that a page has one content
        and shows nothing of its slot's former owner."""
        layout = self._layout
        slot = self.slots_SU8[page_id]
        slot[HEADER_BYTES + layout.layers * layout.layer_bytes :] = 0
        if valid_rows >= layout.page_tokens:
            return
        for layer in range(layout.layers):
            base = HEADER_BYTES + layer * layout.layer_bytes
            for s in layout.streams:
                self._tail(slot, base + s.codes_offset, s.heads, s.width * layout.element_bytes)[valid_rows:] = 0
                if s.scale_bytes:
                    self._tail(slot, base + s.scales_offset, s.heads, 4)[valid_rows:] = 0

    def _tail(self, slot: U8, offset: int, heads: int, row_bytes: int) -> U8:
        """View [page_tokens, heads, row_bytes] of one stream in either head order."""
        tokens = self._layout.page_tokens
        flat = slot[offset : offset + heads * tokens * row_bytes]
        if self._layout.order is HeadOrder.TOKEN_MAJOR:
            return flat.reshape(tokens, heads, row_bytes)
        return flat.reshape(heads, tokens, row_bytes).transpose(1, 0, 2)
