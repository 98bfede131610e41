"""Renewals, releases and cancels for what is not there: refused, counted by cause where Prometheus sees it, and nobody
else is touched."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from cluster.selftest.lab import Subject, load_subject
from genlock.v1 import worker_pb2, worker_pb2_grpc
from kvstore.errors import NotFound, StalePage
from model.sampling import SamplingParams
from model.ticket import Ticket
from tests.integration.test_edges_calls import refused
from tests.support.edge_lab import EdgeLab, Neighbour, require_served
from tests.support.telemetry_lab import telemetry_cluster
from wire.convert import ticket_to_proto
from wire.options import open_channel


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject("probe")


def ticket(lab: EdgeLab) -> worker_pb2.Ticket:
    info = lab.subject.model.info
    prompt = tuple(lab.subject.prompt("worker", 70))
    return ticket_to_proto(
        Ticket(os.urandom(16), "default", prompt, SamplingParams(max_tokens=4), info.revision, info.tokenizer_digest)
    )


def renew(handoff_id: bytes) -> worker_pb2.PrefillCommand:
    return worker_pb2.PrefillCommand(renew=worker_pb2.LeaseRenew(handoff_id=handoff_id))


def release(handoff_id: bytes) -> worker_pb2.PrefillCommand:
    return worker_pb2.PrefillCommand(release=worker_pb2.LeaseRelease(handoff_id=handoff_id, suspect=True))


async def one_handoff(stub: worker_pb2_grpc.PrefillServiceAsyncStub, lab: EdgeLab) -> bytes:
    """The id of a handoff that was carried through and released."""
    commands: asyncio.Queue[worker_pb2.PrefillCommand | None] = asyncio.Queue()
    commands.put_nowait(worker_pb2.PrefillCommand(ticket=ticket(lab)))

    async def sent():
        while (command := await commands.get()) is not None:
            yield command

    handoff_id = b""
    async for event in stub.Prefill(sent(), timeout=30):
        handoff_id = event.handoff_id
        if event.WhichOneof("event") == "completed":
            commands.put_nowait(worker_pb2.PrefillCommand(release=worker_pb2.LeaseRelease(handoff_id=handoff_id)))
            commands.put_nowait(None)
    return handoff_id


async def test_renewals_and_releases_of_unknown_finished_and_former_handoffs(subject):
    rng = random.Random(43)
    async with telemetry_cluster(subject, cache__decode_pages=256) as lab:
        channel = open_channel(lab.prefill.endpoint)
        former = await one_handoff(worker_pb2_grpc.PrefillServiceStub(channel), lab)
        await channel.close(None)
        await lab.restart_prefill()
        channel = open_channel(lab.prefill.endpoint)
        stub = worker_pb2_grpc.PrefillServiceStub(channel)
        finished = await one_handoff(stub, lab)
        life = lab.prefill.guard.incarnation
        names = [former, finished, b"", b"short", *(rng.randbytes(16) for _ in range(6))]
        commands = [make(name) for name in names for make in (renew, release)]
        async with Neighbour(lab):
            for command in commands:

                async def sent(command=command):
                    yield worker_pb2.PrefillCommand(ticket=ticket(lab))
                    yield command

                assert isinstance(await refused(stub.Prefill(sent(), timeout=20)), NotFound)
        scrape = await lab.scrape("prefill")
        assert scrape.by("genlock_refused_commands_total", "role", "cause") == {
            ("prefill", "unknown_handoff"): len(commands)
        }
        assert lab.prefill.guard.incarnation == life
        await require_served(lab)
        await channel.close(None)


async def test_a_renewal_that_comes_after_its_lease_ended_is_counted(subject):
    async with telemetry_cluster(subject) as lab:
        lab.prefill_engine.renew(b"ended long ago..")
        await lab.prefill_engine.loop.call(lambda: None)
        assert (await lab.scrape("prefill")).value("genlock_refused_commands_total", cause="unknown_handoff") == 1
        await require_served(lab)


async def test_cancels_of_unknown_and_finished_requests_and_a_number_that_is_taken(subject):
    async with telemetry_cluster(subject, cache__decode_pages=256) as lab:
        channel = open_channel(lab.decode.endpoint)
        commands: asyncio.Queue[worker_pb2.DecodeCommand | None] = asyncio.Queue()

        async def sent():
            while (command := await commands.get()) is not None:
                yield command

        def submit(call_no: int) -> None:
            request = worker_pb2.DecodeRequest(
                ticket=ticket(lab), prefill_endpoint=lab.prefill.endpoint, prefill_worker="prefill-0"
            )
            commands.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, submit=request))

        def cancel(call_no: int) -> None:
            commands.put_nowait(worker_pb2.DecodeCommand(call_no=call_no, cancel=worker_pb2.DecodeCancel()))

        async with Neighbour(lab):
            cancel(7)  # nobody's
            submit(1)
            ended: list[str] = []
            async for events in worker_pb2_grpc.DecodeServiceStub(channel).Session(sent(), timeout=30):
                ended += [
                    e.WhichOneof("event") for e in events.events if e.WhichOneof("event") in ("finished", "failed")
                ]
                if ended == ["finished"]:
                    cancel(1)  # finished
                    submit(2)
                    submit(2)  # taken
                    cancel(2)  # ended by the line above
                    commands.put_nowait(None)
                    ended.append("asked")
        assert ended == ["finished", "asked", "failed"]
        scrape = await lab.scrape("decode")
        assert scrape.by("genlock_refused_commands_total", "role", "cause") == {
            ("decode", "unknown_call"): 3, ("decode", "call_no_taken"): 1,
        }  # fmt: skip
        await require_served(lab)
        await channel.close(None)


async def test_a_request_whose_handoff_nobody_knows_is_a_failed_request_of_that_cause(subject):
    """Not a refused command: the first of the five ways to a wrong 200 must show in the counter that alerts read."""
    async with telemetry_cluster(subject) as lab:
        victim = lab.subject.prompt("victim", 70)

        def foreign(start, message):
            if start.ticket.token_ids == victim and message.WhichOneof("event") == "page":
                message.handoff_id = b"somebody else's."
            return [message]

        lab.hooks.each_event = foreign
        seen = await lab.see(victim, max_tokens=4)
        assert isinstance(seen.error, StalePage)
        assert (seen.error.reason, seen.tokens()) == ("unknown_handoff", [])
        await lab.idle()
        decode = await lab.scrape("decode")
        assert decode.by("genlock_worker_requests_total", "cause") == {("unknown_handoff",): 1}
        assert decode.by("genlock_refused_commands_total", "cause") == {}
        lab.hooks.each_event = None
        await require_served(lab)
