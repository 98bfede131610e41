"""The simulated model: real bytes in real pages, cheap to compute and impossible to get right from a wrong page.

The KV of a position is a hash of the KV of the position before (as it lies in its page), the token and the position.
The next token is a hash of all KV of the row. So one foreign, stale, short, misplaced or torn page changes the token;
the oracle applies the same two functions to the tokens alone.

Shape suffixes: B rows, N packed tokens, P pages, T token rows of a page, K bytes of one position's KV.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.guard import GuardedStep
from kvstore.layout import HEADER_BYTES, AttentionKind, KvFormat, PageLayout
from kvstore.tables import FLAG_KERNEL_READ, FLAG_KERNEL_WRITE, I64, U8
from model.sampling import SamplingParams

KV_BYTES = 16
PAGE_TOKENS = 4
START = bytes(KV_BYTES)
EOS = 0
VOCABULARY = 1 << 20
_EOS_ONE_IN = 24

Observer = Callable[[GuardedStep, int, Sequence[int], I64], None]  # (step, row, page ids, expected tags [n, 2])


@dataclass(frozen=True)
class SimToken:
    token_id: int


def small_layouts() -> tuple[PageLayout, ...]:
    """Three layouts whose slots have one size: only the layout itself tells them apart."""

    def gqa(heads: int, width: int, kv_format: KvFormat) -> PageLayout:
        return PageLayout(
            "sim", AttentionKind.GQA, layers=1, kv_heads=heads, key_width=width, value_width=width,
            page_tokens=PAGE_TOKENS, kv_format=kv_format,
        )  # fmt: skip

    return gqa(2, 1, KvFormat.NONE), gqa(1, 2, KvFormat.NONE), gqa(1, 4, KvFormat.INT8)


def next_kv(previous: bytes, token_id: int, position: int) -> bytes:
    """KV [K] of one position."""
    return hashlib.blake2b(previous + struct.pack("<qq", token_id, position), digest_size=KV_BYTES).digest()


def next_token(kv: bytes, position: int) -> SimToken:
    """The token after `position`, from the KV bytes of positions 0..position."""
    value = int.from_bytes(hashlib.blake2b(kv + struct.pack("<q", position), digest_size=8).digest(), "little")
    if (value >> 40) % _EOS_ONE_IN == 0:
        return SimToken(EOS)
    return SimToken(value % (VOCABULARY - 1) + 1)


class Oracle:
    """What a prompt must be answered with, from the tokens alone; computed as far as it is asked for."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self._kv = bytearray()
        self._prompt = len(prompt)

    def kv(self, start: int, end: int) -> bytes:
        """KV bytes of positions start..end-1 of prompt and answer."""
        while len(self._kv) < end * KV_BYTES:
            position = len(self._kv) // KV_BYTES
            if position == len(self.tokens):
                self.tokens.append(next_token(bytes(self._kv), position - 1).token_id)
            self._kv += next_kv(bytes(self._kv[-KV_BYTES:]) or START, self.tokens[position], position)
        return bytes(self._kv[start * KV_BYTES : end * KV_BYTES])

    def answer(self, index: int) -> int:
        """The `index`-th token of the answer (0-based)."""
        position = self._prompt + index
        kv = self.kv(0, position)
        if position == len(self.tokens):
            self.tokens.append(next_token(kv, position - 1).token_id)
        return self.tokens[position]

    def length(self, sampling: SamplingParams) -> int:
        """How many tokens the whole answer has. Said here once more, since a rule that is shared with decode would
        agree with its mistakes."""
        last = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
        enough = range(max(sampling.min_tokens, 1), sampling.max_tokens)
        return next((count for count in enough if self.answer(count - 1) in last), sampling.max_tokens)


