"""One answer: what one decode worker tells of it, checked, detokenized, cut at stop strings."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from cluster.gateway.ends import Asked, EndJudge, Told
from cluster.gateway.placement import Placed
from cluster.gateway.served import GatewayTokenizer, StreamChecks
from cluster.gateway.sessions import Token
from cluster.gateway.text import ChoiceText, Piece
from cluster.router import may_go_elsewhere
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

    @property
    def sampling(self) -> SamplingParams:
        return self.asked.sampling


class Choice:
    """Turns decode's events into messages for the client."""

    def __init__(
        self,
        spec: ChoiceSpec,
        placed: Placed,
        tokenizer: GatewayTokenizer,
        checks: StreamChecks,
        now_ms: Callable[[], float],
        received_ms: float,
        elsewhere: Callable[[Placed], Placed | None],
    ) -> None:
        """`elsewhere`: sends the same answer to another pair, after one that turned it away."""
        self._spec = spec
        # What every message of this answer says; copied, which is cheaper than to say it anew for each token.
        self._blank = pb.GenerateResponse(request_id=spec.request_id, server_id=spec.server_id, index=spec.index)
        self._placed = placed
        self._elsewhere = elsewhere
        self._moves = 0
        self._tokenizer = tokenizer
        self._checks = checks
        self._now_ms = now_ms
        self._received_ms = received_ms
        hidden = frozenset(spec.sampling.stop_token_ids)
        self._text: ChoiceText[Token] = ChoiceText(tokenizer.stream(), spec.sampling.stop, hidden)
        self._judge = EndJudge(spec.asked)
        self._wants_logprobs = spec.sampling.logprobs >= 0
        # Of all tokens that came, also those after a stop string.
        self._told = Told()
        self._first_ms = 0.0
        self._last_ms = 0.0
        self._whole: list[TextPiece] = []

    def cancel(self) -> None:
        """Ends the call to decode at once; no effect on one that has ended."""
        self._placed.call.cancel()

    async def messages(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """All messages of this answer; the last one carries `finished`.

        Raises Unavailable `stream_cut` when decode's stream ends early, `tokens_lost` when tokens are missing,
        `stream_protocol` when what decode tells cannot be, and whatever error decode answered.
        """
        finished: worker.DecodeFinished | None = None
        while finished is None:
            try:
                tokens, finished = await self._placed.call.next()
            except Unavailable as refusal:
                if self._moved(refusal):
                    continue
                if self._checks.require_finished:
                    raise
                tokens, finished = (), self._as_if_finished()
            if self._checks.judge_answers:
                self._told = self._judge.tokens(self._told, tokens)
            piece = self._take(tokens)
            if piece.matched_stop:
                if self._checks.judge_answers and self._placed.call.started is not None:
                    self._judge.figures(self._placed.call.started)
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

    def _moved(self, refusal: Unavailable) -> bool:
        """Whether the answer is computed elsewhere now: it was turned away before anything was told of it."""
        begun = self._placed.call.started is not None or self._text.counted_tokens > 0
        if not may_go_elsewhere(refusal, begun=begun, moves=self._moves):
            return False
        placed = self._elsewhere(self._placed)
        if placed is None:
            return False
        self._moves += 1
        self._placed = placed
        return True

    def _take(self, tokens: Sequence[Token]) -> TextPiece:
        if tokens:
            self._last_ms = self._now_ms()
            if self._placed.at.seat.waiting:
                self._placed.at.seat.computed()
            if not self._first_ms:
                self._first_ms = self._last_ms
        return self._text.push(tokens)

    def _message(self, piece: TextPiece) -> pb.GenerateResponse:
        message = pb.GenerateResponse()
        message.CopyFrom(self._blank)
        message.text = piece.text
        token_ids = message.token_ids
        for token in piece.tokens:
            token_ids.append(token.token_id)
        if self._wants_logprobs:
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
        finished.decode_worker = self._placed.decode_worker
        finished.prefill_worker = self._placed.at.seat.worker
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
        known = done or self._placed.call.started
        if known is not None:
            finished.usage.cached_tokens = known.cached_tokens
            times.queue_ms, times.prefill_ms, times.transfer_ms = known.queue_ms, known.prefill_ms, known.transfer_ms
        return message
