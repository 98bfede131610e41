"""The clients of a chaos run see how a stream ends, also when it does not; faults are healed whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from cluster.chaos import load
from cluster.chaos.faults import Saboteur
from cluster.chaos.load import Crowd
from cluster.chaos.plan import Ask, Behaviour, Fault, PlannedFault
from cluster.chaos.verdict import End, judge
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import inference_pb2_grpc

ANSWER = (7, 8, 9)


class Fake(inference_pb2_grpc.InferenceServiceServicer):
    """Answers ANSWER; `hangs`: never ends after the first token; `cuts`: ends without a word."""

    def __init__(self, *, hangs: bool = False, cuts: bool = False) -> None:
        self.hangs, self.cuts = hangs, cuts
        self.aborted = asyncio.Event()

    async def Generate(self, request, context):
        yield pb.GenerateResponse(token_ids=ANSWER[:1])
        if self.hangs:
            await self.aborted.wait()
            await context.abort(grpc.StatusCode.CANCELLED, "aborted")
        if not self.cuts:
            yield pb.GenerateResponse(token_ids=ANSWER[1:], finished=pb.Finished())

    async def Abort(self, request, context):
        self.aborted.set()
        return pb.AbortResponse(aborted=1)


@asynccontextmanager
async def crowd_of(fake: Fake, deadline_s: float = 5.0):
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    crowd = Crowd(f"127.0.0.1:{port}", [(1, 2)], deadline_s)
    try:
        yield crowd
    finally:
        await crowd.close()
        await server.stop(None)


def ask(behaviour: Behaviour = Behaviour.READS, act_ms: int = 0) -> Ask:
    return Ask(0, 0, 0, len(ANSWER), behaviour, act_ms, "label")


@pytest.mark.parametrize("behaviour", [Behaviour.READS, Behaviour.SLOW])
async def test_a_whole_answer_is_seen_whole(behaviour: Behaviour):
    async with crowd_of(Fake()) as crowd:
        seen = await crowd.one(ask(behaviour, 5))
    assert judge(ANSWER, seen).end is End.OK


async def test_a_stream_without_an_end_is_hung(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(load, "HUNG_MARGIN_S", 0.05)
    async with crowd_of(Fake(hangs=True), deadline_s=0.15) as crowd:
        seen = await crowd.one(ask())
    assert judge(ANSWER, seen).end is End.HUNG


async def test_a_stream_that_ends_without_a_word_is_wrong():
    async with crowd_of(Fake(cuts=True)) as crowd:
        seen = await crowd.one(ask())
    assert judge(ANSWER, seen).end is End.WRONG


@pytest.mark.parametrize(
    ("behaviour", "end"),
    [(Behaviour.LEAVES, End.CANCELLED), (Behaviour.ABORTS, End.CANCELLED), (Behaviour.IMPATIENT, End.ERROR)],
)
async def test_a_caller_that_leaves_has_left_and_one_whose_deadline_passes_has_an_error(behaviour, end):
    async with crowd_of(Fake(hangs=True)) as crowd:
        seen = await crowd.one(ask(behaviour, 100))
    assert judge(ANSWER, seen).end is end


class Broken:
    """An arena and a link on which nothing works."""

    def halt(self, worker_id: str) -> None:
        raise RuntimeError("cannot stop it")

    def go_on(self, worker_id: str) -> None:
        return None

    def pair_ports(self, decode_id: str, prefill_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (1, 2), (3,)

    @contextlib.asynccontextmanager
    async def fault(self, near_ports, far_ports, kbit_per_s):
        raise RuntimeError("cannot cut it")
        yield


async def test_a_fault_that_cannot_be_is_told_and_nobody_stays_broken():
    broken = Broken()
    saboteur = Saboteur(broken, broken)  # type: ignore[arg-type] # what the faults below use of it
    await saboteur.carry_out(PlannedFault(0, Fault.LINK_CUT, "decode-1", 0, peer="prefill-0"))
    await saboteur.carry_out(PlannedFault(0, Fault.STOP, "decode-0", 0))
    assert ["cannot cut it" in saboteur.errors[0], "cannot stop it" in saboteur.errors[1]] == [True, True]
    assert not saboteur.done
    assert not saboteur.broken


async def test_a_worker_that_two_faults_hold_is_held_until_both_are_healed():
    class Arena(Broken):
        def halt(self, worker_id: str) -> None:
            return None

    saboteur = Saboteur(Arena(), None)  # type: ignore[arg-type] # what the faults below use of it
    stops = [PlannedFault(0, Fault.STOP, "decode-0", for_ms) for for_ms in (1, 150)]
    first, second = [asyncio.create_task(saboteur.carry_out(stop)) for stop in stops]
    await first
    assert saboteur.broken == {"decode-0"}
    await second
    assert saboteur.broken == set()
    assert saboteur.done == {"stop": 2}


async def test_a_fault_of_the_link_is_of_the_pairs_ports_and_holds_both():
    class Linked(Broken):
        @contextlib.asynccontextmanager
        async def fault(self, near_ports, far_ports, kbit_per_s):
            seen.append((near_ports, far_ports, kbit_per_s, saboteur.broken))
            yield

    seen: list[object] = []
    saboteur = Saboteur(Linked(), Linked())  # type: ignore[arg-type] # what the fault below uses of it
    await saboteur.carry_out(PlannedFault(0, Fault.LINK_SLOW, "decode-1", 0, 256, peer="prefill-0"))
    assert seen == [((1, 2), (3,), 256, {"decode-1", "prefill-0"})]
    assert not saboteur.broken
