"""The gateway behind one port: inference, operator, health and reflection."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.gateway.credentials import Credentials
from cluster.gateway.front_door import MESSAGE_TIMEOUT_S, FrontDoor
from cluster.gateway.identity import Authenticator
from cluster.gateway.metrics import targets_of
from cluster.gateway.operator import OperatorService
from cluster.gateway.peers import peer_host
from cluster.gateway.poller import Poller
from cluster.gateway.served import ServedModel, Sources, StreamChecks
from cluster.gateway.service import InferenceService
from cluster.gateway.state import GatewayState
from cluster.roles import Role
from cluster.settings import Config
from cluster.tls import dialer_of, front_tls
from genlock.v1 import inference_pb2, inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvstore.errors import GenlockError, Unavailable
from wire.health import LIVENESS, READINESS
from wire.interceptor import TypedErrors
from wire.metrics_http import OFF, MetricsServer
from wire.options import door_options
from wire.version import app_version

_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
GENERATE = "/genlock.v1.InferenceService/Generate"
_DESCRIPTORS = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    operator_pb2.DESCRIPTOR.services_by_name["OperatorService"],
)
SERVICES = tuple(service.full_name for service in _DESCRIPTORS)
# Calls over one connection beyond the requests that run: to be told that there is no room, and for everything else.
SPARE_STREAMS = 128


class Gateway:
    """Starts, serves, drains, stops."""

    def __init__(
        self,
        config: Config,
        served: ServedModel,
        sources: Sources,
        *,
        authenticator: Authenticator | None = None,
        checks: StreamChecks | None = None,
        message_timeout_s: float = MESSAGE_TIMEOUT_S,
    ) -> None:
        """`message_timeout_s`: how long a call's message may take once its headers are here."""
        self.state = GatewayState(
            config, served, sources, authenticator=authenticator, checks=checks, version=app_version(),
            dialer=dialer_of(config.tls),
        )  # fmt: skip
        self._tls = front_tls(config.tls)
        self.endpoint = ""
        # Where Prometheus finds this process; "" where that is off.
        self.metrics_endpoint = ""
        self._metrics = MetricsServer(self.state.metrics.registry, lambda: targets_of(self.state.fleet))
        self._config = config
        self._message_timeout_s = message_timeout_s
        self._poller = Poller(self.state)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._server: grpc.aio.Server | None = None
        self._health_tasks: set[asyncio.Task[None]] = set()
        self._serving: bool | None = None

    async def start(self) -> str:
        """Listens and returns `host:port`. Raises Unavailable (`port_taken`) when the port cannot be had."""
        server = grpc.aio.server(
            interceptors=(
                FrontDoor(self.state, _DESCRIPTORS, self._on_refused, self._message_timeout_s),
                TypedErrors(on_refused=self._on_refused),
            ),
            options=door_options(
                self.state.message_bytes,
                self._config.api.max_connections,
                self._config.api.max_requests + SPARE_STREAMS,
            ),
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(self.state), server)
        operators = OperatorService(self.state, self.state.version)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(operators, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        host = self._config.api.host
        try:
            port = self._listen(server, f"{host}:{self._config.api.port}")
        except RuntimeError as error:
            raise Unavailable(
                "port_taken",
                f"cannot listen on {host}:{self._config.api.port}: choose another api.port (0: any free one)",
                field="api.port",
            ) from error
        metrics = self._config.metrics
        if metrics.port != OFF:
            self.metrics_endpoint = f"{metrics.host}:{self._metrics.start(metrics.host, metrics.port)}"
        if isinstance(self.state.authenticator, Credentials):
            await self.state.authenticator.start()
        self.state.on_fleet_change = self._tell_health
        self._tell_health()
        # While this loop answers, this process is alive; whether requests can be served is another question.
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        self._server = server
        self._poller.start()
        self.endpoint = f"{host}:{port}"
        reached = peer_host(host, self._config.api.peer_host)
        self.state.peer_endpoint = f"{reached}:{port}" if reached else ""
        return self.endpoint

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        if self._tls is None:
            return server.add_insecure_port(address)
        ask_callers = bool(self._config.tls.client_ca_file)
        return server.add_secure_port(address, self._tls.server_credentials(ask_peers=ask_callers))

    async def stop(self, grace_ms: int = 0) -> None:
        """Refuses new requests, lets running ones end for at most `grace_ms`, then ends the rest as Unavailable."""
        server, self._server = self._server, None
        self.state.draining = True
        if server is not None:
            self._tell_health()
            await self._drain(grace_ms)
            await server.stop(1.0)
        await self._poller.stop()
        if isinstance(self.state.authenticator, Credentials):
            await self.state.authenticator.stop()
        await asyncio.gather(*self._health_tasks, return_exceptions=True)
        await asyncio.get_running_loop().run_in_executor(None, self._metrics.stop)
        await self.state.close()

    def add_worker(self, worker_id: str, role: Role, endpoint: str) -> None:
        """A worker to ask and, once it answers, to route to."""
        self.state.add_worker(worker_id, role, endpoint)
        self.state.look_again()

    def worker_lost(self, worker_id: str, detail: str) -> None:
        """The launcher saw a worker end; no need to wait for a poll to fail."""
        record = self.state.fleet.get(worker_id)
        self.state.set_fleet(self.state.fleet.failed(worker_id, record.endpoint, Unavailable("worker_lost", detail)))

    async def remove_worker(self, worker_id: str) -> None:
        record = self.state.fleet.get(worker_id)
        self.state.set_fleet(self.state.fleet.removed(worker_id))
        await self.state.close_channel(record.endpoint)

    async def wait_ready(self, timeout_ms: float) -> None:
        """Returns when a request can be served, and every pair of workers that is ready by then has tried an exchange
        of a page. Raises Unavailable that says what is missing."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while self._poller.checking or not self.state.fleet.serving():
                    if self._poller.checking:
                        await asyncio.sleep(0.005)
                        continue
                    await self._poller.look()
                    if not (self._poller.checking or self.state.fleet.serving()):
                        await asyncio.sleep(0.05)
        except TimeoutError as error:
            if self.state.fleet.serving():
                return  # an exchange of another pair still hangs
            states = [
                f"{record.worker_id} is {record.state.value} {record.detail}".strip()
                for record in self.state.fleet.workers.values()
            ]
            failing = [
                f"{decode} cannot pull from {proof.worker_id}: {proof.detail}"
                for decode, proof in self.state.fleet.failing()
            ]
            words = "; ".join([*states, *failing]) or "no workers"
            raise Unavailable("not_ready", f"no pair of workers is ready: {words}") from error

    async def _drain(self, grace_ms: int) -> None:
        tasks = [running.task for running in self.state.running]
        if tasks and grace_ms > 0:
            await asyncio.wait(tasks, timeout=grace_ms / 1000)
        rest = list(self.state.running)
        for running in rest:
            running.stop(Unavailable("draining", "this gateway stopped before the answer was complete"))
        if rest:
            await asyncio.wait([running.task for running in rest], timeout=1.0)

    def _on_refused(self, method: str, error: GenlockError) -> None:
        if method == GENERATE:
            self.state.ended(error, 0.0)

    def _tell_health(self) -> None:
        serving = self.state.takes
        if serving is self._serving:
            return
        self._serving = serving
        task = asyncio.ensure_future(self._set_health())
        self._health_tasks.add(task)
        task.add_done_callback(self._health_tasks.discard)

    async def _set_health(self) -> None:
        for service in ("", READINESS, *SERVICES):
            # Read anew each time: of two changes in a row the later one must win for every service.
            serving = health_pb2.HealthCheckResponse.SERVING if self._serving else _NOT_SERVING
            await self._health.set(service, serving)
