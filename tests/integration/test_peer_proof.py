"""The start-up self-test in a whole cluster: which pairs serve, what an operator is told, what a restart changes."""

from __future__ import annotations

import asyncio
import os

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cli.status import unproved_pairs
from cluster.config import load
from cluster.gateway.operator import OperatorService
from cluster.gateway.served import ServedModel, Sources
from cluster.gateway.server import Gateway
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.selftest.lab import PAGE_TOKENS, Client, Reply, Subject, load_subject
from genlock.v1 import operator_pb2, worker_pb2, worker_pb2_grpc
from kvstore.errors import Unavailable
from kvstore.layout import HEADER_BYTES
from kvstore.transfer.base import TransferEngine
from kvstore.transfer.faults import BitFlip, TransferFaults, TransferInfo
from kvstore.transfer.faulty import FaultyEngine
from wire.clocks import now_ms
from wire.errors import from_rpc
from wire.health import REASON_KEY
from wire.options import open_channel

TIMEOUT_S = 30.0
NO_FAULT = TransferFaults()
FAULTS = {
    "truncates": TransferFaults(short_tail_bytes=1024),
    "damages": TransferFaults(bit_flips=(BitFlip(0, HEADER_BYTES + 9, 2),)),
    "wrong header": TransferFaults(bit_flips=(BitFlip(0, 9, 2),)),
}


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


