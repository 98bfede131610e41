"""A decode worker that tells what cannot be is not believed, at either door, however many answers there are, and the
request beside it is served. With the judge off, the lie is what the client gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from cluster.gateway.served import StreamChecks
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.errors import GenlockError, Unavailable
from tests.support.fake_workers import FakeWorker, echo, ended, finished, tokens
from tests.support.gateway_cluster import SCRIPTED, idle, prompt, read, refused
from tests.support.http_door import scripted

ON = StreamChecks()
LIES = {
    "length too early": [tokens("abc"), finished(3)],
    "stop after nothing": [finished(0, pb.FINISH_REASON_STOP)],
    "no reason": [tokens("abc"), finished(3, pb.FINISH_REASON_UNSPECIFIED)],
    "more cached than was asked": [tokens("abcdefgh"), finished(8)],
}  # fmt: skip
LIES["more cached than was asked"][1].finished.cached_tokens = 1_000_000
EACH = pytest.mark.parametrize("lie", LIES)


def lying(lie: str):
    async def script(fake: FakeWorker, request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
        honest = bytes(request.ticket.token_ids).endswith(b"honest")
        if honest:
            async for event in echo(fake, request):
                yield event
            return
        for event in LIES[lie]:
            yield event

    return script


@EACH
@pytest.mark.parametrize("n", [1, 2])
async def test_a_lie_ends_its_request_and_no_other(lie: str, n: int):
    async with scripted(lying(lie), checks=ON) as env:
        neighbour = asyncio.create_task(read(env.stub.Generate(prompt("honest", "r2", max_tokens=100), timeout=5)))
        error = await refused(env.stub.Generate(prompt("lie", n=n, max_tokens=8, min_tokens=0), timeout=5))
        assert (type(error), error.reason) == (Unavailable, "stream_protocol")
        with pytest.raises(openai.APIStatusError) as caught:
            await env.client.completions.create(model="toy", prompt="lie", n=n, max_tokens=8)
        assert (caught.value.status_code, caught.value.code) == (503, "stream_protocol")
        assert (await neighbour)[-1].finished.finish_reason == pb.FINISH_REASON_STOP
        await idle(env)
        assert dict(env.state.outcomes) == {"stream_protocol": 2, "ok": 1}


@EACH
async def test_control_with_the_judge_off_the_lie_is_what_the_client_gets(lie: str):
    async with scripted(lying(lie), checks=SCRIPTED) as env:
        told = (await read(env.stub.Generate(prompt("lie", max_tokens=8), timeout=5)))[-1].finished
        event = LIES[lie][-1].finished
        assert (told.finish_reason, told.usage.cached_tokens) == (event.finish_reason, event.cached_tokens)


async def test_an_answer_that_does_not_stop_at_max_tokens_is_ended_at_the_worker_too():
    async def script(_fake: FakeWorker, _request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
        while True:
            yield tokens("x")

    async with scripted(script, checks=SCRIPTED) as env:  # the session's bound does not depend on the judge
        error = await refused(env.stub.Generate(prompt("lie", max_tokens=5), timeout=5))
        assert (type(error), error.reason) == (Unavailable, "stream_protocol")
        assert await ended([env.decode], 1) == ["cancelled"]


async def test_reasons_that_workers_make_up_are_one_outcome():
    async def script(fake: FakeWorker, _request: worker_pb2.DecodeRequest) -> AsyncIterator[worker_pb2.DecodeEvent]:
        raise GenlockError(f"invented_{len(fake.seen)}", "the worker's own words")
        yield tokens("")

    async with scripted(script) as env:
        for at in range(1, 5):
            error = await refused(env.stub.Generate(prompt("x"), timeout=5))
            assert (error.reason, error.message) == (f"invented_{at}", "the worker's own words")
        assert dict(env.state.outcomes) == {"other": 4}
