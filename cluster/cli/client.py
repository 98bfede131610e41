"""A client of one cluster, for the commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import Message

from cluster.cli.main import Unreachable
from cluster.cli.reach import CA_VARIABLE, look, why_not
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvstore.errors import Unavailable
from kvstore.files import FileReader
from wire.calls import answer, responses
from wire.errors import told_by_peer
from wire.options import MAX_MESSAGE_BYTES, channel_options

T = TypeVar("T")
CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Client:
    """Calls raise GenlockError."""

    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float
    endpoint: str

    async def generate(self, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        with self._gateway():
            async for message in responses(stub.Generate(request, timeout=self.timeout_s, metadata=self.metadata)):
                yield message

    async def model_info(self) -> pb.GetModelInfoResponse:
        stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        call = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=self.timeout_s, metadata=self.metadata)
        with self._gateway():
            return await answer(call)

    async def status(self) -> operator_pb2.GetStatusResponse:
        stub = operator_pb2_grpc.OperatorServiceStub(self.channel)
        call = stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=self.timeout_s, metadata=self.metadata)
        with self._gateway():
            return await answer(call)

    async def operate(self, name: str, request: Message) -> Any:
        """The RPC of OperatorService with that name."""
        stub = operator_pb2_grpc.OperatorServiceStub(self.channel)
        with self._gateway():
            return await answer(getattr(stub, name)(request, timeout=self.timeout_s, metadata=self.metadata))

    async def watch_events(self, request: operator_pb2.ListEventsRequest) -> AsyncIterator[operator_pb2.FleetEvent]:
        """Events as they come, until this is left."""
        stub = operator_pb2_grpc.OperatorServiceStub(self.channel)
        with self._gateway():
            async for event in responses(stub.WatchEvents(request, metadata=self.metadata)):
                yield event

    @contextmanager
    def _gateway(self) -> Iterator[None]:
        """Says which gateway it was that went away under a call."""
        try:
            yield
        except Unavailable as error:
            if error.reason != "peer_unreachable" or told_by_peer(error.__cause__):
                raise
            text = f"the gateway at {self.endpoint} went away before it had answered: {error.message}"
            raise Unavailable(error.reason, text) from error.__cause__


@asynccontextmanager
async def connect(endpoint: str, token: str | None, timeout_s: float) -> AsyncIterator[Client]:
    """A client of the cluster at `endpoint`, over TLS where GENLOCK_CA names the certificates to trust. Raises
    Unreachable when nobody answers there."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    ca_file = os.environ.get(CA_VARIABLE, "")
    async with open_front(endpoint, ca_file) as channel:
        try:
            async with asyncio.timeout(min(CONNECT_TIMEOUT_S, timeout_s)):
                await channel.channel_ready()
        except TimeoutError:
            seen = await asyncio.to_thread(look, endpoint, ca_file)
            raise Unreachable(why_not(endpoint, ca_file, seen)) from None
        yield Client(channel, metadata, timeout_s, endpoint)


def open_front(endpoint: str, ca_file: str) -> grpc.aio.Channel:
    """A channel to a front door. Raises InvalidInput (`bad_ca_file`)."""
    options = channel_options(MAX_MESSAGE_BYTES)
    if not ca_file:
        return grpc.aio.insecure_channel(endpoint, options=options)
    roots = FileReader("bad_ca_file", "ca", advice=f"{CA_VARIABLE} names it").data(ca_file)
    return grpc.aio.secure_channel(endpoint, grpc.ssl_channel_credentials(roots), options=options)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a command's coroutine; Ctrl-C cancels it."""
    return asyncio.run(work)
