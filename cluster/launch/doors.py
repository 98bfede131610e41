"""A gateway and the doors into it, opened and closed together: gRPC, and HTTP where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cluster.gateway.identity import Authenticator
from cluster.gateway.served import ServedModel, Sources, StreamChecks
from cluster.gateway.server import Gateway
from cluster.gateway.state import GatewayState
from cluster.launch.ports import check_free
from cluster.settings import Config
from wire.clocks import now_ms


@dataclass(frozen=True)
class Seams:
    """What tests replace."""

    sources: Sources = field(default_factory=lambda: Sources(now_ms=now_ms, random_bytes=os.urandom))
    authenticator: Authenticator | None = None
    stream_checks: StreamChecks = field(default_factory=StreamChecks)


class Door(Protocol):
    """Another way into a gateway's request path, beside gRPC."""

    async def start(self) -> str:
        """Listens; returns the URL, "" where the configuration has it off. Raises Unavailable."""
        ...

    async def stop(self) -> None:
        """After the gateway has drained."""
        ...


class Doors:
    """Open between `open` and `close`; what `open` has begun when it fails is `close`'s to end."""

    def __init__(self, config: Config, seams: Seams, make_door: Callable[[GatewayState], Door] | None) -> None:
        self._config = config
        self._seams = seams
        self._make_door = make_door
        self._door: Door | None = None
        self.gateway: Gateway | None = None
        # Of the other door; "" where there is none.
        self.url = ""

    def check(self) -> None:
        """Before anything is loaded for them. Raises Unavailable (`port_taken`)."""
        api, metrics = self._config.api, self._config.metrics
        ports = [("api.port", api.host, api.port), ("metrics.port", metrics.host, metrics.port)]
        if self._make_door is not None:
            ports.append(("api.http_port", api.http_host, api.http_port))
        check_free(ports)

    async def open(self, served: ServedModel) -> tuple[Gateway, str]:
        """The gateway and its endpoint. Raises InvalidInput, Unavailable (`port_taken`)."""
        gateway = self.gateway = Gateway(
            self._config,
            served,
            self._seams.sources,
            authenticator=self._seams.authenticator,
            checks=self._seams.stream_checks,
        )
        endpoint = await gateway.start()
        if self._make_door is not None:
            self._door = self._make_door(gateway.state)
            self.url = await self._door.start()
        return gateway, endpoint

    async def close(self, grace_ms: int) -> None:
        """Refuses new requests and lets running ones end within the grace. May be called twice, or without `open`."""
        gateway, self.gateway = self.gateway, None
        door, self._door = self._door, None
        try:
            if gateway is not None:
                await gateway.stop(grace_ms)
        finally:
            if door is not None:
                await door.stop()
