"""Where an answer is computed: the pair of workers of its route, and the load that it is to both.

A worker that drains may turn away a request that was on its way when the drain began. Nothing was spent on it and
nothing was told to the client, so it goes to another pair, under new ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.gateway.fleet import Claim
from cluster.gateway.running import RequestFacts
from cluster.gateway.seat import PrefillSeat
from cluster.gateway.sessions import DecodeCall
from cluster.gateway.state import GatewayState
from cluster.router import Route


@dataclass(frozen=True)
class Placement:
    """One answer's pair, with its load taken."""

    route: Route
    seat: PrefillSeat
    load: Claim

    def release(self) -> None:
        """Gives the load back; no effect a second time."""
        self.load.release()
        self.seat.release()


@dataclass(frozen=True)
class Placed:
    """A placement to which the request was sent."""

    at: Placement
    call: DecodeCall

    @property
    def decode_worker(self) -> str:
        return self.at.route.decode.worker_id


def take(
    state: GatewayState, facts: RequestFacts, index: int, chosen: Route, prompt_tokens: int, most_tokens: int
) -> Placement:
    """Takes the load of answer `index`: its prompt at prefill, prompt and answer at decode."""
    decode, prefill = chosen.decode.worker_id, chosen.prefill.worker_id
    load = state.ledger.claim(decode, most_tokens)
    return Placement(chosen, PrefillSeat(state, facts, index, decode, prefill, prompt_tokens), load)
