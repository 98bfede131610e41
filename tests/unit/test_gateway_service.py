"""The service with a call and a context of our own: what happens within one turn of the loop, and with a client that
does not read."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from cluster.gateway.choice import Choice, ChoiceSpec
from cluster.gateway.ends import Asked
from cluster.gateway.identity import Caller
from cluster.gateway.served import Sources, StreamChecks
from cluster.gateway.service import InferenceService
from cluster.gateway.state import GatewayState
from cluster.roles import Role
from cluster.router import MAX_MOVES
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import worker_pb2
from kvstore.errors import DeadlineExceeded, InvalidInput, Unavailable
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


def service(calls: list[ScriptedCall], each: int = 1, **flags: object) -> InferenceService:
    """`each`: workers of a role."""
    state = GatewayState(
        config(**flags), served_model(), Sources(now_ms=lambda: 1.0, random_bytes=lambda count: b"\x01" * count)
    )
    for role, index in itertools.product(Role, range(each)):
        name, endpoint = f"{role.value}-{index}", f"127.0.0.1:{index + 1}"
        state.add_worker(name, role, endpoint)
        state.set_fleet(state.fleet.answered(name, endpoint, worker_pb2.WorkerStatus(worker_id=name, role=role.value)))
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
    spec = ChoiceSpec("r", "s", 0, True, Asked(sampling, 5, VOCAB, ()))
    seat = SimpleNamespace(worker="p", waiting=False)
    placed = SimpleNamespace(call=call, decode_worker="d", at=SimpleNamespace(seat=seat))
    choice = Choice(spec, placed, ByteTokenizer(), StreamChecks(), lambda: 1.0, 0.0, lambda _left: None)  # type: ignore[arg-type]
    messages = []
    async for message in choice.messages():
        assert call.cancelled
        messages.append(message)
    assert [message.text for message in messages] == ["ab"]
    assert messages[0].finished.matched_stop == "STOP"
    assert not messages[0].finished.HasField("verification")


async def test_a_schema_is_checked_for_the_tenant_of_the_credential():
    gateway = service([])
    asked: list[tuple[str, str]] = []

    async def check(tenant: str, schema: str) -> None:
        asked.append((tenant, schema))
        raise InvalidInput("bad_json_schema", "enough seen")

    gateway._state.schemas = SimpleNamespace(check=check)
    gateway._state.authenticator = SimpleNamespace(caller=lambda _metadata: Caller("acme"))
    params = pb.SamplingParams(json_schema='{"type": "object"}')
    with pytest.raises(InvalidInput):
        await gateway.Generate(pb.GenerateRequest(text="hello", sampling_params=params), Context(9))
    assert asked == [("acme", '{"type": "object"}')]


# --- a worker that drains turns an answer away ------------------------------------------------------------------------

DRAINING = Unavailable("draining", "this decode worker is draining")


class Sent:
    """What a gateway of two pairs sends, and what becomes of it."""

    def __init__(self, *calls: ScriptedCall, each: int = 2, **flags: object) -> None:
        self.gateway = service([], each=each, **flags)
        self.state = self.gateway._state
        numbers = itertools.count(1)
        self.state.sources = Sources(lambda: 1.0, lambda count: next(numbers).to_bytes(count, "little"))
        self.to: list[tuple[str, worker_pb2.DecodeRequest]] = []
        left = iter(calls)

        def send(endpoint: str, asked: worker_pb2.DecodeRequest, _again: object) -> ScriptedCall:
            self.to.append((endpoint, asked))
            return next(left)

        self.state.open_decode = send

    async def run(self, n: int = 1) -> Unavailable | None:
        asked = pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(n=n, max_tokens=1))
        try:
            async with asyncio.timeout(5):
                await self.gateway.Generate(asked, Context(99))
        except Unavailable as error:
            return error
        return None

    def idle(self) -> bool:
        return not self.state.ledger.loads


def whole() -> ScriptedCall:
    return ScriptedCall(tokens("a"), finished(1))


def finished(count: int) -> worker_pb2.DecodeEvent:
    return worker_pb2.DecodeEvent(
        finished=worker_pb2.DecodeFinished(finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=count)
    )


async def test_an_answer_that_a_draining_worker_turned_away_goes_to_another_pair_under_new_ids():
    sent = Sent(ScriptedCall(DRAINING), whole())
    assert await sent.run() is None
    [(first_at, first), (second_at, second)] = sent.to
    assert first_at != second_at
    assert first.prefill_worker != second.prefill_worker, "whichever it was, it is not asked again"
    assert first.ticket.ticket_id != second.ticket.ticket_id
    assert (first.ticket.token_ids, first.ticket.sampling) == (second.ticket.token_ids, second.ticket.sampling)
    [ended] = sent.state.ended_requests._kept.values()
    assert (ended.outcome, ended.request.decode_worker, ended.request.prefill_worker) == ("ok", "decode-1", "prefill-1")
    assert sent.state.metrics._turned_away._value.get() == 1
    assert sent.idle()


async def test_only_the_answer_that_was_turned_away_moves():
    sent = Sent(whole(), ScriptedCall(DRAINING), whole())
    assert await sent.run(2) is None
    assert len(sent.to) == 3
    assert (
        sent.to[1][1].ticket.sampling.seed == sent.to[2][1].ticket.sampling.seed != sent.to[0][1].ticket.sampling.seed
    )


async def test_an_answer_is_turned_away_so_often_and_no_more():
    sent = Sent(*(ScriptedCall(DRAINING) for _ in range(9)))
    error = await sent.run()
    assert error is not None
    assert error.reason == "draining"
    assert len(sent.to) == 1 + MAX_MOVES
    assert sent.idle()


async def test_without_another_pair_the_caller_is_told_that_it_drains():
    sent = Sent(ScriptedCall(DRAINING), whole(), each=1)
    error = await sent.run()
    assert (error and error.reason, len(sent.to)) == ("draining", 1)


@pytest.mark.parametrize("began", ["token", "started"])
async def test_an_answer_that_has_begun_is_nobody_elses(began: str):
    call = ScriptedCall(tokens("a"), DRAINING) if began == "token" else ScriptedCall(DRAINING)
    if began == "started":
        call.started = worker_pb2.DecodeStarted()
    sent = Sent(call, whole())
    error = await sent.run()
    assert (error and error.reason, len(sent.to)) == ("draining", 1)


@pytest.mark.parametrize("reason", ["stream_cut", "prefill_gone", "header_mismatch"])
async def test_no_other_failure_is_tried_again(reason: str):
    sent = Sent(ScriptedCall(Unavailable(reason)), whole())
    error = await sent.run()
    assert (error and error.reason, len(sent.to)) == (reason, 1)
