"""Shape checks that all attention backends share: a wrong shape is a typed error, never an out-of-range load.

Legend: N packed tokens, H query heads, K kv heads, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, float32

from kvstore.errors import InvalidInput
from kvstore.layout import AttentionKind, PageLayout


def value_width(layout: PageLayout) -> int:
    """Width of an attention result: the value for GQA, the latent for MLA."""
    return layout.key_width if layout.kind is AttentionKind.MLA else layout.value_width


def query_width(layout: PageLayout) -> int:
    """Width of a query: the key for GQA, latent and rope side by side for MLA."""
    return layout.key_width + layout.value_width if layout.kind is AttentionKind.MLA else layout.key_width


def require_query(layout: PageLayout, query_NHD: Tensor) -> None:
    """Raises InvalidInput(field 'query') unless fp32 [N, H, D] fits the layout."""
    if (
        query_NHD.dim() != 3
        or query_NHD.dtype is not float32
        or query_NHD.shape[1] % layout.kv_heads
        or query_NHD.shape[2] != query_width(layout)
    ):
        raise InvalidInput(
            "bad_shape",
            f"query must be fp32 [N, multiple of {layout.kv_heads}, {query_width(layout)}], "
            f"not {query_NHD.dtype} {tuple(query_NHD.shape)}",
            field="query",
        )


def require_streams(layout: PageLayout, streams: Sequence[Tensor], tokens: int) -> None:
    """Raises InvalidInput(field 'streams') unless there is one fp32 [N, K, D] for each stream of the layout."""
    wanted = [(tokens, spec.heads, spec.width) for spec in layout.streams]
    given = [tuple(stream.shape) for stream in streams]
    if given != wanted or any(stream.dtype is not float32 for stream in streams):
        raise InvalidInput("bad_shape", f"streams must be fp32 {wanted}, not {given}", field="streams")


def require_layer(layout: PageLayout, layer: int) -> None:
    """Raises InvalidInput(field 'layer') unless the layout has it."""
    if not 0 <= layer < layout.layers:
        raise InvalidInput("bad_layer", f"layer must be in [0, {layout.layers}), not {layer}", field="layer")
