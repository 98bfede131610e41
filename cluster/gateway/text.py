"""Tokens to text: no half characters, and no piece of a stop string that matches later. Pure.

A stop string may span any number of tokens, so text that could still become one is held back, and so are the tokens
that it came from. The result does not depend on how tokens arrive: the match that ends first wins, among those the
one that begins first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    # The module imports torch, which this pure code does not need.
    from model.base import TextStream


class HasTokenId(Protocol):
    @property
    def token_id(self) -> int: ...


T = TypeVar("T", bound=HasTokenId)


class Piece(NamedTuple, Generic[T]):
    """Text that may leave, with the tokens that it came from. After `matched_stop` nothing follows. One is made for
    every token."""

    text: str
    tokens: tuple[T, ...]
    matched_stop: str = ""

    @property
    def empty(self) -> bool:
        return not self.text and not self.tokens


class ChoiceText(Generic[T]):
    """The text of one answer. Tokens of `hidden_ids` are counted and shown as ids, without their text."""

    def __init__(self, stream: TextStream, stops: Sequence[str], hidden_ids: frozenset[int] = frozenset()) -> None:
        self._stream = stream
        self._hidden_ids = hidden_ids
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        # Text that is complete but may begin a stop string.
        self._held = ""
        # Tokens that have not left, each with the text's length before and after it.
        self._waiting: deque[tuple[T, int, int]] = deque()
        self._received = 0
        self._released = 0
        self._stopped = False
        self.counted_tokens = 0

    def push(self, tokens: Iterable[T]) -> Piece[T]:
        """Takes one tick's tokens. Tokens after the one that completes a stop string are not counted and not shown."""
        if not self._stops:
            return self._push_all(tokens)
        texts: list[str] = []
        out: list[T] = []
        for token in tokens:
            if self._stopped:
                break
            self.counted_tokens += 1
            hidden = token.token_id in self._hidden_ids
            text, stop = self._take("" if hidden else self._stream.push(token.token_id), token)
            texts.append(text)
            out.extend(self._leaving())
            if stop:
                return Piece("".join(texts), tuple(out), stop)
        return Piece("".join(texts), tuple(out))

    def _push_all(self, tokens: Iterable[T]) -> Piece[T]:
        """Without stop strings nothing is held back: tokens leave with the text that they complete."""
        out = tuple(tokens)
        if self._stopped:
            return Piece("", ())
        self.counted_tokens += len(out)
        push, hidden = self._stream.push, self._hidden_ids
        if len(out) == 1:
            token_id = out[0].token_id
            return Piece("" if token_id in hidden else push(token_id), out)
        return Piece("".join([push(token.token_id) for token in out if token.token_id not in hidden]), out)

    def finish(self) -> Piece[T]:
        """The rest after the last token: an incomplete character and text that was held back for nothing."""
        if self._stopped:
            return Piece("", ())
        text, stop = self._take(self._stream.finish(), None)
        if stop:
            return Piece(text, tuple(self._leaving()), stop)
        self._stopped = True
        text += self._held
        self._released += len(self._held)
        self._held = ""
        rest = tuple(token for token, _begin, _end in self._waiting)
        self._waiting.clear()
        return Piece(text, rest)

    def _take(self, new: str, token: T | None) -> tuple[str, str]:
        """Adds text. Returns what may leave and the stop string that matched, if one did."""
        begin, self._received = self._received, self._received + len(new)
        if token is not None:
            self._waiting.append((token, begin, self._received))
        if not self._stops:
            return new, ""
        text = self._held + new
        start, stop = first_match(text, self._stops)
        if stop:
            self._stopped = True
            self._held = ""
            self._released += start
            return text[:start], stop
        keep = held_length(text, self._stops, self._longest)
        cut = len(text) - keep
        self._held = text[cut:]
        self._released += cut
        return text[:cut], ""

    def _leaving(self) -> Iterable[T]:
        """Tokens whose text has left in full. After a match also the one whose beginning has left; the others, whose
        text lies within the stop string, never leave."""
        while self._waiting:
            token, begin, end = self._waiting[0]
            if end > self._released and not (self._stopped and begin < self._released):
                break
            self._waiting.popleft()
            yield token
        if self._stopped:
            self._waiting.clear()


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str]:
    """Where the stop string that ends first begins, and which it is; (-1, "") when none is in `text`."""
    best = (len(text) + 1, -1, "")
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            best = min(best, (start + len(stop), start, stop))
    return best[1], best[2]


def held_length(text: str, stops: Sequence[str], longest: int) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    for start in range(max(0, len(text) - longest + 1), len(text)):
        tail = text[start:]
        if any(stop.startswith(tail) for stop in stops):
            return len(tail)
    return 0
