"""The gateway over real gRPC, in front of scripted workers: answers, errors, ends, the fleet."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.gateway.server import Gateway
from genlock.v1 import inference_pb2 as pb
from genlock.v1 import operator_pb2
from kvstore.errors import (
    Cancelled,
    CorruptPage,
    DeadlineExceeded,
    GenlockError,
    NoCapacity,
    StalePage,
    Unavailable,
)
from tests.support.fake_workers import (
    CONTEXT_TOKENS,
    VOCAB,
    ByteTokenizer,
    config,
    ended,
    finished,
    hang,
    say,
    served_model,
    tokens,
)
from tests.support.gateway_cluster import (
    SCRIPTED,
    cluster,
    first_of,
    idle,
    prompt,
    read,
    refused,
    text_of,
)
from wire.errors import from_rpc


async def test_a_request_passes_and_tells_what_happened():
    script = say(tokens("he"), tokens("llo"), finished(5))
    async with cluster(script) as env:
        messages = await read(env.stub.Generate(prompt("hi", max_tokens=5, seed=7), timeout=5))
        assert [message.text for message in messages] == ["he", "llo", ""]
        assert [list(message.token_ids) for message in messages] == [list(b"he"), list(b"llo"), []]
        last = messages[-1].finished
        assert last.finish_reason == pb.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 5, 3)
        assert (last.timings.queue_ms, last.timings.prefill_ms, last.timings.transfer_ms) == (1.0, 2.0, 3.0)
        assert 0 < last.timings.first_token_ms <= last.timings.total_ms
        assert last.verification.pages_received == 2
        assert (last.decode_worker, last.prefill_worker) == ("decode-0", "prefill-0")
        assert {message.request_id for message in messages} == {"r1"}
        assert len({message.server_id for message in messages}) == 1
        ticket = env.decode.seen[0].request.ticket
        assert (ticket.tenant, bytes(ticket.token_ids), ticket.model_revision) == ("default", b"hi", "rev-1")
        assert len(ticket.ticket_id) == 16
        assert ticket.sampling.seed == 7
        assert env.decode.seen[0].request.prefill_endpoint == env.prefill.endpoint
        await idle(env)
        assert dict(env.state.outcomes) == {"ok": 1}


async def test_unary_mode_gives_one_message():
    async with cluster(say(tokens("he"), tokens("llo"), finished(5))) as env:
        messages = await read(env.stub.Generate(prompt(stream=False, logprobs=1), timeout=5))
        assert len(messages) == 1
        assert (messages[0].text, bytes(messages[0].token_ids)) == ("hello", b"hello")
        assert len(messages[0].logprobs) == 5
        assert messages[0].finished.usage.completion_tokens == 5


async def test_characters_are_never_cut():
    snow = "☃".encode()
    async with cluster(say(tokens(snow[:1]), tokens(snow[1:] + b"\xe2"), finished(4))) as env:
        messages = await read(env.stub.Generate(prompt(), timeout=5))
        assert [message.text for message in messages] == ["", "☃", "�"]
        assert [len(message.token_ids) for message in messages] == [1, 3, 0]


async def test_logprobs_carry_text():
    async with cluster(say(tokens("ab", top=1), finished(2))) as env:
        messages = await read(env.stub.Generate(prompt(logprobs=1), timeout=5))
        assert [entry.text for entry in messages[0].logprobs] == ["a", "b"]
        assert messages[0].logprobs[0].logprob == pytest.approx(-0.5)
        assert messages[0].logprobs[0].top[0].text == "a"
        assert not (await read(env.stub.Generate(prompt(), timeout=5)))[0].logprobs


async def test_a_stop_string_over_two_events_is_cut_and_ends_decode():
    async with cluster(say(tokens("abST"), tokens("OPxyz"), asyncio.sleep(60))) as env:
        messages = await read(env.stub.Generate(prompt(stop=["STOP"]), timeout=5))
        assert text_of(messages) == "ab"
        assert b"".join(bytes(message.token_ids) for message in messages) == b"ab"
        last = messages[-1].finished
        assert (last.finish_reason, last.matched_stop) == (pb.FINISH_REASON_STOP, "STOP")
        assert last.usage.completion_tokens == 6
        assert await ended([env.decode], 1) == ["cancelled"]
        await idle(env)
        assert dict(env.state.outcomes) == {"ok": 1}


async def test_a_held_stop_prefix_is_released_at_the_end():
    async with cluster(say(tokens("abST"), finished(4))) as env:
        messages = await read(env.stub.Generate(prompt(stop=["STOP"]), timeout=5))
        assert [message.text for message in messages] == ["ab", "ST"]
        assert messages[-1].finished.matched_stop == ""


async def test_n_answers_have_own_tickets_and_seeds():
    async with cluster(say(tokens("a"), tokens("b"), finished(2)), decoders=2) as env:
        messages = await read(env.stub.Generate(prompt(n=4, seed=11), timeout=5))
        assert sorted(message.index for message in messages if message.HasField("finished")) == [0, 1, 2, 3]
        assert [text_of(messages, index) for index in range(4)] == ["ab"] * 4
        tickets = [seen.request.ticket for worker in env.decoders for seen in worker.seen]
        assert len({ticket.ticket_id for ticket in tickets}) == 4
        seeds = {ticket.sampling.seed for ticket in tickets}
        assert len(seeds) == 4
        assert 11 in seeds
        assert [len(worker.seen) for worker in env.decoders] == [2, 2]
        await idle(env)
        assert dict(env.state.outcomes) == {"ok": 1}


async def test_one_failed_answer_of_n_ends_all():
    async def script(fake, request):
        yield tokens("a")
        if fake.worker_id == "decode-0":
            raise StalePage("stale_read", "page moved on")
        await asyncio.sleep(60)

    async with cluster(script, decoders=2) as env:
        error = await refused(env.stub.Generate(prompt(n=2), timeout=5))
        assert (type(error), error.reason) == (StalePage, "stale_read")
        assert sorted(await ended(env.decoders, 2)) == ["cancelled", "stale_read"]
        await idle(env)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (CorruptPage("digest_mismatch", "page is not what was sealed"), CorruptPage),
        (NoCapacity("no_pages", "no pages", retry_after_ms=900), NoCapacity),
        (Unavailable("prefill_gone"), Unavailable),
        (Cancelled("caller_gone"), Cancelled),
        (GenlockError("internal"), GenlockError),
    ],
)
async def test_errors_of_workers_reach_the_client_as_they_are(error: GenlockError, kind: type[GenlockError]):
    async with cluster(say(tokens("a"), error)) as env:
        back = await refused(env.stub.Generate(prompt(), timeout=5))
        assert (type(back), back.reason, back.message) == (kind, error.reason, error.message)
        if isinstance(error, NoCapacity):
            assert back.retry_after_ms == 900
        await idle(env)
        assert dict(env.state.outcomes) == {error.reason: 1}


async def test_a_cut_stream_is_never_a_clean_end():
    async with cluster(say(tokens("abc"))) as env:
        error = await refused(env.stub.Generate(prompt(), timeout=5))
        assert (type(error), error.reason) == (Unavailable, "stream_cut")
    # Negative control: without the check the cut answer looks complete.
    async with cluster(say(tokens("abc")), checks=replace(SCRIPTED, require_finished=False)) as env:
        messages = await read(env.stub.Generate(prompt(), timeout=5))
        assert messages[-1].finished.usage.completion_tokens == 3


async def test_lost_tokens_are_noticed():
    async with cluster(say(tokens("abc"), finished(4))) as env:
        assert (await refused(env.stub.Generate(prompt(), timeout=5))).reason == "tokens_lost"
    async with cluster(say(tokens("abc"), finished(4)), checks=replace(SCRIPTED, require_all_tokens=False)) as env:
        assert text_of(await read(env.stub.Generate(prompt(), timeout=5))) == "abc"


async def test_tokens_after_the_end_reach_nobody():
    async with cluster(say(tokens("a"), finished(1), tokens("b"))) as env:
        messages = await read(env.stub.Generate(prompt(), timeout=5))
        assert text_of(messages) == "a"
        assert messages[-1].finished.usage.completion_tokens == 1


async def test_client_cancel_reaches_decode():
    async with cluster(hang) as env:
        call = env.stub.Generate(prompt(), timeout=30)
        await call.read()
        # Prefill's part is over with the first token.
        assert set(env.state.ledger.loads) == {"decode-0"}
        call.cancel()
        assert await ended([env.decode], 1) == ["cancelled"]
        await idle(env)
        assert dict(env.state.outcomes) == {"cancelled": 1}


async def test_client_cancel_reaches_all_n():
    async with cluster(hang, decoders=2) as env:
        call = env.stub.Generate(prompt(n=3), timeout=30)
        await call.read()
        await asyncio.sleep(0.05)
        call.cancel()
        assert await ended(env.decoders, 3) == ["cancelled"] * 3
        await idle(env)


async def test_the_client_s_deadline_goes_to_decode():
    async with cluster(hang) as env:
        error = await refused(env.stub.Generate(prompt(), timeout=0.5))
        assert type(error) is DeadlineExceeded
        assert 0 < env.decode.seen[0].remaining_s < 0.6
        assert await ended([env.decode], 1) == ["cancelled"]
        await idle(env)
        assert dict(env.state.outcomes) == {"deadline_exceeded": 1}


async def test_a_default_deadline_holds_when_the_client_names_none():
    async with cluster(hang, api__default_deadline_ms=300) as env:
        error = await refused(env.stub.Generate(prompt()))
        assert (type(error), error.reason) == (DeadlineExceeded, "deadline_exceeded")
        assert env.decode.seen[0].remaining_s < 0.4
        await idle(env)
        assert dict(env.state.outcomes) == {"deadline_exceeded": 1}


async def test_a_far_deadline_is_cut_to_the_limit():
    async with cluster(hang, api__default_deadline_ms=200, api__max_deadline_ms=200) as env:
        assert type(await refused(env.stub.Generate(prompt(), timeout=3600))) is DeadlineExceeded
        assert env.decode.seen[0].remaining_s < 0.3


async def test_a_client_that_does_not_read_is_bounded_too():
    async def flood(_fake, _request):
        for _ in range(100_000):
            yield tokens("x" * 1000)

    room = {"context_tokens": 1 << 25, "api__default_max_tokens": 1 << 24}
    async with cluster(flood, api__default_deadline_ms=500, **room) as env:
        call = env.stub.Generate(prompt())
        await idle_later(env)
        assert await ended([env.decode], 1) == ["cancelled"]
        call.cancel()


async def idle_later(env) -> None:
    async with asyncio.timeout(5):
        while not env.state.running:
            await asyncio.sleep(0.005)
    await idle(env)


async def test_abort_by_label_ends_all_of_them_and_no_other():
    async with cluster(hang) as env:
        calls = [env.stub.Generate(prompt(request_id=label), timeout=30) for label in ("a", "a", "b")]
        rests = [await first_of(call) for call in calls]
        answer = await env.stub.Abort(pb.AbortRequest(request_id="a"), timeout=5)
        assert answer.aborted == 2
        for rest in rests[:2]:
            error = await refused(rest)
            assert (type(error), error.reason) == (Cancelled, "aborted_by_caller")
        assert len(env.state.running) == 1
        assert (await env.stub.Abort(pb.AbortRequest(request_id="none"), timeout=5)).aborted == 0
        calls[2].cancel()
        await idle(env)
        assert dict(env.state.outcomes) == {"aborted_by_caller": 2, "cancelled": 1}


async def test_too_many_requests_are_shed_with_a_delay():
    async with cluster(hang, api__max_requests=1, api__retry_after_ms=1234) as env:
        first = env.stub.Generate(prompt(), timeout=30)
        await first.read()
        error = await refused(env.stub.Generate(prompt(), timeout=5))
        assert (type(error), error.reason, error.retry_after_ms) == (NoCapacity, "gateway_full", 1234)
        assert len(env.decode.seen) == 1
        first.cancel()
        await idle(env)


async def test_full_workers_are_no_capacity():
    async with cluster(hang, workers__max_running=1, workers__max_waiting=0) as env:
        first = env.stub.Generate(prompt(), timeout=30)
        await first.read()
        error = await refused(env.stub.Generate(prompt(), timeout=5))
        assert (type(error), error.reason) == (NoCapacity, "decode_full")
        first.cancel()
        await idle(env)


async def test_without_workers_the_missing_role_is_named():
    async with cluster() as env:
        await env.prefill.stop()
        async with asyncio.timeout(5):
            while env.state.fleet.serving():
                await asyncio.sleep(0.01)
        error = await refused(env.stub.Generate(prompt(), timeout=5))
        assert (type(error), error.reason, error.field) == (Unavailable, "no_prefill_worker", "workers.prefill")


async def test_tokenize_and_model_info():
    async with cluster() as env:
        answer = await env.stub.Tokenize(pb.TokenizeRequest(text="hi"), timeout=5)
        assert (bytes(answer.token_ids), answer.context_tokens) == (b"hi", CONTEXT_TOKENS)
        info = await env.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
        assert (info.model, info.vocab_size, info.page_tokens, info.transfer_engine) == ("toy", VOCAB, 32, "shm")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await env.stub.Tokenize(pb.TokenizeRequest(text="hi", model="other"), timeout=5)
        assert from_rpc(caught.value).field == "model"


async def test_status_health_and_reflection():
    async with cluster() as env:
        health = health_pb2_grpc.HealthStub(env.channel)
        request = health_pb2.HealthCheckRequest(service="genlock.v1.InferenceService")
        assert (await health.Check(request, timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        await read(env.stub.Generate(prompt(), timeout=5))
        status = await env.operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=5)
        assert [(entry.worker_id, entry.state) for entry in status.workers] == [
            ("decode-0", "READY"),
            ("prefill-0", "READY"),
        ]
        assert status.workers[0].status.pool.pages == 10
        assert dict(status.outcomes) == {"ok": 1}
        env.decode.draining = True
        async with asyncio.timeout(5):
            while (await health.Check(request, timeout=5)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                await asyncio.sleep(0.01)
        status = await env.operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=5)
        assert status.workers[0].state == "DRAINING"
        assert (await refused(env.stub.Generate(prompt(), timeout=5))).reason == "no_decode_worker"
        reflected = reflection_pb2_grpc.ServerReflectionStub(env.channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        async for answer in reflected:
            names = {service.name for service in answer.list_services_response.service}
        assert {"genlock.v1.InferenceService", "genlock.v1.OperatorService", "grpc.health.v1.Health"} <= names


async def test_a_worker_that_comes_back_is_routed_again():
    async with cluster() as env:
        port = int(env.decode.endpoint.rpartition(":")[2])
        await env.decode.stop()
        async with asyncio.timeout(5):
            while env.state.fleet.serving():
                await asyncio.sleep(0.01)
        await env.decode.start(port)
        await env.gateway.wait_ready(5000)
        assert text_of(await read(env.stub.Generate(prompt("back"), timeout=5))) == "back"


async def test_a_dead_worker_ends_its_streams_as_unavailable():
    async with cluster(hang) as env:
        rest = await first_of(env.stub.Generate(prompt(), timeout=30))
        await env.decode.stop(0)
        error = await refused(rest)
        assert type(error) is Unavailable
        await idle(env)


async def test_a_stop_drains_then_cuts_with_an_error():
    release = asyncio.Event()

    async def script(_fake, request):
        yield tokens("a")
        if bytes(request.ticket.token_ids) == b"quick":
            await release.wait()
            yield finished(1)
        else:
            await asyncio.sleep(60)

    async with cluster(script) as env:
        quick = await first_of(env.stub.Generate(prompt("quick"), timeout=30))
        slow = await first_of(env.stub.Generate(prompt("slow"), timeout=30))
        stopping = asyncio.create_task(env.gateway.stop(500))
        await asyncio.sleep(0.05)
        assert (await refused(env.stub.Generate(prompt(), timeout=5))).reason == "draining"
        release.set()
        assert (await read(quick))[-1].HasField("finished")
        error = await refused(slow)
        assert (type(error), error.reason) == (Unavailable, "draining")
        await stopping
        assert await ended([env.decode], 2) == ["ok", "cancelled"]


async def test_a_taken_port_is_a_clear_error():
    async with cluster() as env:
        port = int(env.endpoint.rpartition(":")[2])
        second = Gateway(config(api__port=port), served_model(), env.state.sources)
        with pytest.raises(Unavailable) as caught:
            await second.start()
        assert (caught.value.reason, caught.value.field) == ("port_taken", "api.port")
        await second.stop()


class SlowTokenizer(ByteTokenizer):
    """Long texts wait until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        if len(text) > 3000:
            assert self.release.wait(10)
        return super().encode(text[:10])

    def bytes_of(self, token_id: int) -> bytes:
        """One token stands for much text, so that a long text may fit the context."""
        return b" " * 64 if token_id == VOCAB - 1 else super().bytes_of(token_id)


