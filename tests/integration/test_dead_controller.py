"""A gateway whose registry names a controller that is not there, or goes away under a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from cluster.operators.service import RemoteBackend
from genlock.v1 import operator_pb2 as pb
from genlock.v1 import operator_pb2_grpc as services
from kvstore.errors import Unavailable
from wire.errors import abort_with


class Controller(services.OperatorServiceServicer):
    """Tells one event and stays; to another question it says that somebody else is away."""

    async def GetFleet(self, request: Any, context: Any) -> Any:
        await abort_with(context, Unavailable("peer_unreachable", "decode-0 does not answer"))

    async def WatchEvents(self, request: Any, context: Any) -> AsyncIterator[pb.FleetEvent]:
        yield pb.FleetEvent(kind="scale")
        await asyncio.sleep(60)


@pytest.fixture
async def there() -> AsyncIterator[tuple[grpc.aio.Server, RemoteBackend]]:
    server = grpc.aio.server()
    services.add_OperatorServiceServicer_to_server(Controller(), server)
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(endpoint) as channel:

        async def find() -> Any:
            return services.OperatorServiceStub(channel)

        yield server, RemoteBackend(find)
    await server.stop(0)


async def test_a_dead_controller_is_said_by_name(there) -> None:
    server, backend = there
    await server.stop(0)
    with pytest.raises(Unavailable, match="genlock controller") as caught:
        await backend.call("GetFleet", pb.GetFleetRequest(), "ops", ())
    assert caught.value.reason == "controller_unreachable"


async def test_one_that_dies_under_a_watch_is_said_by_name(there) -> None:
    server, backend = there
    events = backend.watch(pb.ListEventsRequest(), "ops", ())
    assert (await anext(events)).kind == "scale"
    await server.stop(0)
    with pytest.raises(Unavailable) as caught:
        await anext(events)
    assert caught.value.reason == "controller_unreachable"


async def test_what_the_controller_says_of_others_stays_its_word(there) -> None:
    _server, backend = there
    with pytest.raises(Unavailable, match="decode-0") as caught:
        await backend.call("GetFleet", pb.GetFleetRequest(), "ops", ())
    assert caught.value.reason == "peer_unreachable"
