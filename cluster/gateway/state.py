"""What the parts of one gateway share: configuration, fleet, counters, running requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import grpc.aio

from cluster.gateway.admission import ModelLimits, message_bytes
from cluster.gateway.credentials import Credentials
from cluster.gateway.fleet import Fleet, FleetPolicy, Ledger
from cluster.gateway.identity import Authenticator, Caller, SingleTenant
from cluster.gateway.metrics import GatewayMetrics, GatewayReading
from cluster.gateway.pool import FairPool
from cluster.gateway.prompt import PromptEncoder
from cluster.gateway.roll import Roll
from cluster.gateway.running import EndedRequests, RequestFacts, Running
from cluster.gateway.schemas import SchemaCheck
from cluster.gateway.served import ServedModel, Sources, StreamChecks
from cluster.gateway.sessions import NUMBERS_SEED_BYTES, Assign, DecodeCall, DecodeSession, call_numbers
from cluster.gateway.waiting import WaitingRoom
from cluster.operators.service import Backend, NoFleet
from cluster.registry.records import GatewayRecord
from cluster.roles import Role
from cluster.settings import Config
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, Unavailable
from wire.dial import Dialer
from wire.ending import end_tasks
from wire.tracing import Tracer, make_tracer

SHORTEST_PAUSE_MS = 50.0


async def no_gateways() -> tuple[GatewayRecord, ...]:
    """Where no registry is read."""
    return ()


class GatewayState:
    def __init__(
        self,
        config: Config,
        served: ServedModel,
        sources: Sources,
        *,
        authenticator: Authenticator | None = None,
        checks: StreamChecks | None = None,
        version: str = "",
        dialer: Dialer | None = None,
    ) -> None:
        """`dialer`: how workers are reached; by default without TLS."""
        self.version = version
        self.config = config
        self.served = served
        self.sources = sources
        self.authenticator = authenticator or SingleTenant()
        self.checks = checks or StreamChecks()
        self.limits = ModelLimits(
            served.info.name,
            served.info.vocab_size,
            served.info.context_tokens,
            (config.model.name,),
            longest_token_bytes=max(len(served.tokenizer.bytes_of(token)) for token in range(served.info.vocab_size)),
        )
        # Longest message of a request at either door.
        self.message_bytes = message_bytes(self.limits, config.api)
        # Long texts are read and tokenized here.
        self.pool = FairPool("tokenize", max_jobs=config.api.max_requests)
        self.encoder = PromptEncoder(served.tokenizer, self.pool)
        self.schemas = SchemaCheck(retry_after_ms=config.api.retry_after_ms)
        request_limit = config.workers.max_running + config.workers.max_waiting
        self.fleet = Fleet(FleetPolicy(stall_ms=config.workers.stall_ms, request_limit=request_limit))
        self.waiting = WaitingRoom(config.api.max_queued, config.api.retry_after_ms)
        self.ledger = Ledger(on_free=self.waiting.look)
        self.outcomes: Counter[str] = Counter()
        self.metrics = GatewayMetrics(self._reading)
        self.tracer: Tracer = make_tracer(config.tracing.endpoint, "gateway", config.tracing.sample_ratio)
        self.running: Roll[Running] = Roll(config.api.max_requests, config.api.retry_after_ms)
        self.ended_requests = EndedRequests()
        # Where the fleet's RPCs are answered.
        self.backend: Backend = NoFleet()
        self.draining = False
        # Untyped errors that loops of this gateway survived.
        self.surprises = 0
        # Requests that were admitted; those that were refused before would wake nobody.
        self.arrived = 0
        # Nobody is wanted, or nobody was and those who are have not come yet: a request waits rather than fails.
        self.asleep = False
        self.started_ms = sources.now_ms()
        self.on_fleet_change: Callable[[], None] = lambda: None
        # Set when a request met a worker that is gone: the pollers need not wait for their next turn.
        self._wake = asyncio.Event()
        self._channels: dict[str, grpc.aio.Channel] = {}
        # With decode workers, over these channels.
        self._sessions: dict[str, DecodeSession] = {}
        self.dialer = dialer or Dialer()
        self._generation = self.dialer.generation
        self._retired: set[asyncio.Task[None]] = set()
        # What GetStatus says of the registry; empty where this gateway reads none.
        self.registry_health: Callable[[], str] = lambda: ""
        # Among the registry's gateways: this one's id there, where others ask it, and who there is.
        self.gateway_id = ""
        self.peer_endpoint = ""
        self.find_gateways: Callable[[], Awaitable[tuple[GatewayRecord, ...]]] = no_gateways

    def add_worker(self, worker_id: str, role: Role, endpoint: str) -> None:
        self.set_fleet(self.fleet.added(worker_id, role, endpoint))

    def set_fleet(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.on_fleet_change()
        self.waiting.look()

    def set_asleep(self, asleep: bool) -> None:
        if asleep is not self.asleep:
            self.asleep = asleep
            self.on_fleet_change()
            self.waiting.look()

    @property
    def takes(self) -> bool:
        """Whether a request may come: there are workers for it, or it is what wakes them."""
        return (self.asleep or self.fleet.serving()) and not self.draining

    def ended(self, error: GenlockError | None, total_ms: float) -> None:
        """A request has ended; `error` None: well. Called once for each."""
        cause = self.metrics.ended(error, total_ms)
        self.outcomes[cause] += 1

    def _reading(self) -> GatewayReading:
        known = self.authenticator
        return GatewayReading(
            version=self.version,
            model=self.served.info.name,
            running=len(self.running),
            waiting=len(self.waiting),
            max_running=self.config.api.max_requests,
            draining=self.draining,
            surprises=self.surprises + (known.surprises if isinstance(known, Credentials) else 0),
            fleet=self.fleet,
        )

    def surprised(self) -> None:
        self.surprises += 1

    def look_again(self) -> None:
        """Something was unavailable: all workers are asked at once."""
        self._wake.set()

    async def pause(self, limit_ms: float) -> None:
        """Waits for `look_again`, at most `limit_ms`; never less than a short while, however often it is called."""
        shortest_ms = min(SHORTEST_PAUSE_MS, limit_ms)
        await asyncio.sleep(shortest_ms / 1000)
        try:
            async with asyncio.timeout((limit_ms - shortest_ms) / 1000):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        """The one channel to a worker of the fleet."""
        if self.dialer.generation != self._generation:
            # New certificates: calls that run go on where they are, new ones go over new channels.
            self._generation = self.dialer.generation
            for known in list(self._channels):
                self.retire_channel(known)
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = self.dialer.open(endpoint)
        return channel

    def decode_stub(self, endpoint: str) -> worker_pb2_grpc.DecodeServiceAsyncStub:
        return worker_pb2_grpc.DecodeServiceStub(self.channel(endpoint))

    def worker_stub(self, endpoint: str) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self.channel(endpoint))

    def open_decode(self, endpoint: str, request: worker_pb2.DecodeRequest, assign: Assign | None = None) -> DecodeCall:
        """Sends a request to a decode worker, over the session with it. `assign`: asked when it was preempted."""
        self.channel(endpoint)  # first: with new certificates it retires the session, too
        session = self._sessions.get(endpoint)
        if session is None or session.over:
            stub = self.decode_stub(endpoint)
            numbers = call_numbers(self.sources.random_bytes(NUMBERS_SEED_BYTES))
            session = DecodeSession(lambda: stub.Session(None), numbers)
            self._sessions[endpoint] = session
        return session.submit(request, assign)

    async def close_channel(self, endpoint: str) -> None:
        session = self._sessions.pop(endpoint, None)
        if session is not None:
            await session.close()
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            await channel.close(None)

    def retire_channel(self, endpoint: str) -> None:
        """No worker of the fleet is there any more. Requests that run now keep the channel until they have ended."""
        channel, session = self._channels.pop(endpoint, None), self._sessions.pop(endpoint, None)
        if channel is None:
            return
        running = [running.task for running in self.running]

        async def close() -> None:
            try:
                if running:
                    await asyncio.wait(running, timeout=self.config.api.max_deadline_ms / 1000)
                # A question for the status that is under way ends first.
                await asyncio.sleep(self.config.workers.status_timeout_ms / 1000)
            finally:
                if session is not None:
                    await session.close()
                await channel.close(None)

        task = asyncio.create_task(close(), name=f"close {endpoint}")
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    def most_running(self, caller: Caller) -> int:
        """How many requests of this caller can run here at once."""
        own = self.config.api.tenant_max_requests if caller.max_requests is None else caller.max_requests
        return min(own or self.config.api.max_requests, self.config.api.max_requests)

    def enter(self, caller: Caller, label: str, task: asyncio.Task[None], facts: RequestFacts | None = None) -> Running:
        """Takes a place among the running requests. Raises NoCapacity, or Unavailable while draining."""
        if self.draining:
            raise Unavailable("draining", "this gateway is stopping and takes no new requests")
        most = self.config.api.tenant_max_requests if caller.max_requests is None else caller.max_requests
        running = Running((caller.tenant, label), task, facts)
        self.running.enter(running, most)
        return running

    def leave(self, running: Running) -> None:
        """The request has ended; called once for each that has entered."""
        self.running.leave(running)

    async def close(self) -> None:
        self.pool.close()
        await self.schemas.close()
        await asyncio.get_running_loop().run_in_executor(None, self.tracer.close)
        await end_tasks(list(self._retired))
        for endpoint in list(self._channels):
            await self.close_channel(endpoint)