class Compute:
    """Kernels of one layout: they honour the tags exactly as `kvstore.tables` demands."""

    def __init__(self, layout: PageLayout) -> None:
        self._places_TK = _places(layout)
        self._tokens = layout.page_tokens

    def kv_of_page(self, slot_U8: U8, rows: int) -> bytes:
        """The KV bytes of a page's first `rows` positions in order of position."""
        return slot_U8[self._places_TK[:rows].ravel()].tobytes()

    def write(self, step: GuardedStep, on_read: Observer, on_write: Observer) -> None:
        """Stores the KV of all packed tokens of healthy rows."""
        arrays, table = step.arrays, step.write
        starts = arrays.query_start_B1.tolist()
        tokens, positions = arrays.token_ids_N.tolist(), arrays.position_N.tolist()
        for b in range(len(starts) - 1):
            start, end = starts[b], starts[b + 1]
            if table.flags_B[b] or start >= end:
                continue
            previous = START if positions[start] == 0 else self._kv_at(step, b, positions[start] - 1, on_read)
            if previous is None:
                continue
            made = []
            for n in range(start, end):
                previous = next_kv(previous, tokens[n], positions[n])
                made.append(previous)
            self._store(step, b, slice(start, end), b"".join(made), on_write)

    def read(self, step: GuardedStep, on_read: Observer) -> list[tuple[int, SimToken]]:
        """(request number, next token) of each row that wants logits; a flagged row's token means nothing."""
        arrays, flags_B = step.arrays, step.read.flags_B
        out = []
        for b, n in zip(arrays.logits_row_R.tolist(), arrays.logits_at_R.tolist(), strict=True):
            number, position = int(arrays.request_no_B[b]), int(arrays.position_N[n])
            kv = None if flags_B[b] else self._kv_until(step, b, position + 1, on_read)
            out.append((number, SimToken(-1) if kv is None else next_token(kv, position)))
        return out

    def _store(self, step: GuardedStep, b: int, new: slice, kv: bytes, on_write: Observer) -> None:
        table = step.write
        slots_n, offsets_n = table.slot_N[new], table.offset_N[new]
        expected_n2 = table.expected_N2[new]
        ok_n = (slots_n >= 0) & (slots_n < len(table.live_S2))
        if table.check_tags:
            ok_n &= (table.live_S2[slots_n] == expected_n2).all(axis=1)
        if not ok_n.all():
            table.flags_B[b] |= FLAG_KERNEL_WRITE
            slots_n, offsets_n, expected_n2 = slots_n[ok_n], offsets_n[ok_n], expected_n2[ok_n]
        on_write(step, b, slots_n.tolist(), expected_n2)
        kv_nK = np.frombuffer(kv, np.uint8).reshape(-1, KV_BYTES)[ok_n]
        table.storage_SU8[slots_n[:, None], self._places_TK[offsets_n]] = kv_nK

    def _pages(self, step: GuardedStep, b: int, places: slice, on_read: Observer) -> npt.NDArray[np.int32] | None:
        """Page ids of a row's pages, or None when one is not what the row expects."""
        table = step.read
        ids_P, expected_P2 = table.page_ids_BP[b, places], table.expected_BP2[b, places]
        ok = bool(((ids_P >= 0) & (ids_P < len(table.live_S2))).all())
        if ok and table.check_tags:
            ok = bool((table.live_S2[ids_P] == expected_P2).all())
        if not ok:
            table.flags_B[b] |= FLAG_KERNEL_READ
            return None
        on_read(step, b, ids_P.tolist(), expected_P2)
        return ids_P

    def _kv_at(self, step: GuardedStep, b: int, position: int, on_read: Observer) -> bytes | None:
        place = position // self._tokens
        ids_P = self._pages(step, b, slice(place, place + 1), on_read)
        if ids_P is None or not len(ids_P):
            return None
        kv_K: U8 = step.read.storage_SU8[ids_P[0]][self._places_TK[position % self._tokens]]
        return kv_K.tobytes()

    def _kv_until(self, step: GuardedStep, b: int, length: int, on_read: Observer) -> bytes | None:
        ids_P = self._pages(step, b, slice(0, -(-length // self._tokens)), on_read)
        if ids_P is None:
            return None
        kv_PTK = step.read.storage_SU8[ids_P[:, None, None], self._places_TK[None]]
        kv: bytes = kv_PTK.reshape(-1, KV_BYTES)[:length].tobytes()
        return kv


def _places(layout: PageLayout) -> npt.NDArray[np.int64]:
    """Byte offsets int64 [T, K] in a slot of the KV of each token row: codes, then scales, of every stream."""
    rows: list[list[int]] = []
    for t in range(layout.page_tokens):
        row: list[int] = []
        for s in layout.streams:
            width = s.width * layout.element_bytes
            for head in range(s.heads):
                place = head * layout.page_tokens + t
                first = HEADER_BYTES + s.codes_offset + place * width
                row.extend(range(first, first + width))
                if s.scale_bytes:
                    first = HEADER_BYTES + s.scales_offset + place * 4
                    row.extend(range(first, first + 4))
        assert len(row) == KV_BYTES, "the small layouts keep 16 bytes a position"
        rows.append(row)
    return np.array(rows, dtype=np.int64)
