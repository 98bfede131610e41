"""What a served model is, to the rooms above.

Shape suffixes: N packed tokens, R rows that want logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kvstore.layout import KvFormat, PageLayout
from model.attention.base import KvStep


@dataclass(frozen=True)
class ModelInfo:
    """Identity and limits of a loaded model."""

    name: str
    revision: str  # digest of the weights; part of prefix keys and layouts
    tokenizer_digest: str
    vocab_size: int
    context_tokens: int
    eos_token_ids: tuple[int, ...]


class LanguageModel(Protocol):
    info: ModelInfo

    def layout(self, page_tokens: int, kv_format: KvFormat) -> PageLayout:
        """The page layout that this model's KV needs."""
        ...

    def forward(
        self,
        token_ids_N: npt.NDArray[np.int64],
        position_N: npt.NDArray[np.int64],
        logits_at_R: npt.NDArray[np.int64],
        kv: KvStep,
    ) -> Tensor:
        """Runs the packed tokens through all layers; returns fp32 logits [R, V] at the packed indices `logits_at_R`."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back. `digest` identifies vocabulary and rules."""

    @property
    def digest(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text becomes."""
        ...

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        ...

    def encode(self, text: str, *, add_special: bool = False, allow_special: bool = False) -> list[int]:
        """Text to ids. `add_special` adds what the model wants around a prompt (a bos token).

        Control markers such as `<|im_end|>` inside `text` are plain text, unless `allow_special` is set, which is only
        for text that no user wrote. Raises InvalidInput (field `prompt`) for text that cannot be encoded.
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> list[int]:
        """Ids of a rendered chat: the template's own control markers are control tokens, those that stand inside a
        message or a tool are plain text. This is the way from messages to ids; encoding `render_chat`'s text is not.
        Raises as `render_chat` does."""
        ...

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The raw text of one token, for logprobs."""
        ...

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; b"" for an id outside the vocabulary."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The chat as text, for people to read. Raises InvalidInput: bad_chat_template, bad_role or bad_messages."""
        ...

    def stream(self) -> TextStream:
        """A fresh incremental detokenizer."""
        ...


class TextStream(Protocol):
    """Incremental detokenizing that never emits half a character."""

    def push(self, token_id: int) -> str:
        """Text that became complete; may be empty."""
        ...

    def finish(self) -> str:
        """The rest (an incomplete character becomes U+FFFD)."""
        ...
