"""Response messages of the gateway as objects of OpenAI's API. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from cluster.openai.requests import Ask, Kind
from cluster.openai.tool_calls import CallText, Piece
from genlock.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    # The module imports torch; the gateway computes nothing.
    from model.base import TextStream

# JSON knows no infinity; OpenAI writes this for what cannot happen.
LEAST_LOGPROB = -9999.0
DONE = b"data: [DONE]\n\n"

_REASONS = MappingProxyType({pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"})


@dataclass(frozen=True)
class Served:
    """What all answers of one model share. `fingerprint` names weights and tokenizer."""

    model: str
    fingerprint: str
    bytes_of: Callable[[int], bytes]
    new_text: Callable[[], TextStream]
    # Whether the model's chat template shows tools.
    shows_tools: bool = True


def encode(value: object) -> bytes:
    """Compact JSON. Raises ValueError for numbers that JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(value: object, name: str = "") -> bytes:
    """One server-sent event. JSON has no line breaks of its own."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


def model_object(name: str, created_s: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created_s, "owned_by": "genlock"}


def usage(ends: Iterable[pb.Finished]) -> dict[str, object]:
    """The prompt is counted once, however many answers it has; of their counts of cached tokens the smallest, because
    later answers find the pages of the first. An answer that a stop string ended does not tell: that is 0."""
    uses = [end.usage for end in ends]
    prompt = max((use.prompt_tokens for use in uses), default=0)
    completion = sum(use.completion_tokens for use in uses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min((use.cached_tokens for use in uses), default=0)},
    }


class Answer:
    """The answers to one request, as whole objects or as chunks."""

    def __init__(self, ask: Ask, served: Served, created_s: int) -> None:
        self._ask = ask
        self._served = served
        self._created_s = created_s
        self.server_id = ""
        self._ends: dict[int, pb.Finished] = {}
        self._whole: dict[int, dict[str, object]] = {}
        self._begun: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}
        self._calls: dict[int, CallText] = {}

    def add(self, message: pb.GenerateResponse) -> None:
        """One answer of a request that does not stream; `whole` puts them together."""
        choice = self._note(message)
        if self._ask.calls:
            piece = CallText().push(message.text)
            calls = [self._call(message.index, piece)] if piece.name else []
            choice["message"] = {"role": "assistant", "content": None, "refusal": None, "tool_calls": calls}
        elif self._ask.kind is Kind.CHAT:
            choice["message"] = {"role": "assistant", "content": message.text, "refusal": None}
        else:
            choice["text"] = message.text
        self._whole[message.index] = choice

    def whole(self) -> dict[str, object]:
        kind = "chat.completion" if self._ask.kind is Kind.CHAT else "text_completion"
        choices = [self._whole[index] for index in sorted(self._whole)]
        return {**self._head(kind), "choices": choices, "usage": usage(self._ends.values())}

    def chunks(self, message: pb.GenerateResponse) -> list[dict[str, object]]:
        """The chunks of one message of a stream; the last of each answer says why it ended."""
        choice = self._note(message)
        reason, choice["finish_reason"] = choice["finish_reason"], None
        something = bool(message.text or message.logprobs)
        if self._ask.kind is Kind.COMPLETION:
            if reason is None:
                return [self._chunk({**choice, "text": message.text})] if something else []
            return [self._chunk({**choice, "text": message.text, "finish_reason": reason})]
        out = []
        silent = {"index": message.index, "logprobs": None, "finish_reason": None}
        if message.index not in self._begun:
            self._begun.add(message.index)
            content = None if self._ask.calls else ""
            out.append(self._chunk({**silent, "delta": {"role": "assistant", "content": content}}))
        if self._ask.calls:
            piece = self._calls.setdefault(message.index, CallText()).push(message.text)
            if piece.name or piece.arguments:
                out.append(self._chunk({**silent, "delta": {"tool_calls": [self._delta(message.index, piece)]}}))
        elif something:
            out.append(self._chunk({**choice, "delta": {"content": message.text}}))
        if reason is not None:
            out.append(self._chunk({**silent, "delta": {}, "finish_reason": reason}))
        return out

    def _call(self, index: int, piece: Piece) -> dict[str, object]:
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": f"call_{self.server_id}_{index}", "type": "function", "function": function}

    def _delta(self, index: int, piece: Piece) -> dict[str, object]:
        """One call is made, so its index is 0. Its id and name come once."""
        if piece.name:
            return {"index": 0, **self._call(index, piece)}
        return {"index": 0, "function": {"arguments": piece.arguments}}

    def last_chunks(self) -> list[dict[str, object]]:
        """What follows when all answers are whole."""
        if not self._ask.include_usage:
            return []
        return [{**self._head(self._chunk_kind), "choices": [], "usage": usage(self._ends.values())}]

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._ask.kind is Kind.CHAT else "text_completion"

    def _chunk(self, choice: Mapping[str, object]) -> dict[str, object]:
        chunk = {**self._head(self._chunk_kind), "choices": [choice]}
        if self._ask.include_usage:
            chunk["usage"] = None
        return chunk

    def _head(self, kind: str) -> dict[str, object]:
        prefix = "chatcmpl" if self._ask.kind is Kind.CHAT else "cmpl"
        return {
            "id": f"{prefix}-{self.server_id}",
            "object": kind,
            "created": self._created_s,
            "model": self._served.model,
            "system_fingerprint": self._served.fingerprint,
        }

    def _note(self, message: pb.GenerateResponse) -> dict[str, object]:
        self.server_id = message.server_id
        reason = None
        if message.HasField("finished"):
            self._ends[message.index] = message.finished
            reason = _REASONS[message.finished.finish_reason]
            if reason == "stop" and self._ask.calls:
                reason = "tool_calls"
        return {"index": message.index, "logprobs": self._logprobs(message), "finish_reason": reason}

    def _logprobs(self, message: pb.GenerateResponse) -> dict[str, object] | None:
        if not self._ask.request.sampling_params.HasField("logprobs"):
            return None
        if self._ask.kind is Kind.CHAT:
            return {"content": [self._chat_entry(token) for token in message.logprobs], "refusal": None}
        offsets = self._offsets.setdefault(message.index, _Offsets(self._served.new_text()))
        top = self._ask.request.sampling_params.logprobs > 0
        return {
            "tokens": [token.text for token in message.logprobs],
            "token_logprobs": [_logprob(token.logprob) for token in message.logprobs],
            "top_logprobs": [_best(token) for token in message.logprobs] if top else None,
            "text_offset": [offsets.next(token.token_id) for token in message.logprobs],
        }

    def _chat_entry(self, token: pb.TokenLogprob) -> dict[str, object]:
        top = [self._token(best.token_id, best.text, best.logprob) for best in token.top]
        return {**self._token(token.token_id, token.text, token.logprob), "top_logprobs": top}

    def _token(self, token_id: int, text: str, logprob: float) -> dict[str, object]:
        return {"token": text, "logprob": _logprob(logprob), "bytes": list(self._served.bytes_of(token_id))}


class _Offsets:
    """Where in an answer's text each token begins."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self._at = 0

    def next(self, token_id: int) -> int:
        at = self._at
        self._at += len(self._text.push(token_id))
        return at


def _best(token: pb.TokenLogprob) -> dict[str, float]:
    return {best.text: _logprob(best.logprob) for best in token.top}


def _logprob(value: float) -> float:
    return max(value, LEAST_LOGPROB)
