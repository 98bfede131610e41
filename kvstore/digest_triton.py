"""The body sums of kvstore.digest on a GPU: the same words, the same keys, the same value. Importing needs Triton.

Legend: S slots of a pool, n pages of a call.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# Triton reads the annotations as its own; the other arguments of a kernel have none.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvstore.digest import Digester
from kvstore.errors import InvalidInput
from kvstore.layout import HEADER_BYTES

_LOW = tl.constexpr(0xFFFFFFFF)
_PAIRS = 1024  # word pairs of one program


@triton.jit
def _products(pair, key):
    """(low + key low mod 2^32) * (high + key high mod 2^32) mod 2^64, in int64, which wraps alike."""
    low = (pair + key) & _LOW
    high = ((pair >> 32) + (key >> 32)) & _LOW
    return low * high


@triton.jit
def _sum_pages(storage_SW, page_ids_n, key, out_n2, slot_pairs, header_pairs, PAIRS: tl.constexpr):
    """One program adds one run of word pairs of one page to that page's two sums."""
    n = tl.program_id(0)
    page = tl.load(page_ids_n + n)
    i = tl.program_id(1) * PAIRS + tl.arange(0, PAIRS)
    inside = i < slot_pairs - header_pairs
    pair = tl.load(storage_SW + page * slot_pairs + header_pairs + i, mask=inside, other=0)
    first = tl.where(inside, _products(pair, tl.load(key + i, mask=inside, other=0)), 0)
    second = tl.where(inside, _products(pair, tl.load(key + i + 1, mask=inside, other=0)), 0)
    tl.atomic_add(out_n2 + 2 * n, tl.sum(first))
    tl.atomic_add(out_n2 + 2 * n + 1, tl.sum(second))


class TritonDigester:
    """Body sums for pools in GPU memory, under the keys of `digester`; its `finish` makes them digests.

    `device`: where the pool lives. Under Triton's interpreter it is the CPU.
    """

    def __init__(self, digester: Digester, device: torch.device) -> None:
        self._slot_bytes = digester.slot_bytes
        self._key = torch.frombuffer(bytearray(digester.body_key.tobytes()), dtype=torch.int64).to(device)

    def body_sums_many(self, storage_SU8: Tensor, page_ids_n: Tensor) -> Tensor:
        """Body sums int64 [n, 2] (the bits of uint64) of pages `page_ids_n` int64 [n] of a pool uint8 [S, slot_bytes].

        Ids must be in range: checking them here would wait for the device.
        Raises InvalidInput naming `storage` (shape, type or device).
        """
        if (
            storage_SU8.dtype is not torch.uint8
            or storage_SU8.dim() != 2
            or storage_SU8.shape[1] != self._slot_bytes
            or not storage_SU8.is_contiguous()
            or storage_SU8.device != self._key.device
        ):
            raise InvalidInput(
                "bad_storage",
                f"storage must be contiguous uint8 [S, {self._slot_bytes}] on {self._key.device}",
                field="storage",
            )
        out_n2 = torch.zeros(page_ids_n.shape[0], 2, dtype=torch.int64, device=self._key.device)
        if page_ids_n.shape[0]:
            slot_pairs, header_pairs = self._slot_bytes // 8, HEADER_BYTES // 8
            grid = (page_ids_n.shape[0], triton.cdiv(slot_pairs - header_pairs, _PAIRS))
            _sum_pages[grid](
                storage_SU8.view(torch.int64), page_ids_n, self._key, out_n2, slot_pairs, header_pairs, PAIRS=_PAIRS
            )
        return out_n2
