"""A gateway on its own: no workers of its own, those of the registry. Several may run side by side."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from cluster.gateway.served import ServedModel
from cluster.gateway.server import Gateway
from cluster.gateway.state import GatewayState
from cluster.gateway.watch import RegistryWatch
from cluster.launch.doors import Door, Doors, Seams
from cluster.launch.up import no_report
from cluster.operators.service import RemoteBackend, no_controller
from cluster.registry.base import Registry
from cluster.registry.make import is_shared, registry_from
from cluster.settings import Config
from genlock.v1 import operator_pb2_grpc
from kvstore.errors import InvalidInput
from wire.clocks import unix_ms


class Front:
    """gRPC and HTTP in front of workers that the registry names. It keeps nothing that another one needs."""

    def __init__(
        self,
        config: Config,
        load_served: Callable[[Config], Coroutine[Any, Any, ServedModel]],
        *,
        seams: Seams | None = None,
        report: Callable[[str], None] = no_report,
        make_door: Callable[[GatewayState], Door] | None = None,
        registry: Registry | None = None,
    ) -> None:
        """`registry`: in place of the configured one. Raises InvalidInput where no other process sees the registry."""
        if registry is None and not is_shared(config):
            raise InvalidInput(
                "no_shared_registry",
                "a gateway on its own finds its workers in a registry that they share: set registry.url to a Redis "
                "server, as redis://127.0.0.1:6379/0; `genlock up` needs none",
                field="registry.url",
            )
        self.config = config
        self._load_served = load_served
        self._seams = seams or Seams()
        self._report = report
        self._doors = Doors(config, self._seams, make_door)
        self._registry = registry or registry_from(config, self._seams.sources.now_ms)
        self._watch: RegistryWatch | None = None

    @property
    def url(self) -> str:
        """Of the door beside gRPC; "" where there is none."""
        return self._doors.url

    @property
    def gateway(self) -> Gateway:
        """There once `start` has returned."""
        assert self._doors.gateway is not None
        return self._doors.gateway

    async def start(self) -> str:
        """Returns the endpoint at once, also while the registry is away or empty; its health says NOT_SERVING until a
        request can be served. Raises InvalidInput for a model that is not there, Unavailable (`port_taken`)."""
        try:
            return await self._start()
        except BaseException:
            await self.stop(0)
            raise

    async def stop(self, grace_ms: int | None = None) -> None:
        """Refuses new requests and lets running ones end within the grace. Workers stay."""
        grace_ms = self.config.workers.drain_timeout_ms if grace_ms is None else grace_ms
        watch, self._watch = self._watch, None
        try:
            if watch is not None:
                await watch.stop()
        finally:
            await self._doors.close(grace_ms)

    async def _start(self) -> str:
        self._doors.check()
        self._report(f"loading the tokenizer of {self.config.model.name}")
        served = await self._load_served(self.config)
        gateway, endpoint = await self._doors.open(served)
        watch = self._watch = RegistryWatch(gateway.state, self._registry, unix_ms)
        await watch.look()
        watch.start()
        gateway.state.backend = RemoteBackend(self._find_controller)
        found = len(gateway.state.fleet.workers)
        self._report(f"registry {self.config.registry.url}: {gateway.state.registry_health()}; {found} workers")
        return endpoint

    async def _find_controller(self) -> operator_pb2_grpc.OperatorServiceAsyncStub:
        """The controller as the registry names it now. Raises Unavailable."""
        endpoint = (await self._registry.desired()).controller_endpoint
        if not endpoint:
            raise no_controller("the registry names no controller")
        return operator_pb2_grpc.OperatorServiceStub(self.gateway.state.channel(endpoint))