async def test_a_long_text_is_tokenized_beside_the_others():
    tokenizer = SlowTokenizer()
    async with cluster(tokenizer=tokenizer, api__max_requests=3) as env:
        slow = asyncio.create_task(read(env.stub.Generate(prompt("x" * 4000), timeout=10)))
        await asyncio.sleep(0.05)
        assert text_of(await read(env.stub.Generate(prompt("quick"), timeout=5))) == "quick"
        assert not slow.done()
        waiting = [asyncio.ensure_future(env.stub.Tokenize(pb.TokenizeRequest(text="y" * 4000))) for _ in range(2)]
        await asyncio.sleep(0.05)
        # Asking for tokens alone counts like any other request.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await env.stub.Tokenize(pb.TokenizeRequest(text="y"), timeout=5)
        assert from_rpc(caught.value).reason == "gateway_full"
        tokenizer.release.set()
        assert text_of(await slow) == "x" * 10
        assert [len((await call).token_ids) for call in waiting] == [10, 10]
        await idle(env)
        assert len((await env.stub.Tokenize(pb.TokenizeRequest(text="y"), timeout=5)).token_ids) == 1


async def test_a_client_that_leaves_while_its_text_is_tokenized_is_cancelled():
    tokenizer = SlowTokenizer()
    async with cluster(tokenizer=tokenizer) as env:
        call = env.stub.Generate(prompt("x" * 4000), timeout=10)
        await asyncio.sleep(0.1)
        call.cancel()
        await idle(env)
        tokenizer.release.set()
        assert dict(env.state.outcomes) == {"cancelled": 1}
        assert env.decode.seen == []
        tokenizer.release.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await env.stub.Tokenize(pb.TokenizeRequest(text="y" * 4000), timeout=0.3)
        assert type(from_rpc(caught.value)) is DeadlineExceeded
        tokenizer.release.set()
