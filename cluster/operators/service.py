"""OperatorService for the fleet's RPCs: who asks is checked here, then the controller is asked, here or elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from cluster.operators.fleet import FleetOperations
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc as services
from kvstore.errors import Unavailable
from wire.calls import answer, responses
from wire.errors import told_by_peer

M = TypeVar("M", bound=Message)
Metadata = Iterable[tuple[str, str | bytes]]
# Metadata -> the name of an operator. Raises Unauthenticated, PermissionDenied.
Authorize = Callable[[Metadata], str]
FORWARD_TIMEOUT_S = 30.0
# The credential goes on to the controller, which checks it once more.
FORWARDED = frozenset({"authorization"})


class Backend(Protocol):
    """Where the fleet's RPCs are answered."""

    async def call(self, name: str, request: Any, actor: str, metadata: Metadata) -> Message: ...

    def watch(self, request: pb.ListEventsRequest, actor: str, metadata: Metadata) -> AsyncIterator[pb.FleetEvent]: ...


class LocalBackend:
    """The controller is in this process."""

    def __init__(self, operations: FleetOperations) -> None:
        self._operations = operations

    async def call(self, name: str, request: Any, actor: str, metadata: Metadata) -> Message:
        return await self._operations.call(name, request, actor)

    def watch(self, request: pb.ListEventsRequest, actor: str, metadata: Metadata) -> AsyncIterator[pb.FleetEvent]:
        return self._operations.watch(request, actor)


class RemoteBackend:
    """The controller is behind an endpoint that may change with each of its lives."""

    def __init__(self, find: Callable[[], Awaitable[services.OperatorServiceAsyncStub]]) -> None:
        """`find`: a stub of the controller as it is now. Raises Unavailable (`no_controller`)."""
        self._find = find

    async def call(self, name: str, request: Any, actor: str, metadata: Metadata) -> Message:
        stub = await self._find()
        call = getattr(stub, name)(request, timeout=FORWARD_TIMEOUT_S, metadata=forwarded(metadata))
        with _controller():
            reply: Message = await answer(call)
        return reply

    async def watch(
        self, request: pb.ListEventsRequest, actor: str, metadata: Metadata
    ) -> AsyncIterator[pb.FleetEvent]:
        stub = await self._find()
        with _controller():
            async for event in responses(stub.WatchEvents(request, metadata=forwarded(metadata))):
                yield event


class NoFleet:
    """Nobody scales this fleet: workers were added by hand."""

    async def call(self, name: str, request: Any, actor: str, metadata: Metadata) -> Message:
        raise no_controller()

    async def watch(
        self, request: pb.ListEventsRequest, actor: str, metadata: Metadata
    ) -> AsyncIterator[pb.FleetEvent]:
        raise no_controller()
        yield  # makes this a generator


def no_controller(detail: str = "this gateway knows no controller") -> Unavailable:
    return Unavailable("no_controller", f"{detail}: start one with `genlock controller`, or use `genlock up`")


@contextmanager
def _controller() -> Iterator[None]:
    """Who is not there is said by name: the caller sees one error of a gateway with many peers."""
    try:
        yield
    except Unavailable as error:
        if error.reason != "peer_unreachable" or told_by_peer(error.__cause__):
            raise
        raise Unavailable(
            "controller_unreachable",
            "the controller that the registry names does not answer: see that `genlock controller` runs; "
            f"{error.message}",
        ) from error


def forwarded(metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """What of an operator's metadata goes on to other parts of the cluster."""
    return tuple((key, value) for key, value in metadata if key in FORWARDED)


class FleetService(services.OperatorServiceServicer):
    """Every RPC of the fleet has the same way: authorize, ask the backend. A gateway adds what it answers itself."""

    def __init__(self, backend: Callable[[], Backend], authorize: Authorize) -> None:
        """`backend`: as it is now; a controller may come later."""
        self._backend = backend
        self._authorize = authorize

    async def _ask(self, name: str, request: Any, context: Any, kind: type[M]) -> M:
        metadata = tuple(context.invocation_metadata() or ())
        reply = await self._backend().call(name, request, self._authorize(metadata), metadata)
        assert isinstance(reply, kind)
        return reply

    async def GetFleet(self, request: pb.GetFleetRequest, context: Any) -> pb.FleetView:
        return await self._ask("GetFleet", request, context, pb.FleetView)

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        return await self._ask("ListNodes", request, context, pb.ListNodesResponse)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> pb.ListEventsResponse:
        return await self._ask("ListEvents", request, context, pb.ListEventsResponse)

    async def DescribeWorker(self, request: pb.DescribeWorkerRequest, context: Any) -> pb.DescribeWorkerResponse:
        return await self._ask("DescribeWorker", request, context, pb.DescribeWorkerResponse)

    async def Scale(self, request: pb.ScaleRequest, context: Any) -> pb.ScaleResponse:
        return await self._ask("Scale", request, context, pb.ScaleResponse)

    async def Cordon(self, request: pb.CordonRequest, context: Any) -> pb.FleetView:
        return await self._ask("Cordon", request, context, pb.FleetView)

    async def Uncordon(self, request: pb.CordonRequest, context: Any) -> pb.FleetView:
        return await self._ask("Uncordon", request, context, pb.FleetView)

    async def Drain(self, request: pb.DrainWorkersRequest, context: Any) -> pb.FleetView:
        return await self._ask("Drain", request, context, pb.FleetView)

    async def Restart(self, request: pb.RestartRequest, context: Any) -> pb.FleetView:
        return await self._ask("Restart", request, context, pb.FleetView)

    async def Apply(self, request: pb.ApplyRequest, context: Any) -> pb.ApplyResponse:
        return await self._ask("Apply", request, context, pb.ApplyResponse)

    async def GetAutoscale(self, request: pb.GetAutoscaleRequest, context: Any) -> pb.AutoscaleView:
        return await self._ask("GetAutoscale", request, context, pb.AutoscaleView)

    async def SetAutoscale(self, request: pb.SetAutoscaleRequest, context: Any) -> pb.AutoscaleView:
        return await self._ask("SetAutoscale", request, context, pb.AutoscaleView)

    async def PauseAutoscale(self, request: pb.PauseAutoscaleRequest, context: Any) -> pb.AutoscaleView:
        return await self._ask("PauseAutoscale", request, context, pb.AutoscaleView)

    async def ResumeAutoscale(self, request: pb.PauseAutoscaleRequest, context: Any) -> pb.AutoscaleView:
        return await self._ask("ResumeAutoscale", request, context, pb.AutoscaleView)

    async def ExplainAutoscale(self, request: pb.ExplainAutoscaleRequest, context: Any) -> pb.ExplainAutoscaleResponse:
        return await self._ask("ExplainAutoscale", request, context, pb.ExplainAutoscaleResponse)

    async def WatchEvents(self, request: pb.ListEventsRequest, context: Any) -> AsyncIterator[pb.FleetEvent]:
        metadata = tuple(context.invocation_metadata() or ())
        actor = self._authorize(metadata)
        async for event in self._backend().watch(request, actor, metadata):
            yield event
