"""The service with a call and a context of our own: what happens within one turn of the loop, and with a client that
does not read."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cluster.gateway.choice import Choice, ChoiceSpec
from cluster.gateway.ends import Asked
from cluster.gateway.served import Sources, StreamChecks
from cluster.gateway.service import InferenceService
from cluster.gateway.state import GatewayState
from cluster.roles import Role
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.errors import DeadlineExceeded
from model.sampling import SamplingParams
from tests.support.decode_calls import ScriptedCall
from tests.support.fake_workers import VOCAB, ByteTokenizer, config, served_model, tokens


class Context:
    """A client that reads `reads` messages and then no more."""

    def __init__(self, reads: int) -> None:
        self.reads = reads

    def invocation_metadata(self):
        return ()

    def time_remaining(self):
        return None

    async def send_initial_metadata(self, metadata) -> None:
        pass

    async def write(self, message) -> None:
        if self.reads == 0:
            await asyncio.Event().wait()
        self.reads -= 1


def service(calls: list[ScriptedCall], **flags: object) -> InferenceService:
    state = GatewayState(
        config(**flags), served_model(), Sources(now_ms=lambda: 1.0, random_bytes=lambda count: b"\x01" * count)
    )
    for role in Role:
        state.add_worker(f"{role.value}-0", role, "127.0.0.1:1")
        status = worker_pb2.WorkerStatus(worker_id=f"{role.value}-0", role=role.value)
        state.set_fleet(state.fleet.answered(f"{role.value}-0", "127.0.0.1:1", status))
    left = iter(calls)
    state.open_decode = lambda *_args: next(left)
    return InferenceService(state)


def request(n: int = 1) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(n=n))


@pytest.mark.parametrize("reads", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_cancel_reaches_every_call_before_the_handler_is_through(reads: int, n: int):
    calls = [ScriptedCall(tokens("a"), tokens("b")) for _ in range(n)]
    task = asyncio.create_task(service(calls).Generate(request(n), Context(reads * 2 * n)))
    await asyncio.sleep(0.05)
    task.cancel()
    seen: list[bool] = []
    task.add_done_callback(lambda _task: seen.extend(call.cancelled for call in calls))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True] * n


@pytest.mark.parametrize(
    ("left_s", "cause"), [(None, "cancelled"), (0.0, "deadline_exceeded"), (-1.0, "deadline_exceeded")]
)
async def test_what_is_counted_of_an_end_is_what_is_told_of_it(left_s: float | None, cause: str):
    """grpc cancels the handler when the caller's deadline has passed, and also when the caller has left."""
    gateway = service([ScriptedCall(tokens("a"))])
    context = Context(9)
    remaining = iter([None, *[left_s] * 9])
    context.time_remaining = lambda: next(remaining)
    task = asyncio.create_task(gateway.Generate(request(), context))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [ended] = gateway._state.ended_requests._kept.values()
    assert (ended.outcome, gateway._state.outcomes) == (cause, {cause: 1})


async def test_a_client_that_does_not_read_meets_the_deadline():
    calls = [ScriptedCall(tokens("a"))]
    gateway = service(calls, api__default_deadline_ms=100)
    with pytest.raises(DeadlineExceeded):
        async with asyncio.timeout(5):
            await gateway.Generate(request(), Context(0))
    assert calls[0].cancelled
    assert gateway._state.outcomes == {"deadline_exceeded": 1}
    assert not gateway._state.running


async def test_a_stop_string_cancels_decode_before_its_message_leaves():
    call = ScriptedCall(tokens("abSTOPc"))
    sampling = SamplingParams(stop=("STOP",))
    spec = ChoiceSpec("r", "s", 0, True, Asked(sampling, 5, VOCAB, ()), "d")
    seat = SimpleNamespace(worker="p", waiting=False)
    choice = Choice(spec, call, ByteTokenizer(), StreamChecks(), lambda: 1.0, 0.0, seat)
    messages = []
    async for message in choice.messages():
        assert call.cancelled
        messages.append(message)
    assert [message.text for message in messages] == ["ab"]
    assert messages[0].finished.matched_stop == "STOP"
    assert not messages[0].finished.HasField("verification")
