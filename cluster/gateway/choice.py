"""One answer: what one decode worker tells of it, checked, detokenized, cut at stop strings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.gateway.ends import Asked, EndJudge, Told
from cluster.gateway.served import GatewayTokenizer, StreamChecks
from cluster.gateway.sessions import DecodeCall, Token
from cluster.gateway.text import ChoiceText, Piece
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2 as worker
from kvstore.errors import Unavailable
from model.sampling import SamplingParams

TextPiece = Piece[Token]


@dataclass(frozen=True)
class ChoiceSpec:
    """What an answer is made of; ids and names for the messages."""

    request_id: str
    server_id: str
    index: int
    stream: bool
    asked: Asked
    decode_worker: str

    @property
    def sampling(self) -> SamplingParams:
        return self.asked.sampling


class Seat(Protocol):
    """The answer's prefill worker, as it is now."""

    @property
    def worker(self) -> str: ...

    @property
    def waiting(self) -> bool:
        """No token has come since the worker was chosen."""
        ...

    def computed(self) -> None: ...


class Choice:
    """Turns decode's events into messages for the client."""

    def __init__(
        self,
        spec: ChoiceSpec,
        call: DecodeCall,
        tokenizer: GatewayTokenizer,
        checks: StreamChecks,
        now_ms: Callable[[], float],
        received_ms: float,
        seat: Seat,
    ) -> None:
        self._spec = spec
        self._call = call
        self._tokenizer = tokenizer
        self._checks = checks
        self._now_ms = now_ms
        self._received_ms = received_ms
        self._seat = seat
        hidden = frozenset(spec.sampling.stop_token_ids)
        self._text: ChoiceText[Token] = ChoiceText(tokenizer.stream(), spec.sampling.stop, hidden)
        self._judge = EndJudge(spec.asked)
        # Of all tokens that came, also those after a stop string.
        self._told = Told()
        self._first_ms = 0.0
        self._last_ms = 0.0
        self._whole: list[TextPiece] = []

    def cancel(self) -> None:
        """Ends the call to decode at once; no effect on one that has ended."""
        self._call.cancel()

    async def messages(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """All messages of this answer; the last one carries `finished`.

        Raises Unavailable `stream_cut` when decode's stream ends early, `tokens_lost` when tokens are missing,
        `stream_protocol` when what decode tells cannot be, and whatever error decode answered.
        """
        finished: worker.DecodeFinished | None = None
        while finished is None:
            try:
                tokens, finished = await self._call.next()
            except Unavailable:
                if self._checks.require_finished:
                    raise
                tokens, finished = (), self._as_if_finished()
            if self._checks.judge_answers:
                self._told = self._judge.tokens(self._told, tokens)
            piece = self._take(tokens)
            if piece.matched_stop:
                if self._checks.judge_answers and self._call.started is not None:
                    self._judge.figures(self._call.started)
                self.cancel()
                yield self._last_message(piece, pb.FINISH_REASON_STOP, None)
                return
            if piece.empty:
                continue
            if self._spec.stream:
                yield self._message(piece)
            else:
                self._whole.append(piece)
        if self._checks.require_all_tokens and finished.completion_tokens != self._text.counted_tokens:
            raise Unavailable(
                "tokens_lost",
                f"the decode worker generated {finished.completion_tokens} tokens, {self._text.counted_tokens} came",
            )
        if self._checks.judge_answers:
            self._judge.end(self._told, finished)
        rest = self._text.finish()
        reason = pb.FINISH_REASON_STOP if rest.matched_stop else finished.finish_reason
        yield self._last_message(rest, reason, finished)

    def _as_if_finished(self) -> worker.DecodeFinished:
        """The end of an answer that was cut, where nobody asks."""
        return worker.DecodeFinished(finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=self._text.counted_tokens)

    def _take(self, tokens: Sequence[Token]) -> TextPiece:
        if tokens:
            self._last_ms = self._now_ms()
            if self._seat.waiting:
                self._seat.computed()
            if not self._first_ms:
                self._first_ms = self._last_ms
        return self._text.push(tokens)

    def _message(self, piece: TextPiece) -> pb.GenerateResponse:
        spec = self._spec
        message = pb.GenerateResponse(
            request_id=spec.request_id,
            server_id=spec.server_id,
            index=spec.index,
            text=piece.text,
            token_ids=[token.token_id for token in piece.tokens],
        )
        if spec.sampling.logprobs >= 0:
            message.logprobs.extend(self._logprob(token) for token in piece.tokens)
        return message

    def _logprob(self, token: Token) -> pb.TokenLogprob:
        text_of = self._tokenizer.token_text
        top = [
            pb.TopLogprob(token_id=best.token_id, text=text_of(best.token_id), logprob=best.logprob)
            for best in token.top[: self._spec.sampling.logprobs]
        ]
        return pb.TokenLogprob(
            token_id=token.token_id, text=text_of(token.token_id), logprob=token.logprob or 0.0, top=top
        )

    def _last_message(
        self, piece: TextPiece, reason: pb.FinishReason.ValueType, done: worker.DecodeFinished | None
    ) -> pb.GenerateResponse:
        """The last message; `done` is None when a stop string ended the answer before decode did."""
        pieces = [*self._whole, piece]
        message = self._message(
            Piece("".join(part.text for part in pieces), tuple(token for part in pieces for token in part.tokens))
        )
        count = self._text.counted_tokens
        finished = message.finished
        finished.finish_reason = reason
        finished.matched_stop = piece.matched_stop
        finished.decode_worker = self._spec.decode_worker
        finished.prefill_worker = self._seat.worker
        finished.usage.prompt_tokens = self._spec.asked.prompt_tokens
        finished.usage.completion_tokens = count
        times = finished.timings
        times.total_ms = self._now_ms() - self._received_ms
        if count:
            times.first_token_ms = self._first_ms - self._received_ms
        if count > 1:
            times.per_token_ms = (self._last_ms - self._first_ms) / (count - 1)
        if done is not None:
            finished.verification.CopyFrom(done.verification)
        known = done or self._call.started
        if known is not None:
            finished.usage.cached_tokens = known.cached_tokens
            times.queue_ms, times.prefill_ms, times.transfer_ms = known.queue_ms, known.prefill_ms, known.transfer_ms
        return message
