"""Calls to workers that make no sense: each is refused with a typed error that names the field, and hurts nobody."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace

import grpc.aio
import pytest

from cluster.selftest.lab import Subject, load_subject
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import GenlockError, InvalidInput, NoCapacity, NotFound, StalePage, Unavailable
from model.sampling import SamplingParams
from model.ticket import Ticket
from tests.support.decode_calls import Decoding, decoding
from tests.support.edge_lab import EdgeLab, Neighbour, cluster, require_served
from wire.convert import ticket_to_proto
from wire.errors import from_rpc
from wire.options import open_channel


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


@pytest.fixture
async def lab(subject: Subject):
    async with cluster(subject, cache__decode_pages=256) as lab:
        yield lab


def ticket(lab: EdgeLab, **changes: object) -> Ticket:
    info = lab.subject.model.info
    base = Ticket(b"0123456789abcdef", "default", tuple(lab.subject.prompt("worker", 70)), SamplingParams(max_tokens=4),
                  info.revision, info.tokenizer_digest)  # fmt: skip
    return replace(base, **changes)


async def refused(call, on_message=lambda message: None) -> GenlockError:
    """The typed error that a call ends with."""
    try:
        async for message in call:
            on_message(message)
    except grpc.aio.AioRpcError as error:
        return from_rpc(error)
    raise AssertionError("the call ended well")


@pytest.fixture
async def stubs(lab):
    channels = [open_channel(lab.decode.endpoint), open_channel(lab.prefill.endpoint)]
    async with decoding(worker_pb2_grpc.DecodeServiceStub(channels[0])) as decode:
        yield decode, worker_pb2_grpc.PrefillServiceStub(channels[1])
    for channel in channels:
        await channel.close(None)


async def test_decode_refuses_what_it_cannot_serve_and_names_the_field(lab, stubs):
    decode, _ = stubs
    good = lab.prefill.endpoint
    for message, field in (
        (worker_pb2.DecodeRequest(), "ticket.token_ids"),
        (worker_pb2.DecodeRequest(ticket=ticket_to_proto(ticket(lab))), "prefill_endpoint"),
        (request(lab, good, model_revision="other"), "ticket.model_revision"),
        (request(lab, good, tokenizer_digest="other"), "ticket.tokenizer_digest"),
        (request(lab, good, sampling=SamplingParams(max_tokens=0)), "sampling_params.max_tokens"),
        (request(lab, good, sampling=SamplingParams(temperature=float("nan"))), "sampling_params.temperature"),
        (request(lab, good, ticket_id=b"short"), "ticket.ticket_id"),
    ):
        error = await decode.refused(message)
        assert isinstance(error, InvalidInput), error
        assert error.field in (field, "ticket.sampling.max_tokens"), field
    await require_served(lab)


def request(lab: EdgeLab, endpoint: str, **changes: object) -> worker_pb2.DecodeRequest:
    return worker_pb2.DecodeRequest(
        ticket=ticket_to_proto(ticket(lab, **changes)), prefill_endpoint=endpoint, prefill_worker="prefill-0"
    )


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "not an endpoint", "decode itself", "nowhere.invalid:80"])
async def test_a_prefill_that_is_not_there_is_unavailable(lab, stubs, endpoint):
    decode, _ = stubs
    target = lab.decode.endpoint if endpoint == "decode itself" else endpoint
    error = await decode.refused(request(lab, target))
    assert error.status == "UNAVAILABLE", error
    await require_served(lab)


async def test_control_whom_a_worker_is_told_to_call_is_called(lab, stubs):
    """Decode calls whatever the router names. So a field of a client that reached this message would make a connection,
    and that none is made (test_gateway_refusals.py, test_openai_door.py) is the doors' doing."""
    knocks: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(lambda reader, writer: knocks.append(writer), "127.0.0.1", 0)
    decode, _ = stubs
    call = decode.submit(request(lab, f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"))
    await lab.until(lambda: knocks, "decode calls it")
    call.cancel()
    for writer in knocks:
        writer.close()
    listener.close()
    await require_served(lab)


async def test_a_prefill_behind_another_name_is_another_life_and_is_refused(lab, stubs):
    """Two names for one incarnation: the router's mistake is typed."""
    decode, _ = stubs
    await require_served(lab)
    message = request(lab, lab.prefill.endpoint)
    message.prefill_worker = "prefill-9"
    error = await decode.refused(message)
    assert isinstance(error, StalePage)
    assert error.reason == "incarnation_taken"
    await require_served(lab)


async def test_channels_to_prefill_workers_are_bounded(lab, stubs, monkeypatch):
    """Workers come and go, each at an endpoint of its own."""
    channels = lab.decode._handoffs.channels
    monkeypatch.setattr(channels, "_limit", 3)
    decode, _ = stubs
    await require_served(lab)
    for port in range(1, 7):
        error = await decode.refused(request(lab, f"127.0.0.1:{port}"))
        assert isinstance(error, Unavailable)
    assert list(channels._open) == [f"127.0.0.1:{port}" for port in (4, 5, 6)]
    await require_served(lab)


async def test_prefill_refuses_commands_that_make_no_sense(lab, stubs):
    _, prefill = stubs
    start = worker_pb2.PrefillCommand(ticket=ticket_to_proto(ticket(lab)))
    renew = worker_pb2.PrefillCommand(renew=worker_pb2.LeaseRenew(handoff_id=b"nobody's, really"))
    release = worker_pb2.PrefillCommand(release=worker_pb2.LeaseRelease(handoff_id=b"nobody's, really", suspect=True))
    for commands, kind in (
        ([renew], InvalidInput),
        ([release], InvalidInput),
        ([worker_pb2.PrefillCommand()], InvalidInput),
        ([], InvalidInput),
        ([start, start], InvalidInput),
        ([start, renew], NotFound),
        ([start, release], NotFound),
        ([start, worker_pb2.PrefillCommand()], InvalidInput),
    ):
        error = await refused(prefill.Prefill(iter_of(commands), timeout=20))
        assert isinstance(error, kind), (commands, error)
        await lab.until(lambda: not len(lab.prefill_engine.core.leases), "nothing is kept")
    await require_served(lab)


async def iter_of(commands):
    for command in commands:
        yield command


async def test_a_caller_that_only_listens_keeps_pages_until_the_lease_ends(subject):
    """It sent its ticket and closed its side: it cannot renew and cannot release."""
    async with cluster(subject, transfer__lease_ms=200) as lab:
        channel = open_channel(lab.prefill.endpoint)
        start = worker_pb2.PrefillCommand(ticket=ticket_to_proto(ticket(lab)))
        call = worker_pb2_grpc.PrefillServiceStub(channel).Prefill(iter_of([start]), timeout=20)
        events: list[str] = []
        error = await refused(call, lambda event: events.append(event.WhichOneof("event")))
        assert events == ["accepted", *["page"] * 5, "completed"]
        assert error.reason == "lease_expired"
        await channel.close(None)
        await require_served(lab)


async def test_a_lease_is_renewed_while_its_pages_wait_for_a_slow_pull(subject):
    async with cluster(subject, transfer__lease_ms=150) as lab:
        wait = threading.Event()
        lab.hooks.each_pull = lambda start, orders: wait.wait(1.0)
        await require_served(lab)


async def test_random_commands_never_hurt_a_worker(lab, stubs):
    decode, prefill = stubs
    rng = random.Random(9)
    good = ticket_to_proto(ticket(lab)).SerializeToString()

    def junk() -> worker_pb2.Ticket:
        while True:
            raw = bytearray(good)
            for _ in range(rng.randrange(1, 6)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            try:
                return worker_pb2.Ticket.FromString(bytes(raw))
            except Exception:
                continue

    async def one(i: int) -> GenlockError | None:
        if i % 2:
            message = worker_pb2.DecodeRequest(
                ticket=junk(), prefill_endpoint=lab.prefill.endpoint, prefill_worker="prefill-0"
            )
            return (await decode.run(message, 10))[1]
        commands = [worker_pb2.PrefillCommand(ticket=junk())]
        commands += [worker_pb2.PrefillCommand(renew=worker_pb2.LeaseRenew(handoff_id=rng.randbytes(16)))]
        call = prefill.Prefill(iter_of(commands), timeout=10)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return from_rpc(error)
        return None

    async with Neighbour(lab):
        for at in range(0, 120, 4):
            for error in await asyncio.gather(*(one(at + i) for i in range(4))):
                assert error is None or error.reason not in ("internal", "step_failed"), error
    await require_served(lab)


async def test_more_than_the_worker_holds_is_refused_and_the_rest_is_right(subject):
    async with cluster(subject, workers__max_running=2, workers__max_waiting=2, cache__decode_pages=256) as lab:
        channel = open_channel(lab.decode.endpoint)

        async def one(decode: Decoding, i: int) -> GenlockError | None:
            prompt = lab.subject.prompt(f"many {i}", 70)
            message = request(lab, lab.prefill.endpoint, token_ids=prompt, ticket_id=bytes([i]) * 16,
                              sampling=SamplingParams(max_tokens=100, ignore_eos=True))  # fmt: skip
            tokens, error = await decode.run(message, 60)
            if error is None:
                assert tokens == [t.token_id for t in lab.wanted(prompt, max_tokens=100, ignore_eos=True)]
            return error

        async with decoding(worker_pb2_grpc.DecodeServiceStub(channel)) as decode:
            errors = await asyncio.gather(*(one(decode, i) for i in range(10)))
        told = [e for e in errors if e is not None]
        assert told
        assert len(told) < 10
        assert all(isinstance(e, NoCapacity) and e.reason == "decode_queue_full" for e in told)
        await channel.close(None)
