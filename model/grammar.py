"""Keeps answers to a JSON Schema: which tokens may come next, after those that have come.

What may come next follows from the schema and the answer's tokens alone. So nothing of it is handed over: prefill,
decode and a worker that computes a preempted request again each replay the tokens that there are, and go on alike.

Schemas come from users. The library (llguidance) bounds what a step may cost; what a compilation may cost it does not
bound in every case, so the gateway compiles each schema first in a process that it can end (model/schema_check.py).

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from kvstore.errors import GenlockError, InvalidInput
from model.turns import TenantTurns

if TYPE_CHECKING:
    # The module imports torch, which who only checks a schema does without.
    from model.base import ModelInfo, Tokenizer

FIELD = "sampling_params.json_schema"
KEPT_GRAMMARS = 32
MAX_PROBLEM_CHARS = 200
# Between two parts of an answer. Without a bound a small model may write spaces until the answer is cut.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"
# About 20 ms to compile regular expressions, at most 15 ms and 3 ms for lexer and parser of one step.
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    precompute_large_lexemes=False,  # it would walk the vocabulary when a schema is compiled
    verbose_errors=False,
)


class Vocabulary(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]: ...

    def bytes_of(self, token_id: int) -> bytes: ...


class AnswerMatcher:
    """Where one answer stands in its schema. Called from one thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, on_error: Callable[[], None] = lambda: None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._on_error = on_error
        self._consumed = 0

    def allowed(self, history: Sequence[int] | npt.NDArray[np.int64], generated: int) -> npt.NDArray[np.bool_]:
        """Which tokens may follow the last `generated` ones of `history`, [V]. The state is a cache of these tokens:
        asking again, or later, gives what a new matcher would say.

        Raises InvalidInput (`json_schema_too_complex`) where the schema needs more than a step may cost, GenlockError
        (`answer_off_schema`) where the tokens themselves do not keep to it.
        """
        if generated < self._consumed:
            self._matcher.reset()
            self._consumed = 0
        if generated > self._consumed:
            self._consume([int(token) for token in history[len(history) - (generated - self._consumed) :]])
        mask = self._matcher.compute_bitmask()
        self._check()
        bits_V = np.unpackbits(np.frombuffer(mask, np.uint8), count=self._vocab_size, bitorder="little")
        return bits_V.astype(np.bool_)

    def _consume(self, token_ids: list[int]) -> None:
        taken = self._matcher.try_consume_tokens(token_ids)
        self._check()
        self._consumed += taken
        if taken < len(token_ids):
            raise GenlockError("answer_off_schema", "a token of the answer does not keep to its json_schema")

    def _check(self) -> None:
        if self._matcher.is_error():
            # Copies share a lexer that may have reached its limit: the next request begins with a new one.
            self._on_error()
            raise too_complex(self._matcher.get_error())


class Grammars:
    """Compiled schemas over one vocabulary; the last used ones are kept. Safe from any thread.

    `hidden` are ids that are no text (control tokens): an answer's text never comes from one.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        hidden: Collection[int] = (),
        *,
        kept: int = KEPT_GRAMMARS,
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)
        self._hidden = frozenset((*hidden, *eos_token_ids))
        self._kept = kept
        # By tenant and schema: how soon an answer begins tells no tenant which schemas another one uses.
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        # Beside the step thread. One: compiling drops the interpreter's lock and would take as many cores as it got.
        self.turns = TenantTurns("grammar")

    def start(self, schema: str, generated: Sequence[int] = (), *, tenant: str = "") -> AnswerMatcher:
        """A matcher that has seen `generated`. Raises InvalidInput for a schema that cannot be followed, and what
        `AnswerMatcher.allowed` raises. Only what the same tenant has compiled is used again."""
        key = (tenant, schema)
        with self._lock:
            base = self._compiled.pop(key, None)
        if base is None:
            base = compiled(schema, self._tokenizer)
        with self._lock:
            self._compiled[key] = base
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
        matcher = AnswerMatcher(base.deep_copy(), self._vocab_size, lambda: self._forget(key, base))
        matcher.allowed(generated, len(generated))
        return matcher

    def _forget(self, key: tuple[str, str], base: LLMatcher) -> None:
        with self._lock:
            if self._compiled.get(key) is base:
                del self._compiled[key]

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made when the first schema comes: a tenth of a second for 50 000 tokens."""
        if not self._eos:
            raise InvalidInput(
                "json_schema_unsupported", f"{FIELD}: this model has no token that ends an answer", field=FIELD
            )
        words = _Words(self._vocabulary, self._vocab_size, self._eos[0], self._hidden)
        return LLTokenizer(TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=list(self._eos))


def grammars_of(info: ModelInfo, tokenizer: Tokenizer) -> Grammars:
    """For answers of a model."""
    return Grammars(tokenizer, info.vocab_size, info.eos_token_ids, tokenizer.control_ids)


class _Words:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos: int, hidden: Collection[int]) -> None:
        self.eos_token_id = eos
        self.bos_token_id = None
        self.tokens = [vocabulary.bytes_of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(hidden)
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)


def compiled(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises InvalidInput for a schema that is none, has keywords that are not known, or is beyond the limits."""
    try:
        options = {"whitespace_pattern": _WHITESPACE, "lenient": False}
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]  # a TypedDict whose keys are all optional
    except ValueError as error:
        raise bad_schema(str(error)) from None
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise bad_schema(matcher.get_error())
    return matcher


def bad_schema(detail: str) -> InvalidInput:
    return InvalidInput("bad_json_schema", f"{FIELD} cannot be followed: {_short(detail)}", field=FIELD)


def too_complex(detail: str) -> InvalidInput:
    return InvalidInput(
        "json_schema_too_complex",
        f"{FIELD} needs more than an answer may cost; use fewer optional properties, alternatives and patterns "
        f"({_short(detail)})",
        field=FIELD,
    )


def _short(detail: str) -> str:
    """The first line: what follows is for the library's authors."""
    line = detail.strip().split("\n", 1)[0]
    return line if len(line) <= MAX_PROBLEM_CHARS else line[: MAX_PROBLEM_CHARS - 1] + "…"
