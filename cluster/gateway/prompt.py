"""Prompts to token ids, once for each request. Long texts are tokenized on a thread, so that streams go on."""

from __future__ import annotations

import json

from cluster.gateway.admission import Prompt, Turn
from cluster.gateway.pool import FairPool
from cluster.gateway.served import GatewayTokenizer
from kvstore.errors import InvalidInput

# Tokenizing this much takes well under a millisecond; a thread switch costs as much.
INLINE_CHARS = 2048
# What a message costs beside its text, in characters of text.
TURN_CHARS = 64


class PromptEncoder:
    """One tokenizer; long texts take their turn in `pool`."""

    def __init__(self, tokenizer: GatewayTokenizer, pool: FairPool) -> None:
        self._tokenizer = tokenizer
        self._pool = pool

    async def encode(self, prompt: Prompt, tenant: str) -> list[int]:
        """Raises InvalidInput for a chat template that cannot render the messages and for text that is not Unicode,
        NoCapacity when too many long texts wait."""
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if _chars(prompt) <= INLINE_CHARS:
            return self._encode(prompt)
        return await self._pool.run(tenant, lambda: self._encode(prompt))

    def _encode(self, prompt: Prompt) -> list[int]:
        try:
            if prompt.text is not None:
                return self._tokenizer.encode(prompt.text)
            tools = [json.loads(tool) for tool in prompt.tools]
            return self._tokenizer.encode_chat([_message(turn) for turn in prompt.turns or ()], tools=tools)
        except InvalidInput as error:
            # The tokenizer does not know the request's message; `messages[0].role` there is `chat.messages[0].role`.
            inner = error.field if error.field.startswith(("messages", "tools")) else ""
            field = f"{prompt.field.split('.')[0]}.{inner}" if inner else prompt.field
            raise InvalidInput(error.reason, error.message, field=field) from error


def _message(turn: Turn) -> dict[str, object]:
    """As chat templates know it: names and calls only where there are any."""
    calls = [json.loads(call) for call in turn.tool_calls]
    optional: dict[str, object] = {"name": turn.name, "tool_call_id": turn.tool_call_id, "tool_calls": calls}
    return {"role": turn.role, "content": turn.content, **{key: value for key, value in optional.items() if value}}


def _chars(prompt: Prompt) -> int:
    if prompt.text is not None:
        return len(prompt.text)
    turns = prompt.turns or ()
    texts = (text for turn in turns for text in (turn.content, turn.name, turn.tool_call_id, *turn.tool_calls))
    return sum(map(len, texts)) + sum(map(len, prompt.tools)) + TURN_CHARS * len(turns)
