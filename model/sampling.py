"""Sampling parameters. See also sampler code in this room."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SCHEMA_BYTES = 64 << 10


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. Validated by `validate` (InvalidInput names `sampling_params.<field>`)."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; k >= 0: the chosen token's and the k best alternatives'
    json_schema: str = ""  # what the answer must be; empty: any text
