"""How a model's layers reach KV pages.

Shape suffixes: N packed tokens of the step, H query heads, K kv heads, D width, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvstore.tables import ReadTable, WriteTable


class AttentionBackend(Protocol):
    """Writes new KV into pages and attends over pages. Both honour the tag rules of `kvstore.tables`.

    Values are always read back from the pages, also those that this very step wrote: what is attended to is exactly
    what is stored, so a split cluster computes the same numbers as one process with the same cache.
    """

    name: str

    def write(self, layer: int, streams: Sequence[Tensor], table: WriteTable) -> None:
        """Quantizes and stores. `streams`: one fp32 [N, K, D_stream] for each stream of the layout, in its order."""
        ...

    def attend(self, layer: int, query_NHD: Tensor, table: ReadTable, scale: float) -> Tensor:
        """Causal attention, fp32 in and out.

        GQA: query width is key_width, result [N, H, value_width]. MLA (absorbed): query width is latent + rope,
        keys are concat(latent, rope), values are the latent: result [N, H, latent].
        """
        ...


class KvStep(Protocol):
    """What a model's forward sees of one step: store this layer's new KV, then attend."""

    def __call__(self, layer: int, query_NHD: Tensor, streams: Sequence[Tensor], scale: float) -> Tensor:
        """Returns the attention output fp32 [N, H, D_value]."""
        ...


class PagedStep:
    """The KvStep over guarded tables; one per step."""

    def __init__(self, backend: AttentionBackend, read: ReadTable, write: WriteTable) -> None:
        self._backend = backend
        self._read = read
        self._write = write

    def __call__(self, layer: int, query_NHD: Tensor, streams: Sequence[Tensor], scale: float) -> Tensor:
        self._backend.write(layer, streams, self._write)
        return self._backend.attend(layer, query_NHD, self._read, scale)
