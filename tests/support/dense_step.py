"""Attention without pages, for comparing a model with its reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class DenseStep:
    """A KvStep that keeps keys and values of each sequence in plain tensors. `rows`: (sequence, tokens) of the step."""

    def __init__(self) -> None:
        self.cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.rows: list[tuple[int, int]] = []

    def __call__(self, layer: int, query_NHD: Tensor, streams: Sequence[Tensor], scale: float) -> Tensor:
        outputs, at = [], 0
        for sequence, tokens in self.rows:
            part = slice(at, at + tokens)
            new = tuple(stream[part].transpose(0, 1) for stream in streams)
            old = self.cache.get((layer, sequence))
            key, value = new if old is None else (torch.cat(pair, 1) for pair in zip(old, new, strict=True))
            self.cache[layer, sequence] = key, value
            visible = torch.ones(tokens, key.shape[1], dtype=torch.bool).tril(key.shape[1] - tokens)
            mixed = torch.nn.functional.scaled_dot_product_attention(
                query_NHD[part].transpose(0, 1)[None], key[None], value[None], visible, scale=scale, enable_gqa=True
            )
            outputs.append(mixed[0].transpose(0, 1))
            at += tokens
        return torch.cat(outputs)
