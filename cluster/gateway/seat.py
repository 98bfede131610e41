"""Which prefill worker computes an answer: the one of its route, and after a preemption whoever may serve then.

The load of its prompt is this gateway's claim on that worker until the next token comes.
"""

from __future__ import annotations

from cluster.gateway.running import RequestFacts
from cluster.gateway.state import GatewayState
from cluster.router import another_prefill
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError, Unavailable


class PrefillSeat:
    """Of one answer. `waiting`: its next token has not come yet."""

    def __init__(
        self, state: GatewayState, facts: RequestFacts, index: int, decode: str, prefill: str, prompt_tokens: int
    ) -> None:
        """`decode`, `prefill`: the route's worker ids. Takes the load at once."""
        self.worker = prefill
        self.waiting = True
        self._state = state
        self._facts = facts
        self._index = index
        self._decode = decode
        self._prompt_tokens = prompt_tokens
        self._first = True
        self._claim = state.ledger.claim(prefill, prompt_tokens)

    def computed(self) -> None:
        """A token has come."""
        self.waiting = False
        self._claim.release()
        if self._first:
            self._first = False
            self._state.metrics.first_token(self._state.sources.now_ms() - self._facts.received_ms)

    def release(self) -> None:
        """The answer has ended."""
        self._claim.release()

    def another(self, attempt: int) -> worker_pb2.PrefillAssigned:
        """The answer was preempted: who computes it again. Raises Unavailable where nobody may."""
        state, before = self._state, self.worker
        self._claim.release()
        told = pb.Recompute(
            after_ms=int(max(0.0, state.sources.now_ms() - self._facts.received_ms)),
            index=self._index,
            from_worker=before,
        )
        try:
            chosen = another_prefill(state.fleet.view(state.ledger.loads), self._decode, before)
        except GenlockError as error:
            told.reason = error.reason
            state.metrics.recomputed("none")
            self._facts.recomputed(told)
            if isinstance(error, Unavailable):
                state.look_again()
            raise
        told.to_worker = self.worker = chosen.worker_id
        state.metrics.recomputed("kept" if chosen.worker_id == before else "moved")
        self._facts.recomputed(told)
        self._claim = state.ledger.claim(chosen.worker_id, self._prompt_tokens)
        self.waiting = True
        return worker_pb2.PrefillAssigned(
            attempt=attempt, prefill_endpoint=chosen.endpoint, prefill_worker=chosen.worker_id
        )
