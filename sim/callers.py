"""Callers: what they ask and under which label, how often, and what they abort; and what a label must never do.

A label is judged by the simulator's own list of what was asked, never by the roll that a gateway keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cluster.gateway.roll import Entry
from cluster.router import Route, WorkerView, may_go_elsewhere
from kvstore.errors import GenlockError, InvalidInput, Unavailable
from model.ticket import Ticket
from sim.compute import Oracle
from sim.decode_side import DecodeWorker
from sim.load import TENANTS, Wish
from sim.prefill_side import PrefillWorker

if TYPE_CHECKING:
    from sim.gateway_side import Gateway
    from sim.world import World

SUBMIT_MS = 1
ABORTED_MS = 2  # so soon a request that was told to stop has ended
NEAR_MS = 6  # an abort that races an end comes within this time of the last tokens
ABORT_MS = (3, 30, 120)  # an abort comes within one of these times
RETRY_MS = (0, 0, 5, 40)


@dataclass(frozen=True)
class Places:
    """A route: workers, where the gateway meant to find them, and which lives they had then."""

    decode: DecodeWorker
    decode_endpoint: str
    prefill: PrefillWorker
    prefill_endpoint: str
    lives: tuple[tuple[str, int], tuple[str, int]]


class Asked(Entry):
    """One request of a caller at one life of a gateway, with all its answers. The gateway's roll has it while it runs.

    `over`: its caller knows its end. `named`: an Abort named it while it ran.
    """

    def __init__(self, callers: Callers, gateway: Gateway, key: tuple[str, str]) -> None:
        super().__init__(key, lambda: callers.stopping(self))
        self.gateway = gateway
        self.gateway_life = gateway.life
        self.answers: list[Request] = []
        self.entered = self.over = self.named = False

    def runs_at(self, gateway: Gateway) -> bool:
        there = self.gateway is gateway and self.gateway_life == gateway.life
        return there and self.entered and not self.over

    def __str__(self) -> str:
        return f"request {self.answers[0].number} of {self.key} at {self.gateway.name}"


@dataclass
class Request:
    """One answer of a request, as its caller sees it. `given_up`: the gateway ended it, and hears no more of it."""

    number: int
    ticket: Ticket
    deadline_ms: int
    oracle: Oracle
    asked: Asked
    due_ms: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    given_up: bool = False
    error: GenlockError | None = None
    route: Places | None = None
    at_decode: tuple[DecodeWorker, int, int] | None = None
    awaits: bool = True  # the next token comes from a prefill worker
    moves: int = 0  # how often a worker that drains turned it away and another pair took it
    last_resort: bool = False  # of preemption: a worker that drains, since no other was there

    @property
    def gateway(self) -> Gateway:
        return self.asked.gateway

    @property
    def gateway_life(self) -> int:
        return self.asked.gateway_life

    @property
    def most_tokens(self) -> int:
        return self.ticket.prompt_tokens + self.ticket.sampling.max_tokens

    @cached_property
    def whole(self) -> int:
        """How many tokens the answer has when nothing cuts it short."""
        return self.oracle.length(self.ticket.sampling)


class Callers:
    """All of them. `left`: what is still to be asked."""

    def __init__(self, world: World, wishes: list[Wish]) -> None:
        self._world = world
        self._dice = world.dice
        self.left = len(wishes)
        self.asked: list[Asked] = []
        for wish in wishes:
            world.heap.after(wish.at_ms, "ask", self._ask, wish)

    # --- asking -----------------------------------------------------------------------------------------------------

    def _ask(self, wish: Wish) -> None:
        dice = self._dice
        self.left -= 1
        deadline_ms = wish.deadline_ms
        if dice.hit("short_deadline"):
            deadline_ms = dice.stream("short_deadline/by").randrange(5, 80)
        if dice.hit("label_shared"):
            wish = replace(wish, label=wish.shared_label)
        self.send(wish, wish.ticket, wish.answers, deadline_ms, "asked")
        if dice.hit("client_repeat"):  # the same request again, mostly while the first is on its way
            self.left += 1
            where = dice.stream("client_repeat/where").randrange(len(self._world.gateways))
            again = replace(wish, gateway=where, ticket=self._again(wish.ticket), answers=1)
            delay_ms = dice.stream("client_repeat/when").choice(RETRY_MS)
            self._world.heap.after(delay_ms, "ask", self._retry, again, deadline_ms)

    def _retry(self, wish: Wish, deadline_ms: int) -> None:
        self.left -= 1
        self.send(wish, wish.ticket, 1, deadline_ms, "retried")

    def _again(self, ticket: Ticket) -> Ticket:
        """Every attempt has an id of its own."""
        return replace(ticket, ticket_id=self._dice.stream("ids").randbytes(16))

    def send(self, wish: Wish, ticket: Ticket, answers: int, deadline_ms: int, how: str) -> None:
        world, gateway = self._world, self._world.gateways[wish.gateway]
        asked = Asked(self, gateway, (ticket.tenant, wish.label))
        world.tally.meet("label", self._known(gateway, asked.key), how)
        self.asked.append(asked)
        first = self._request(asked, ticket, deadline_ms)
        for _ in range(answers - 1):
            self._request(asked, self._again(ticket), deadline_ms)
        try:
            if not gateway.alive:
                raise Unavailable("gateway_unreachable", "nobody answers")
            gateway.roll.enter(asked, 0)
            asked.entered = True
            routes = gateway.routes(first.most_tokens, answers)
        except GenlockError as error:
            world.tally.reasons[error.reason] += 1
            world.on_end(first, error)
            return
        for request, route in zip(asked.answers, routes, strict=True):
            gateway.claim(request, route)
            self._open(wish, request, route)
        self._meddle(asked)

    def _request(self, asked: Asked, ticket: Ticket, deadline_ms: int) -> Request:
        world = self._world
        due_ms = world.heap.now_ms + SUBMIT_MS + deadline_ms
        oracle = world.oracle(ticket.token_ids)
        request = Request(len(world.requests), ticket, deadline_ms, oracle, asked, due_ms)
        world.requests.append(request)
        asked.answers.append(request)
        return request

    def _open(self, wish: Wish, request: Request, route: Route) -> None:
        self._submit_later(request, route)
        if self._dice.hit("client_cancel"):
            for _ in range(2 if self._dice.hit("cancel_twice") else 1):
                self._world.heap.after(wish.cancel_after_ms, "leave", self.leave, request)

    def _submit_later(self, request: Request, route: Route) -> None:
        """What is sent to decode is a tick on its way."""
        decode = self._world.worker(route.decode.worker_id)
        assert isinstance(decode, DecodeWorker)
        request.route = self._with_prefill(decode, route.decode.endpoint, decode.life, route.prefill)
        self._world.heap.after(SUBMIT_MS, "submit", self._submit, request, request.route)

    def _with_prefill(self, decode: DecodeWorker, endpoint: str, life: int, chosen: WorkerView) -> Places:
        prefill = self._world.worker(chosen.worker_id)
        assert isinstance(prefill, PrefillWorker)
        lives = (decode.name, life), (prefill.name, prefill.life)
        return Places(decode, endpoint, prefill, chosen.endpoint, lives)

    def places(self, before: Places, chosen: WorkerView) -> Places:
        """The same decode worker, with another prefill worker."""
        return self._with_prefill(before.decode, before.decode_endpoint, before.lives[0][1], chosen)

    def wanted(self, request: Request, attempt: int) -> None:
        """A decode worker's question travels to the gateway that sent the request."""
        arrive = request.gateway.on_wanted
        self._world.heap.after(SUBMIT_MS, "wanted", arrive, request, request.gateway_life, attempt)

    def _submit(self, request: Request, route: Places) -> None:
        if request.ended:  # its gateway died, or it was aborted: what was not sent is not sent
            return
        if route.decode.alive and route.decode.endpoint == route.decode_endpoint:
            route.decode.on_submit(request, route)
        else:
            self._world.on_end(request, Unavailable("decode_unreachable", "no decode worker answers"))

    def moved(self, request: Request, error: GenlockError) -> bool:
        """Whether the gateway sends an answer that was refused to another pair instead of ending it."""
        gateway, asked, world = request.gateway, request.asked, self._world
        heard = asked.runs_at(gateway) and asked.stopped_by is None and not request.given_up
        if not heard or not may_go_elsewhere(error, begun=bool(request.tokens), moves=request.moves):
            return False
        chosen = gateway.elsewhere(request)
        if chosen is None:
            return False
        stage = "on its way" if request.at_decode is None else "in handoff"
        world.tally.meet("request", stage, "turned away")
        request.moves += 1
        request.ticket = self._again(request.ticket)
        request.deadline_ms = max(1, request.due_ms - world.heap.now_ms - SUBMIT_MS)
        request.at_decode = None
        self._submit_later(request, chosen)
        return True

    # --- ends -------------------------------------------------------------------------------------------------------

    def leave(self, request: Request) -> None:
        """The caller goes away."""
        if not request.ended:
            self._cancel(request)

    def _cancel(self, request: Request) -> None:
        if request.at_decode is not None:
            decode, _, number = request.at_decode
            decode.later(0, "cancel", decode.on_cancel, number)

    def answered(self, request: Request, error: GenlockError | None) -> None:
        """An answer has ended. The first failure ends the whole request; its other answers are given up."""
        asked = request.asked
        if asked.over or (error is None and not all(answer.ended for answer in asked.answers)):
            return
        if error is not None and error.reason == "aborted_by_caller":
            self._world.laws.require(asked.named, "aborted_unnamed", str(asked))
        if asked.runs_at(asked.gateway):
            asked.gateway.roll.leave(asked)
        asked.over = True
        for other in asked.answers:
            if error is not None and not other.ended:
                self._give_up(other, error)

    def _give_up(self, request: Request, error: GenlockError) -> None:
        """The gateway ends it and tells decode; nobody hears what decode still says of it."""
        request.given_up, request.due_ms = True, self._world.heap.now_ms
        self._world.on_end(request, error)
        self._cancel(request)

    # --- aborts -----------------------------------------------------------------------------------------------------

    def _meddle(self, asked: Asked) -> None:
        """Who aborts what, now that this was asked."""
        dice, gateway, (tenant, label) = self._dice, asked.gateway, asked.key
        if dice.hit("client_abort"):
            rng, gateways = dice.stream("client_abort/where"), self._world.gateways
            self._abort_later(ABORT_MS, rng.choice(gateways) if rng.random() < 0.2 else gateway, asked.key)
        if dice.hit("abort_by_other"):
            other = next(name for name in TENANTS if name != tenant)
            self._abort_later(ABORT_MS, gateway, (other, label))
        if dice.hit("abort_unknown"):
            nobodys = dice.stream("abort_unknown/which").choice(("", "nobody's"))
            self._abort_later(ABORT_MS, gateway, (tenant, nobodys))

    def nearly_done(self, asked: Asked) -> None:
        """One of the last tokens of an answer has left: an abort may race the end."""
        if self._dice.hit("abort_near_end"):
            self._abort_later((NEAR_MS,), asked.gateway, asked.key)

    def _abort_later(self, within_ms: tuple[int, ...], gateway: Gateway, key: tuple[str, str]) -> None:
        rng = self._dice.stream("aborts")
        wait_ms = rng.randrange(rng.choice(within_ms))
        for _ in range(2 if self._dice.hit("abort_twice") else 1):
            self._world.heap.after(wait_ms, "abort", self.abort, gateway, *key)
            wait_ms += rng.randrange(3)

    def abort(self, gateway: Gateway, tenant: str, label: str) -> None:
        """An Abort arrives at a gateway, which asks production's roll whom it names."""
        if not gateway.alive:
            return
        self._world.tally.meet("label", self._known(gateway, (tenant, label)), "aborted")
        named = [one for one in self.asked if label and one.key == (tenant, label) and one.runs_at(gateway)]
        fresh = sum(not one.named for one in named)
        for one in named:
            self._note_stage(one)
            one.named = True
        try:
            told = gateway.roll.abort(tenant, label)
        except InvalidInput:
            told = 0
        gateway.later(ABORTED_MS, "aborted", self._judge, named, fresh, told)

    def stopping(self, asked: Asked) -> None:
        """It was told to stop: its task ends in one of the loop's next turns."""
        wait_ms = self._dice.stream("aborts/end").randrange(ABORTED_MS)
        asked.gateway.later(wait_ms, "stopped", self._stopped, asked)

    def _stopped(self, asked: Asked) -> None:
        running = next((answer for answer in asked.answers if not answer.ended), None)
        if asked.over or running is None:
            self._world.tally.meet("request", "stopping", "ended before")
            return
        assert asked.stopped_by is not None, "it was stopped by an error"
        self._give_up(running, asked.stopped_by)

    def _judge(self, named: list[Asked], fresh: int, told: int) -> None:
        laws = self._world.laws
        for asked in named:
            ended = asked.over and all(answer.ended for answer in asked.answers)
            laws.require(ended, "abort_missed", str(asked))
        laws.require(told == fresh, "abort_miscounted", f"{told} stopped, {fresh} ran: {[str(one) for one in named]}")

    # --- coverage ---------------------------------------------------------------------------------------------------

    def _known(self, gateway: Gateway, key: tuple[str, str]) -> str:
        """What a label means at a gateway now, by what was asked."""
        if not key[1]:
            return "empty"
        same = [one for one in self.asked if one.key == key]
        if any(one.runs_at(gateway) for one in same):
            return "live"
        if not all(one.over for one in same):
            return "elsewhere"
        if same:
            return "ended"
        others = any(one.key[1] == key[1] and not one.over for one in self.asked)
        return "another's" if others else "unknown"

    def _note_stage(self, asked: Asked) -> None:
        tally = self._world.tally
        if len(asked.answers) > 1:
            tally.meet("request", "of several answers", "aborted")
        for answer in asked.answers:
            stage = "on its way"
            if answer.at_decode is not None:
                decode, _, number = answer.at_decode
                stage = decode.stages.get(number, "answered")
            tally.meet("request", "stopping" if asked.named else stage, "aborted")
