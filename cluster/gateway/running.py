"""Requests that run in this gateway, and the last that ended: facts for operators, never a prompt or an answer."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.gateway.roll import Entry
from cluster.operators.explain import explain
from genlock.v1 import inference_pb2
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import GenlockError, NotFound

MAX_ENDED = 512
MAX_LABEL_CHARS = 128
MAX_RECOMPUTES = 32
# Fields are named by this program alone; what looks like anything else is not shown.
FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")


@dataclass
class RequestFacts:
    """What becomes known of a request while it runs. Times on the gateway's clock."""

    server_id: str = ""
    received_ms: float = 0.0
    deadline_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    decode_worker: str = ""
    prefill_worker: str = ""
    phase: str = "queued"
    verification: inference_pb2.Verification | None = None
    preemptions: int = 0
    recomputes: list[pb.Recompute] = field(default_factory=list)

    def routed(self, decode_worker: str, prefill_worker: str, prompt_tokens: int) -> None:
        self.decode_worker, self.prefill_worker = decode_worker, prefill_worker
        self.prompt_tokens = prompt_tokens
        self.phase = "prefill"

    def recomputed(self, told: pb.Recompute) -> None:
        """An answer was preempted. `prefill_worker` is the first answer's, as at the start."""
        self.preemptions += 1
        if len(self.recomputes) < MAX_RECOMPUTES:
            self.recomputes.append(told)
        if told.index == 0 and told.to_worker:
            self.prefill_worker = told.to_worker

    def progressed(self, message: inference_pb2.GenerateResponse) -> bool:
        """A message of one of its answers; whether it is that answer's last."""
        self.phase = "decode"
        self.completion_tokens += len(message.token_ids)
        last = message.HasField("finished")
        if last:
            self.verification = message.finished.verification
        return last


class Running(Entry):
    """One running request and the task that runs it. `stop` cancels the task."""

    def __init__(self, key: tuple[str, str], task: asyncio.Task[None], facts: RequestFacts | None = None) -> None:
        """`key`: tenant and the client's label."""
        super().__init__(key, task.cancel)
        self.task = task
        self.facts = facts or RequestFacts()


class EndedRequests:
    """The last requests that ended, by the server's id."""

    def __init__(self, limit: int = MAX_ENDED) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, pb.DescribeRequestResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, running: Running, error: GenlockError | None, now_ms: float) -> None:
        described = pb.DescribeRequestResponse(
            request=running_message(running, now_ms),
            outcome="ok" if error is None else error.reason,
            message="" if error is None else told_of(error),
            recomputes=running.facts.recomputes,
        )
        if running.facts.verification is not None:
            described.verification.CopyFrom(running.facts.verification)
        self._kept[running.facts.server_id] = described
        while len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def get(self, request_id: str) -> pb.DescribeRequestResponse | None:
        """By the server's id, or by the client's label: the last one of that label."""
        found = self._kept.get(request_id)
        if found is not None or not request_id:
            return found
        return next((one for one in reversed(self._kept.values()) if one.request.request_id == request_id), None)


def meant_by(running: Iterable[Running], request_id: str) -> list[Running]:
    """The running request with this server's id; else all with this label, whoever's. A client may choose another
    request's id as its label: the id goes first."""
    known = list(running) if request_id else []
    return [one for one in known if one.facts.server_id == request_id] or [
        one for one in known if one.key[1] == request_id
    ]


def told_of(error: GenlockError) -> str:
    """What an operator is told of a request's error: the field, and what its reason means. Never its message, which
    may quote what the caller wrote: a role, a name of a model, a part of a schema."""
    try:
        meaning = explain(error.reason).meaning
    except NotFound:
        meaning = ""
    return ": ".join(part for part in (error.field if FIELD.fullmatch(error.field) else "", meaning) if part)


def running_message(running: Running, now_ms: float, gateway: str = "") -> pb.RunningRequest:
    facts = running.facts
    tenant, label = running.key
    return pb.RunningRequest(
        server_id=facts.server_id,
        request_id=label[:MAX_LABEL_CHARS],
        tenant=tenant,
        age_ms=int(max(0.0, now_ms - facts.received_ms)),
        deadline_left_ms=int(max(0.0, facts.deadline_ms - now_ms)),
        prompt_tokens=facts.prompt_tokens,
        completion_tokens=facts.completion_tokens,
        decode_worker=facts.decode_worker,
        prefill_worker=facts.prefill_worker,
        phase=facts.phase,
        preemptions=facts.preemptions,
        gateway=gateway,
    )
