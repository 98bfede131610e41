"""What the gateway serves, and what it is made with. Everything from outside (clock, randomness) is an argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # The module imports torch; the gateway computes nothing.
    from model.base import ModelInfo, TextStream


class GatewayTokenizer(Protocol):
    """The part of a model's tokenizer that the gateway uses."""

    @property
    def digest(self) -> str: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], *, tools: Sequence[Mapping[str, object]] = ()
    ) -> list[int]:
        """Ids of the rendered chat template. What users wrote never becomes a control token."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        ...

    def bytes_of(self, token_id: int) -> bytes:
        """What one token adds to the text."""
        ...

    def token_text(self, token_id: int) -> str: ...

    def stream(self) -> TextStream: ...


@dataclass(frozen=True)
class ServedModel:
    info: ModelInfo
    tokenizer: GatewayTokenizer


@dataclass(frozen=True)
class StreamChecks:
    """Checks on what decode streams; all on. Tests switch one off to prove that it is what catches a fault."""

    # A stream that ends without `finished` has failed.
    require_finished: bool = True
    # `finished` counts as many tokens as have come.
    require_all_tokens: bool = True
    # Tokens, ends and figures are what they can be: see ends.py.
    judge_answers: bool = True


@dataclass(frozen=True)
class Sources:
    """Time and randomness."""

    # Monotonic milliseconds.
    now_ms: Callable[[], float]
    # Unpredictable bytes: ids of tickets and seeds.
    random_bytes: Callable[[int], bytes]
