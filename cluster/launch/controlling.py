"""A controller on its own: the fleet of a Ray cluster that is there already, kept as a shared registry wants it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cluster.control.actor import Service
from cluster.control.arrivals import Arrivals
from cluster.control.controller import Controller
from cluster.control.metrics import controller_registry, read_controller
from cluster.control.operations import Operations
from cluster.control.scaling import PolicyScaler
from cluster.gateway.identity import Authenticator, Several, SingleTenant, authenticator_from, operator
from cluster.kube.room import KubeRoom
from cluster.launch.credentials import credentials_of
from cluster.launch.hands import LauncherHands, make_controller
from cluster.launch.launcher import Launcher, ignore_loss
from cluster.launch.ports import own_address
from cluster.launch.spec import WorkerBuilder
from cluster.operators.fleet import FleetOperations
from cluster.operators.service import FleetService, LocalBackend, Metadata
from cluster.registry.make import is_shared, registry_from
from cluster.settings import Config
from cluster.tls import dialer_of
from genlock.v1 import operator_pb2_grpc
from kvstore.errors import InvalidInput, Unavailable
from wire.clocks import now_ms, unix_ms
from wire.interceptor import TypedErrors
from wire.metrics_http import OFF, MetricsServer, reachable
from wire.options import server_options
from wire.version import app_version

SERVING = health_pb2.HealthCheckResponse.SERVING


def check_alone(config: Config) -> None:
    """What a controller needs that outlives its process. Raises InvalidInput naming the setting."""
    if not is_shared(config):
        raise InvalidInput(
            "no_shared_registry",
            "a controller on its own keeps its target where its next life finds it: set registry.url to a Redis "
            "server, as redis://127.0.0.1:6379/0; `genlock up` needs none",
            field="registry.url",
        )
    if not config.cluster.secret:
        raise InvalidInput(
            "no_secret",
            "workers of several lives of a controller must share one secret: set cluster.secret to 32 to 128 "
            "hexadecimal digits",
            field="cluster.secret",
        )
    if config.control.ray_address == "local":
        raise InvalidInput(
            "no_ray_cluster",
            "a controller on its own needs a Ray cluster that is there already: set control.ray_address to its "
            "head's host:port, or to auto",
            field="control.ray_address",
        )


class ControllerService:
    """Controller, its hands on Ray, and the operators' RPCs at one endpoint that the registry names."""

    def __init__(self, config: Config, launcher: Launcher, tenants: str = "") -> None:
        """`tenants`: text of the tenants file, which may not be on this host; where none is named and no other source
        of callers, whoever reaches the port is an operator. Raises InvalidInput."""
        check_alone(config)
        self._config = config
        self._launcher = launcher
        elsewhere = credentials_of(replace(config, api=replace(config.api, tenants_file="")))
        name = config.api.tenants_file
        # An empty text is a mistake in the file that is named, not the wish to let everybody in.
        known = authenticator_from(tenants, name) if tenants or name else None
        self._elsewhere = elsewhere
        self._authenticator: Authenticator = (
            Several(known, elsewhere) if known and elsewhere else known or elsewhere or SingleTenant()
        )
        self._server: grpc.aio.Server | None = None
        self._controller: Controller | None = None
        self._operations: Operations | None = None
        self._metrics: MetricsServer | None = None
        # Where Prometheus finds this process; "" where that is off.
        self.metrics_endpoint = ""

    async def start(self) -> str:
        config = self._config
        registry = registry_from(config, now_ms)
        room = KubeRoom(config.kube) if config.kube.enabled else None
        controller = make_controller(config, registry, LauncherHands(config, self._launcher, ignore_loss), room)
        operations = Operations(
            controller, PolicyScaler(unix_ms, Arrivals(registry).since_last), config.control.autoscale_ms
        )
        dialer = dialer_of(config.tls)
        # Gateways call it, with the operator's credential in hand: it is a part of the cluster like a worker.
        server = grpc.aio.server(interceptors=(TypedErrors(), *dialer.interceptors()), options=server_options())
        backend = LocalBackend(FleetOperations(operations, unix_ms))
        service = FleetService(lambda: backend, self._operator)  # type: ignore[abstract]  # the rest is the gateways'
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(service, server)
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        host = own_address(config.control.host, "control.host")
        try:
            port = dialer.listen(server, f"{host}:{config.control.port}")
        except RuntimeError as error:
            raise Unavailable(
                "port_taken", f"cannot listen on {host}:{config.control.port}: choose another", field="control.port"
            ) from error
        self._controller, self._operations, self._server = controller, operations, server
        self._start_metrics(controller, operations, host)
        await self._launcher.open([])
        operations.endpoint = f"{host}:{port}"
        await controller.start(endpoint=operations.endpoint)
        if self._elsewhere is not None:
            await self._elsewhere.start()
        operations.start()
        await server.start()
        for name in ("", "readiness", "liveness"):
            await checks.set(name, SERVING)
        return operations.endpoint

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)
        if self._elsewhere is not None:
            await self._elsewhere.stop()
        if self._operations is not None:
            await self._operations.stop()
        if self._controller is not None:
            await self._controller.stop()
            await self._controller.registry.close()
        if self._metrics is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._metrics.stop)

    def _start_metrics(self, controller: Controller, operations: Operations, host: str) -> None:
        """Raises Unavailable (`port_taken`)."""
        metrics = self._config.metrics
        if metrics.controller_port == OFF:
            return
        registry = controller_registry(lambda: read_controller(controller, operations), app_version())
        self._metrics = MetricsServer(registry)
        port = self._metrics.start(metrics.host, metrics.controller_port, setting="metrics.controller_port")
        self.metrics_endpoint = reachable(metrics.host, host, port)

    def _operator(self, metadata: Metadata) -> str:
        """Raises Unauthenticated, PermissionDenied."""
        return operator(self._authenticator.caller(metadata))


def make_ray_service(config: Config, builder: WorkerBuilder, tenants: str) -> Service:
    """Called in the actor's process, which is connected to Ray."""
    from cluster.launch.logs import start_logging
    from cluster.launch.ray_launcher import RayLauncher

    start_logging(config.log, "controller")
    control = config.control
    if config.kube.enabled:  # a place may first have to become a pod
        control = replace(control, place_timeout_ms=max(control.place_timeout_ms, config.kube.node_timeout_ms))
    return ControllerService(config, RayLauncher(builder, control=control), tenants)
