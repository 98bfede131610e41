"""A request on its way through the cluster, and what is sampled for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from model.sampling import SamplingParams


@dataclass(frozen=True)
class Ticket:
    """Made by a server for one attempt; nothing in it names a peer or a page.

    `token_ids` ends with `generated_tokens` ids that the request generated before it was preempted (0 if fresh).
    """

    ticket_id: bytes
    tenant: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    model_revision: str
    tokenizer_digest: str
    generated_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the caller sent."""
        return len(self.token_ids) - self.generated_tokens


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


def finish_reason(
    token_id: int, generated: int, sampling: SamplingParams, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Whether an answer ends with `token_id`, its `generated`-th token (1-based). Stop strings are the gateway's."""
    if generated >= sampling.min_tokens and (
        token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)
    ):
        return FinishReason.STOP
    return FinishReason.LENGTH if generated >= sampling.max_tokens else None
