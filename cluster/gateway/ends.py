"""Whether what a decode worker tells of an answer can be: its tokens, its end, its figures. Pure.

How an answer ends follows from its tokens and from what was asked (`model.ticket.finish_reason`), so nothing of it is
taken from the worker: the rule is gone through again here, token by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from genlock.v1 import worker_pb2 as worker
from kvstore.errors import InvalidInput, Unavailable
from model.sampling import SamplingParams
from model.ticket import FinishReason, finish_reason
from wire.convert import duration_from_proto, finish_from_proto

# Rounding may lift the logarithm of a probability of 1 above 0.
MAX_LOGPROB = 0.01


class Sampled(Protocol):
    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top(self) -> Sequence[worker.SampledLogprob]: ...


@dataclass(frozen=True)
class Asked:
    """What an answer must keep to. `eos_token_ids` and `vocab_size` are the model's."""

    sampling: SamplingParams
    prompt_tokens: int
    vocab_size: int
    eos_token_ids: Collection[int]


class Told(NamedTuple):
    """The tokens of an answer so far: how many, and whether the last one ended it. One is made for every token."""

    number: int = 0
    ended: FinishReason | None = None


@dataclass(frozen=True)
class EndJudge:
    """Raises Unavailable (`stream_protocol`), which says what cannot be."""

    asked: Asked
    # Tokens that may end an answer before max_tokens.
    _ends: frozenset[int] = field(init=False, default=frozenset())
    _wants_logprobs: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        sampling = self.asked.sampling
        eos = () if sampling.ignore_eos else self.asked.eos_token_ids
        object.__setattr__(self, "_ends", frozenset((*sampling.stop_token_ids, *eos)))
        object.__setattr__(self, "_wants_logprobs", sampling.logprobs >= 0)

    def tokens(self, told: Told, tokens: Sequence[Sampled]) -> Told:
        """`told` and the tokens that follow. Every token of every answer passes here: keep it short."""
        if not tokens:
            return told
        count, ended = told
        if ended is not None:
            raise _cannot_be(f"a token after the one that ended the answer ({ended})")
        asked, last = self.asked, -1
        vocab_size, most = asked.vocab_size, asked.sampling.max_tokens
        for token in tokens:
            last = token.token_id
            if not 0 <= last < vocab_size:
                raise _cannot_be("a token outside the vocabulary")
            if self._wants_logprobs:
                self._logprobs(token)
        count += len(tokens)
        if count > most:
            raise _cannot_be(f"more than max_tokens = {most} tokens")
        if len(tokens) > 1:
            self._none_ends(told.number, tokens[:-1])
        if count < most and last not in self._ends:
            return Told(count)
        return Told(count, finish_reason(last, count, asked.sampling, asked.eos_token_ids))

    def end(self, told: Told, finished: worker.DecodeFinished) -> None:
        """The end of an answer whose tokens have all come."""
        reason = finish_from_proto(finished.finish_reason)
        if reason is None or reason is not told.ended:
            says = "no known reason" if reason is None else f"the reason {reason.value}"
            means = "which does not end it" if told.ended is None else f"which end it as {told.ended.value}"
            raise _cannot_be(f"{says} after {told.number} tokens, {means}")
        if finished.preemptions < 0:
            raise _cannot_be("a negative number of preemptions")
        done = finished.verification
        if min(done.pages_received, done.bytes_received, done.read_checks, done.write_checks) < 0:
            raise _cannot_be("a negative number of pages or checks")
        self.figures(finished)

    def figures(self, told: worker.DecodeFinished | worker.DecodeStarted) -> None:
        """What a handoff cost."""
        if not 0 <= told.cached_tokens <= self.asked.prompt_tokens:
            raise _cannot_be(f"{told.cached_tokens} cached tokens of a prompt of {self.asked.prompt_tokens}")
        try:
            for name in ("queue_ms", "prefill_ms", "transfer_ms"):
                duration_from_proto(getattr(told, name), name)
        except InvalidInput as error:
            raise _cannot_be(error.message) from error

    def _none_ends(self, count: int, tokens: Sequence[Sampled]) -> None:
        asked = self.asked
        if self._ends.isdisjoint([token.token_id for token in tokens]):
            return
        for at, token in enumerate(tokens, count + 1):
            ended = finish_reason(token.token_id, at, asked.sampling, asked.eos_token_ids)
            if ended is not None:
                raise _cannot_be(f"a token after the one that ended the answer ({ended})")

    def _logprobs(self, token: Sampled) -> None:
        asked = self.asked
        values = (token.logprob, *(entry.logprob for entry in token.top))
        if not all(value is not None and value < MAX_LOGPROB for value in values):
            raise _cannot_be("a log-probability that is missing or is none")
        if len(token.top) != min(asked.sampling.logprobs, asked.vocab_size):
            raise _cannot_be(f"{len(token.top)} alternatives of {asked.sampling.logprobs}")
        if not all(0 <= entry.token_id < asked.vocab_size for entry in token.top):
            raise _cannot_be("an alternative outside the vocabulary")


def _cannot_be(what: str) -> Unavailable:
    return Unavailable("stream_protocol", f"the decode worker told of an answer what cannot be: {what}")
