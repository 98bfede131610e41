"""Turns logits into tokens, checks sampling parameters, and finds stop strings in a stream of text.

Shape suffixes: R rows of a step, V vocabulary.

What is drawn for a row depends on that row's logits, its parameters, its history and its position, never on the other
rows: a request gives the same answer in any batch and on any worker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore.errors import GenlockError, InvalidInput
from model.grammar import AnswerMatcher
from model.sampling import MAX_SCHEMA_BYTES, SamplingParams

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 100.0
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_TOP_K = (1 << 31) - 1
MAX_SEED = (1 << 64) - 1  # the API takes any unsigned 64-bit number

NO_TOKEN = -1
_MIN_TEMPERATURE = 1e-6  # below it, as at it: the best token alone
_FIRST_CANDIDATES = 1024  # a nucleus is nearly always within these; a full sort of the vocabulary takes milliseconds


@dataclass(frozen=True)
class SampleRow:
    """One row of a step. `position` is the place of the token to be drawn, counted from the prompt's first token.

    `history` is prompt and generated ids (read only with a repetition penalty or a matcher); `generated` counts the
    latter. `matcher` says which tokens keep the answer to `params.json_schema`; None where that is empty.
    """

    params: SamplingParams
    position: int
    generated: int
    eos_token_ids: tuple[int, ...] = ()
    history: Sequence[int] | npt.NDArray[np.int64] = ()
    matcher: AnswerMatcher | None = None


@dataclass(frozen=True)
class SampledToken:
    """`token_id` is NO_TOKEN when there is none to be had: that request must end, its neighbours go on. `error` says
    why; None: the row's logits are not numbers.

    `logprob` and `top` (best first) are natural logarithms under the model's own distribution, before penalty, mask and
    temperature; None and empty unless `params.logprobs` asks for them.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: GenlockError | None = None


