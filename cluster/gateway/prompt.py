"""Prompts to token ids, once for each request. Long texts are tokenized on a thread, so that streams go on."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from cluster.gateway.admission import Prompt, Turn
from cluster.gateway.served import GatewayTokenizer
from kvstore.errors import InvalidInput, NoCapacity

# Tokenizing this much takes well under a millisecond; a thread switch costs as much.
INLINE_CHARS = 2048


class PromptEncoder:
    """One tokenizer with a small pool of threads and at most `max_waiting` texts that wait for them."""

    def __init__(self, tokenizer: GatewayTokenizer, *, threads: int = 2, max_waiting: int = 64) -> None:
        self._tokenizer = tokenizer
        self._waiting = 0
        self._max_waiting = max_waiting
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")

    async def encode(self, prompt: Prompt) -> list[int]:
        """Raises InvalidInput for a chat template that cannot render the messages and for text that is not Unicode,
        NoCapacity when too many long texts wait."""
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if _chars(prompt) <= INLINE_CHARS:
            return self._encode(prompt)
        if self._waiting >= self._max_waiting:
            raise NoCapacity("tokenizer_busy", f"{self._waiting} long texts wait to be tokenized")
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._encode, prompt)
        # Counted until the thread is through with it: a caller that left does not stop a thread.
        self._waiting += 1
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _done(self, future: asyncio.Future[list[int]]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            # Looked at here too: the caller may have left, and an error that nobody sees is logged as lost.
            future.exception()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

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
    texts = (text for turn in prompt.turns or () for text in (turn.content, *turn.tool_calls))
    return sum(map(len, texts)) + sum(map(len, prompt.tools))
