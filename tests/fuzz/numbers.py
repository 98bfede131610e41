"""A session under hostile commands: whose tokens come under which number."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError
from tests.fuzz.calls import CALL_TIMEOUT_S, Live, LiveCase, ended, left, short
from tests.fuzz.layer import Finding
from tests.fuzz.mutate import mutated
from wire.convert import ticket_to_proto
from wire.errors import from_status

ENDS = ("finished", "failed")
# Raises Finding where these are not the tokens of a ticket's answer, or their beginning.
RequireRight = Callable[[worker_pb2.Ticket, Sequence[int], bool], None]


@dataclass
class Numbers:
    """What came under each number of one session, judged: a number is one request's for good, every submitted request
    ends, and at most once."""

    require_right: RequireRight
    submitted: dict[int, list[worker_pb2.DecodeRequest]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)

    def sent(self, command: worker_pb2.DecodeCommand) -> None:
        if command.HasField("submit"):
            self.submitted.setdefault(command.call_no, []).append(command.submit)

    def take(self, events: worker_pb2.DecodeEvents) -> None:
        for number, token in zip(events.call_nos, events.token_ids, strict=True):
            self._token(number, token)
        for event in events.events:
            for token in event.tokens.tokens:
                self._token(event.call_no, token.token_id)
            if event.WhichOneof("event") in ENDS:
                self._end(event)

    def _token(self, number: int, token: int) -> None:
        if self.ends.get(number):
            raise Finding(f"a token after the end of its number, which has ended {self.ends[number]}")
        self.tokens.setdefault(number, []).append(token)

    def _end(self, event: worker_pb2.DecodeEvent) -> None:
        number = event.call_no
        before = self.ends.setdefault(number, [])
        error: GenlockError | None = None
        if event.HasField("failed"):
            error = from_status(event.failed)
        reason = "finished" if event.HasField("finished") else error.reason if error is not None else "?"
        if before and reason != "call_no_taken":
            raise Finding(f"a number that had ended {before} was another request's: it ended {reason}")
        before.append(reason)

    def close(self) -> None:
        """The session has ended by itself. Of a number that was submitted more than once only the first may have been
        served."""
        for number, requests in self.submitted.items():
            ends = self.ends.get(number, [])
            if not 1 <= len(ends) <= len(requests):
                raise Finding(f"a request that was submitted {len(requests)} times ended {len(ends)} times")
            tokens, whole = self.tokens.get(number, []), ends[0] == "finished"
            if tokens or whole:  # what was refused may be no ticket at all
                self.require_right(requests[0].ticket, tokens, whole)
        for number in self.tokens.keys() - self.submitted.keys():
            raise Finding(f"tokens of nobody: {self.tokens[number][:8]}")


async def session_commands(live: Live, rng: random.Random) -> str:
    """A session of its own: requests, some with a number that is taken or was used, cancels of anybody, commands of no
    kind. The session ends when the commands do."""
    call = live.decode.Session(None, timeout=CALL_TIMEOUT_S)
    numbers = [rng.getrandbits(64) for _ in range(2)]
    judge = Numbers(lambda ticket, tokens, whole: live.require_right(ticket, tokens, whole=whole))

    def command() -> worker_pb2.DecodeCommand:
        kind = rng.randrange(7)
        number = rng.choice((*numbers, *numbers, rng.getrandbits(64)))
        if kind == 0:
            return worker_pb2.DecodeCommand(call_no=number, cancel=worker_pb2.DecodeCancel())
        if kind == 1:
            return worker_pb2.DecodeCommand(call_no=number)
        if kind == 6:  # an answer that nobody waits for, or nonsense
            assigned = worker_pb2.PrefillAssigned(attempt=rng.choice((-1, 0, 1, 1 << 30)))
            if rng.random() < 0.5:
                assigned.prefill_endpoint, assigned.prefill_worker = live.lab.prefill.endpoint, "prefill-0"
            elif rng.random() < 0.5:
                assigned.refused.code = rng.randrange(-1, 20)
            return worker_pb2.DecodeCommand(call_no=number, assign=assigned)
        ticket = ticket_to_proto(live.ticket(rng))
        good = worker_pb2.DecodeRequest(
            ticket=ticket, prefill_endpoint=live.lab.prefill.endpoint, prefill_worker="prefill-0"
        )
        sent = worker_pb2.DecodeCommand(call_no=number, submit=good)
        sent = sent if kind > 2 else mutated(rng, sent) or sent
        short(sent.submit.ticket.sampling) if sent.HasField("submit") else None
        return sent

    async def write() -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            for _ in range(rng.randrange(8)):
                sent = command()
                judge.sent(sent)
                await call.write(sent)
                await asyncio.sleep(rng.choice((0, 0, 0.002, 0.01, 0.05)))
            await call.done_writing()

    writer = asyncio.create_task(write())
    try:
        if rng.random() < 0.2:
            return await left(call, rng)
        error = await ended(call, judge.take)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        call.cancel()
    if error is not None:
        raise Finding(f"the session ended with {error.reason}")
    judge.close()
    return "ok" if all(len(ends) == 1 for ends in judge.ends.values()) else "a number again"


LIVE: dict[str, tuple[int, LiveCase]] = {"commands of a session": (300, session_commands)}
