"""What other gateways know: each is asked with the caller's own credential, all at once, within a limit.

The registry says where they are. Who does not answer is named in the reply; nobody waits longer for that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio

from cluster.gateway.state import GatewayState
from cluster.operators.service import Metadata, forwarded
from cluster.registry.records import GatewayRecord
from genlock.v1 import operator_pb2 as pb
from kvstore.errors import GenlockError
from wire.calls import answer
from wire.errors import surprise

R = TypeVar("R")
MAX_ASKED = 64
TIMEOUT_S = 3.0
MAX_DETAIL_CHARS = 256


@dataclass(frozen=True)
class Heard(Generic[R]):
    answers: tuple[R, ...]
    unreached: tuple[pb.UnreachedGateway, ...]


def to_ask(records: Iterable[GatewayRecord], own_id: str) -> tuple[list[str], list[pb.UnreachedGateway]]:
    """Endpoints of the others, and those that cannot be asked with the reason. Pure."""
    endpoints: list[str] = []
    left: list[pb.UnreachedGateway] = []
    for record in records:
        if record.gateway_id == own_id:
            continue
        if not record.endpoint:
            left.append(unreached(record.gateway_id, "no_endpoint", "it has not told where it can be asked"))
        elif len(endpoints) >= MAX_ASKED:
            left.append(unreached(record.endpoint, "too_many_gateways", f"at most {MAX_ASKED} are asked"))
        else:
            endpoints.append(record.endpoint)
    return endpoints, left


def unreached(gateway: str, reason: str, detail: str) -> pb.UnreachedGateway:
    return pb.UnreachedGateway(gateway=gateway, reason=reason, detail=detail[:MAX_DETAIL_CHARS])


async def ask_peers(
    state: GatewayState,
    call: Callable[[grpc.aio.Channel], Callable[..., Any]],
    request: Any,
    metadata: Metadata,
    unknown: Sequence[str] = (),
) -> Heard[Any]:
    """`call`: which RPC, over a channel. An answer whose reason is among `unknown` is one that says nothing. Never
    raises for what the others or the registry do."""
    try:
        records = await state.find_gateways()
    except Exception as exc:
        error = surprise(exc, "reading the registry's gateways")
        return Heard((), (unreached("registry", error.reason, error.message),))
    endpoints, left = to_ask(records, state.gateway_id)
    passed = forwarded(metadata)

    async def ask(endpoint: str) -> Any:
        try:
            return await answer(call(state.channel(endpoint))(request, timeout=TIMEOUT_S, metadata=passed))
        except GenlockError as error:
            return None if error.reason in unknown else unreached(endpoint, error.reason, error.message)

    told = await asyncio.gather(*(ask(endpoint) for endpoint in endpoints))
    left += [one for one in told if isinstance(one, pb.UnreachedGateway)]
    answers = tuple(one for one in told if one is not None and not isinstance(one, pb.UnreachedGateway))
    return Heard(answers, tuple(left))


def peer_host(host: str, own: str) -> str:
    """Where others reach a gateway that listens at `host`; `own`: api.peer_host. Empty: not known."""
    if own:
        return own
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
    except ValueError:
        return host
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
