"""Hostile calls to the doors that serve no tokens: operators' RPCs at a gateway, proofs of peers at decode."""

from __future__ import annotations

import random
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from genlock.v1 import operator_pb2, operator_pb2_grpc, worker_pb2
from kvstore.errors import DeadlineExceeded
from tests.fuzz.calls import CALL_TIMEOUT_S, Live, LiveCase, left
from tests.fuzz.layer import Finding, reason_of
from tests.fuzz.mutate import mutated
from wire.errors import from_rpc

METHODS = tuple(operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods)


async def operators(live: Live, rng: random.Random) -> str:
    """Any RPC with any fields, at a gateway without a fleet behind it."""
    method = rng.choice(METHODS)
    message: Any = GetMessageClass(method.input_type)()
    for _ in range(rng.randrange(3)):
        message = mutated(rng, message) or message
    stub = operator_pb2_grpc.OperatorServiceStub(live.lab.client.channel)
    call = getattr(stub, method.name)(message, timeout=CALL_TIMEOUT_S)
    if method.server_streaming:
        return await left(call, rng)
    return await answered(call)


async def proofs(live: Live, rng: random.Random) -> str:
    """Questions whether decode can pull from some worker: the right one, a stranger, itself, nobody."""
    endpoints = (live.lab.prefill.endpoint, live.second.endpoint, live.lab.decode.endpoint, "127.0.0.1:1", "")
    good = worker_pb2.CheckPeerRequest(
        prefill_endpoint=rng.choice(endpoints), prefill_worker=rng.choice(("prefill-0", "prefill-1", "nobody", ""))
    )
    sent = good if rng.random() < 0.5 else mutated(rng, good)
    return "unparsed" if sent is None else await answered(live.decode.CheckPeer(sent, timeout=CALL_TIMEOUT_S))


async def answered(call: Any) -> str:
    """What a unary call came to. Raises Finding where it hangs or a surprise shows."""
    try:
        await call
    except grpc.RpcError as error:
        typed = from_rpc(error)
        if isinstance(typed, DeadlineExceeded):
            raise Finding(f"hangs: {typed.message}") from error
        return reason_of(typed)
    return "ok"


LIVE: dict[str, tuple[int, LiveCase]] = {"calls of operators": (300, operators), "proofs of peers": (300, proofs)}