class Stage:
    """Two prefill workers and one decode worker, whose engine damages what comes from the pools in `sick`."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.config = load(
            flags={
                "model.name": subject.name, "cluster.secret": os.urandom(16).hex(), "cache.page_tokens": PAGE_TOKENS,
                "cache.prefill_pages": 24, "cache.decode_pages": 24, "workers.threads": 2,
                "workers.status_poll_ms": 50, "api.port": 0,
            }
        ).config  # fmt: skip
        self.sick: dict[int, TransferFaults] = {}
        self.workers: dict[str, BuiltWorker] = {}
        self.gateway: Gateway
        self.client: Client

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        if hasattr(self, "client"):
            await self.client.channel.close(None)
        if hasattr(self, "gateway"):
            await self.gateway.stop(0)
        for worker in reversed(list(self.workers.values())):
            await worker.stop(0)

    async def build(self, role: Role, name: str, port: int = 0) -> BuiltWorker:
        def wrap(engine: TransferEngine) -> TransferEngine:
            return FaultyEngine(engine, self._plan) if role is Role.DECODE else engine

        tuning = WorkerTuning(model=self.subject.model, wrap_engine=wrap)
        worker = self.workers[name] = BuiltWorker(WorkerSpec(role, name, self.config, port=port), tuning)
        await worker.start()
        return worker

    def _plan(self, info: TransferInfo) -> TransferFaults:
        return self.sick.get(info.source.incarnation, NO_FAULT)

    async def open(self, *names: str) -> None:
        served = ServedModel(self.subject.model.info, self.subject.tokenizer)
        self.gateway = Gateway(self.config, served, Sources(now_ms=now_ms, random_bytes=os.urandom))
        endpoint = await self.gateway.start()
        for name in names:
            worker = self.workers[name]
            self.gateway.add_worker(name, worker.role, worker.endpoint)
        self.client = Client(open_channel(endpoint))

    async def ask(self, name: str) -> Reply:
        return await self.client.ask(self.subject.prompt(name), 8)

    async def until(self, true, what: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not true():
                await asyncio.sleep(0.01)
        assert true(), what

    async def status(self) -> operator_pb2.GetStatusResponse:
        class Context:
            def invocation_metadata(self) -> tuple[()]:
                return ()

        return await OperatorService(self.gateway.state, "test").GetStatus(operator_pb2.GetStatusRequest(), Context())


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_sick_pair_is_not_used_and_another_serves(subject: Subject, fault: str):
    async with Stage(subject) as stage:
        sick = await stage.build(Role.PREFILL, "prefill-0")
        await stage.build(Role.PREFILL, "prefill-1")
        decode = await stage.build(Role.DECODE, "decode-0")
        stage.sick[sick.guard.incarnation] = FAULTS[fault]
        await stage.open("prefill-0", "prefill-1", "decode-0")
        await stage.gateway.wait_ready(TIMEOUT_S * 1000)
        [(_, name, reason, words)] = unproved_pairs(await stage.status())
        assert (name, reason) == ("prefill-0", "peer_not_proved")
        assert "mismatch" in str(words)
        for n in range(3):
            assert subject.right(subject.prompt(f"n{n}"), await stage.ask(f"n{n}"))
        assert sick.engine.facts().tokens == 0, "no request came to the pair that did not pass"
        # The path is repaired; nobody has to restart anything.
        stage.sick.clear()
        await stage.until(lambda: not stage.gateway.state.fleet.failing(), "proved in the end")
        assert unproved_pairs(await stage.status()) == []
        assert decode.guard.free_pages == decode.guard.slots
        assert (decode.guard.free_spares, sick.guard.spares - sick.guard.free_spares) == (decode.guard.spares, 1)


async def test_no_pair_no_service_and_a_restart_is_proved_again(subject: Subject):
    async with Stage(subject) as stage:
        first = await stage.build(Role.PREFILL, "prefill-0")
        decode = await stage.build(Role.DECODE, "decode-0")
        stage.sick[first.guard.incarnation] = FAULTS["damages"]
        await stage.open("prefill-0", "decode-0")
        with pytest.raises(Unavailable, match=r"decode-0 cannot pull from prefill-0.*digest_mismatch"):
            await stage.gateway.wait_ready(1500)
        refused = await stage.ask("nobody")
        assert refused.error is not None
        assert (refused.error.reason, refused.tokens) == ("no_proved_pair", ())
        # Another life under the same name and endpoint, over a path that is well: proved anew, and serves.
        await first.stop(0)
        second = await stage.build(Role.PREFILL, "prefill-0", int(first.endpoint.rsplit(":", 1)[1]))
        await stage.gateway.wait_ready(TIMEOUT_S * 1000)
        assert subject.right(subject.prompt("after"), await stage.ask("after"))
        [verdict] = [p for p in decode.facts().peers if p.worker_id == "prefill-0"]
        assert (verdict.passed, verdict.incarnation) == (True, second.guard.incarnation)
        # And one more, over a path that is sick for this life: the pass of the life before is worth nothing.
        await second.stop(0)
        third = await stage.build(Role.PREFILL, "prefill-0", int(first.endpoint.rsplit(":", 1)[1]))
        stage.sick[third.guard.incarnation] = FAULTS["truncates"]
        await stage.until(lambda: len(stage.gateway.state.fleet.failing()) == 1, "the new life does not pass")
        assert not stage.gateway.state.fleet.serving()


async def test_decode_itself_refuses_a_handoff_of_a_peer_that_did_not_pass(subject: Subject):
    """Whatever a gateway believes."""
    async with Stage(subject) as stage:
        sick = await stage.build(Role.PREFILL, "prefill-0")
        decode = await stage.build(Role.DECODE, "decode-0")
        stage.sick[sick.guard.incarnation] = FAULTS["damages"]
        await stage.open("prefill-0", "decode-0")
        await stage.until(lambda: len(stage.gateway.state.fleet.failing()) == 1, "it does not pass")
        fleet = stage.gateway.state.fleet
        proof = worker_pb2.PeerProof(worker_id="prefill-0", incarnation=sick.guard.incarnation, passed=True)
        before = decode.guard.counters["pages_received"]
        stage.gateway.state.set_fleet(fleet.checked("decode-0", decode.endpoint, proof))
        reply = await stage.ask("a gateway that is wrong")
        assert reply.error is not None
        assert (type(reply.error), reply.error.reason, reply.tokens) == (Unavailable, "peer_not_proved", ())
        assert decode.guard.counters["pages_received"] == before
        stage.sick.clear()
        await stage.gateway.wait_ready(TIMEOUT_S * 1000)
        assert subject.right(subject.prompt("well again"), await stage.ask("well again"))


async def test_a_check_names_its_field_and_tells_of_a_worker_that_is_not_there(subject: Subject):
    async with Stage(subject) as stage:
        decode = await stage.build(Role.DECODE, "decode-0")
        async with open_channel(decode.endpoint) as channel:
            stub = worker_pb2_grpc.DecodeServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.CheckPeer(worker_pb2.CheckPeerRequest())
            assert from_rpc(caught.value).field == "prefill_endpoint"
            request = worker_pb2.CheckPeerRequest(prefill_endpoint="127.0.0.1:1", prefill_worker="gone")
            proof = (await stub.CheckPeer(request)).proof
            assert (proof.passed, proof.reason) == (False, "peer_unreachable")


async def readiness(worker: BuiltWorker) -> str:
    """The answer, and its reason where it has one."""
    async with open_channel(worker.endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service="readiness")
        call = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        name = health_pb2.HealthCheckResponse.ServingStatus.Name((await call).status)
        reason = dict(await call.trailing_metadata()).get(REASON_KEY, "")
    return f"{name}: {reason}" if reason else name


async def test_a_decode_worker_is_ready_once_an_exchange_has_passed(subject: Subject):
    nobody = "NOT_SERVING: has exchanged a page with nobody yet"
    async with Stage(subject) as stage:
        decode = await stage.build(Role.DECODE, "decode-0")
        assert await readiness(decode) == nobody, "also before anybody has asked it about a peer"
        asked = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()
            writer.close()

        async with (
            await asyncio.start_server(silent, "127.0.0.1", 0) as server,
            open_channel(decode.endpoint) as channel,
        ):
            place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            request = worker_pb2.CheckPeerRequest(prefill_endpoint=place, prefill_worker="prefill-0")
            call = worker_pb2_grpc.DecodeServiceStub(channel).CheckPeer(request, timeout=TIMEOUT_S)
            exchange = asyncio.ensure_future(call)
            await asyncio.wait_for(asked.wait(), TIMEOUT_S)
            assert await readiness(decode) == "NOT_SERVING: its first exchange of a page is under way"
            call.cancel()
            await asyncio.gather(exchange, return_exceptions=True)
        prefill = await stage.build(Role.PREFILL, "prefill-0")
        assert await readiness(prefill) == "SERVING", "it is asked for pages, and asks nobody"
        stage.sick[prefill.guard.incarnation] = FAULTS["damages"]
        await stage.open("prefill-0", "decode-0")
        await stage.until(lambda: bool(stage.gateway.state.fleet.failing()), "the exchange has failed")
        assert (await readiness(decode)).startswith("NOT_SERVING: no exchange of a page has passed: prefill-0: ")
        stage.sick.clear()
        await stage.gateway.wait_ready(TIMEOUT_S * 1000)
        assert await readiness(decode) == await readiness(prefill) == "SERVING"