@torch.inference_mode()
def sample(logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Draws one token for each row of fp32 logits [R, V]; `len(rows)` is R. Ties go to the lowest id.

    Plain greedy rows share one pass over the batch. The others apply, in this order: repetition penalty, the mask of
    ends while `min_tokens` is not reached, the matcher's mask, temperature, top_k, top_p, min_p.
    """
    if logits_RV.shape[0] != len(rows):
        raise ValueError(f"{logits_RV.shape[0]} rows of logits for {len(rows)} requests")
    if not rows:
        return []
    best_R, id_R = logits_RV.max(dim=-1)  # a NaN anywhere in a row is its maximum
    best, ids = best_R.tolist(), id_R.tolist()
    out: list[SampledToken] = []
    for index, row in enumerate(rows):
        if not math.isfinite(best[index]):
            out.append(SampledToken(NO_TOKEN))
            continue
        try:
            token_id = ids[index] if _is_plain_greedy(row) else _draw(logits_RV[index].numpy(), row)
        except GenlockError as error:
            out.append(SampledToken(NO_TOKEN, error=error))
            continue
        wants_logprobs = row.params.logprobs >= 0 and token_id != NO_TOKEN
        out.append(
            _with_logprobs(logits_RV[index].numpy(), token_id, row) if wants_logprobs else SampledToken(token_id)
        )
    return out


def _is_plain_greedy(row: SampleRow) -> bool:
    params = row.params
    return (
        params.temperature == 0
        and params.repetition_penalty == 1
        and row.generated >= params.min_tokens
        and row.matcher is None
    )


def _draw(logits_V: npt.NDArray[np.float32], row: SampleRow) -> int:
    """One row that is not plainly greedy. Sums are in fp64. numpy, since its small operations cost least. Raises what
    the row's matcher raises."""
    params = row.params
    scores_V = logits_V.copy()
    if params.repetition_penalty != 1 and len(row.history):
        _penalize(scores_V, row)
    if row.generated < params.min_tokens:
        scores_V[list({*row.eos_token_ids, *params.stop_token_ids})] = -np.inf
    if row.matcher is not None:
        scores_V[~row.matcher.allowed(row.history, row.generated)] = -np.inf
    best = int(scores_V.argmax())
    if not math.isfinite(scores_V[best]):
        return NO_TOKEN
    if params.temperature == 0:
        return best
    weights_V = np.exp((scores_V - scores_V[best]) / np.float32(max(params.temperature, _MIN_TEMPERATURE)))
    kept = _filter(weights_V, params)
    cumulative = np.cumsum(weights_V if kept is None else weights_V[kept], dtype=np.float64)
    # The first token whose share ends beyond the target; u < 1, so a token of no weight is never reached, except by
    # rounding at the very end: the last token with weight is where the sum stops growing.
    target = min(uniform(params.seed, row.position) * cumulative[-1], np.nextafter(cumulative[-1], 0))
    index = int(np.searchsorted(cumulative, target, side="right"))
    return index if kept is None else int(kept[index])


def _penalize(scores_V: npt.NDArray[np.float32], row: SampleRow) -> None:
    """Repetition penalty of CTRL (Keskar et al., 2019): seen tokens' positive scores shrink, negative ones grow."""
    seen = np.unique(np.asarray(row.history, np.int64))
    values, penalty = scores_V[seen], np.float32(row.params.repetition_penalty)
    scores_V[seen] = np.where(values > 0, values / penalty, values * penalty)


def _filter(weights_V: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.int64] | None:
    """Ids that top_k, top_p (Holtzman et al., 2020) and min_p leave, best first; None when all stay.

    `weights_V`: relative probabilities, the best is 1. top_p keeps the shortest run of best tokens whose share, among
    those that top_k left, reaches it; min_p keeps tokens at least that fraction as likely as the best.
    """
    limit = min(params.top_k or len(weights_V), len(weights_V))
    if limit == len(weights_V) and params.top_p == 1 and params.min_p == 0:
        return None
    size = limit if limit < len(weights_V) else min(limit, _FIRST_CANDIDATES)
    while True:
        ids = _best(weights_V, size)
        weights = weights_V[ids].astype(np.float64)
        total = float((weights if limit < len(weights_V) else weights_V).sum(dtype=np.float64))
        before = weights.cumsum() - weights
        keep = (before < params.top_p * total) | (params.top_p == 1)
        keep &= weights >= params.min_p
        # Tokens beyond these candidates rank lower: once the last candidate is cut, so are they.
        if size == limit or not keep[-1]:
            return ids[keep]
        size = min(limit, size * 8)


def _best(values_V: npt.NDArray[np.float32], size: int) -> npt.NDArray[np.int64]:
    """The `size` best ids, best first, ties by the lower id."""
    vocab = len(values_V)
    ids = np.arange(vocab)
    if size < vocab:
        floor = np.partition(values_V, vocab - size)[vocab - size]
        above = np.flatnonzero(values_V > floor)
        ids = np.concatenate([above, np.flatnonzero(values_V == floor)[: size - len(above)]])
    return ids[np.argsort(-values_V[ids], kind="stable")]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that follows from (seed, position) alone: a counter-based generator, so
    that no worker carries its state. It is BLAKE2b of both as little-endian 64-bit words."""
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    word = hashlib.blake2b(message, digest_size=8, person=b"genlock-draw").digest()
    return (int.from_bytes(word, "little") >> 11) * 2.0**-53


def _with_logprobs(logits_V: npt.NDArray[np.float32], token_id: int, row: SampleRow) -> SampledToken:
    best = logits_V.max()
    log_total = float(best) + math.log(np.exp(logits_V - best).sum(dtype=np.float64))
    count = min(row.params.logprobs, len(logits_V))
    top = tuple((int(other), float(logits_V[other]) - log_total) for other in _best(logits_V, count)) if count else ()
    return SampledToken(token_id, float(logits_V[token_id]) - log_total, top)


def validate(params: SamplingParams, *, context_tokens: int, prompt_tokens: int, vocab_size: int) -> None:
    """Raises InvalidInput (reason `bad_sampling_params`, field `sampling_params.<name>`) for the first bad value.

    The prompt and `max_tokens` together must fit the context.
    """
    _check_number(params.temperature, "temperature", 0, MAX_TEMPERATURE)
    _check_number(params.top_p, "top_p", 0, 1, above=True)
    _check_number(params.min_p, "min_p", 0, 1)
    _check_number(params.repetition_penalty, "repetition_penalty", 0, MAX_REPETITION_PENALTY, above=True)
    _check_int(params.top_k, "top_k", 0, MAX_TOP_K)
    _check_int(params.seed, "seed", 0, MAX_SEED)
    room = context_tokens - prompt_tokens
    _check_int(params.max_tokens, "max_tokens", 1, room, f" (context {context_tokens}, prompt {prompt_tokens})")
    _check_int(params.min_tokens, "min_tokens", 0, params.max_tokens, " (max_tokens)")
    _check_int(params.logprobs, "logprobs", -1, MAX_LOGPROBS)
    if not isinstance(params.ignore_eos, bool):
        raise _bad("ignore_eos", f"must be true or false, got {params.ignore_eos!r}")
    _check_stops(params.stop)
    if not isinstance(params.stop_token_ids, tuple) or len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _bad("stop_token_ids", f"must be at most {MAX_STOP_TOKEN_IDS} ids")
    for token_id in params.stop_token_ids:
        _check_int(token_id, "stop_token_ids", 0, vocab_size - 1)
    if len(params.json_schema.encode()) > MAX_SCHEMA_BYTES:
        raise _bad("json_schema", f"has more than {MAX_SCHEMA_BYTES} bytes: make it shorter")
    if params.json_schema and (params.ignore_eos or params.min_tokens):
        # An answer that is whole can only end; what forbids the end would leave no token to sample.
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise _bad(name, "must be unset with a json_schema: an answer that is whole ends")


def _check_stops(stops: tuple[str, ...]) -> None:
    if not isinstance(stops, tuple) or len(stops) > MAX_STOPS:
        raise _bad("stop", f"must be at most {MAX_STOPS} texts")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise _bad("stop", f"each must be text of 1 to {MAX_STOP_CHARS} characters")


def _check_number(value: float, name: str, low: float, high: float, *, above: bool = False) -> None:
    """`above`: the value must be greater than `low`, not only equal. NaN fails every comparison."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (low < value <= high if above else low <= value <= high):
        raise _bad(name, f"must be a number in {'(' if above else '['}{low}, {high}], got {value!r}")


def _check_int(value: int, name: str, low: int, high: int, note: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, f"must be a whole number from {low} to {high}{note}, got {value!r}")


def _bad(name: str, rule: str) -> InvalidInput:
    return InvalidInput("bad_sampling_params", f"sampling_params.{name} {rule}", field=f"sampling_params.{name}")


@dataclass
class StopMatcher:
    """Finds stop strings in a stream of text, and holds back what may be the beginning of one.

    The stop string that is complete first ends the text; of those complete at the same character, the longest. So the
    result does not depend on how the stream is cut into pieces. All state is in these fields.
    """

    stops: tuple[str, ...]
    held: str = ""
    matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that may be shown now. After a match (`matched` is set) it is always empty; the stop string
        itself and what follows it are never shown."""
        if self.matched is not None or not text:
            return ""
        if not self.stops:
            return text
        text = self.held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self.held = ""
            return text[:start]
        cut = len(text) - max(_overlap(text, stop) for stop in self.stops)
        self.held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The stream has ended: what was held back is text after all."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
