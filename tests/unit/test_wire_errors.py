"""Typed errors survive the wire: class, reason, field, message and retry delay."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from kvstore.errors import Cancelled, DeadlineExceeded, GenlockError, InvalidInput, NoCapacity, StalePage, Unavailable
from wire.errors import (
    MAX_MESSAGE_CHARS,
    abort_with,
    as_genlock_error,
    error_classes,
    from_rpc,
    from_status,
    to_status,
)

ALL_CLASSES = sorted(error_classes().values(), key=lambda kind: kind.__name__)


def details_of(status: status_pb2.Status, kind: type) -> list:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


def test_the_walk_finds_the_tree():
    names = {kind.__name__ for kind in ALL_CLASSES}
    assert {"GenlockError", "StalePage", "CorruptPage", "PagePinned", "TransferTimeout", "NoCapacity"} <= names


@pytest.mark.parametrize("kind", ALL_CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_round_trips_through_a_status(kind: type[GenlockError]):
    error = kind("some_cause", "what happened: naïve ☃", field="ticket.token_ids")
    status = status_pb2.Status.FromString(to_status(error).SerializeToString())
    back = from_status(status)
    assert type(back) is kind
    assert (back.reason, back.message, back.field) == (error.reason, error.message, error.field)
    assert code_pb2.Code.Name(status.code) == kind.status


async def _call(handler) -> grpc.aio.AioRpcError:
    """Runs `handler(request, context)` behind a real server and returns the client's error."""
    server = grpc.aio.server()
    rpc = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Do": rpc}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t.T/Do")(b"", timeout=5)
            return caught.value
    finally:
        await server.stop(0)


async def test_every_error_round_trips_through_a_real_call():
    for kind in ALL_CLASSES:
        error = kind("some_cause", "what happened", field="a.b")

        async def handler(request, context, error=error):
            await abort_with(context, error)

        rpc_error = await _call(handler)
        back = from_rpc(rpc_error)
        assert type(back) is kind
        assert (back.reason, back.message, back.field) == ("some_cause", "what happened", "a.b")
        assert rpc_error.code().name == kind.status


async def test_retry_delay_and_long_message_survive_a_real_call():
    async def handler(request, context):
        await abort_with(context, NoCapacity("pool_full", "ü" * 20_000, retry_after_ms=1750))

    back = from_rpc(await _call(handler))
    assert isinstance(back, NoCapacity)
    assert back.retry_after_ms == 1750
    assert len(back.message) == MAX_MESSAGE_CHARS


def test_public_details_follow_the_richer_error_model():
    status = to_status(InvalidInput("bad_top_p", "top_p must be above 0", field="sampling_params.top_p"))
    (info,) = details_of(status, error_details_pb2.ErrorInfo)
    assert (info.domain, info.reason) == ("genlock", "bad_top_p")
    (bad,) = details_of(status, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == "sampling_params.top_p"
    assert details_of(status, error_details_pb2.RetryInfo) == []
    (retry,) = details_of(to_status(NoCapacity("full")), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 500


def test_a_lone_surrogate_does_not_break_the_status():
    status = to_status(InvalidInput("bad", "seen \ud800", field="f\udfff"))
    assert from_status(status).field == "f?"


def test_foreign_or_broken_details_are_not_ours():
    foreign = status_pb2.Status(code=code_pb2.ABORTED, message="x")
    foreign.details.add().Pack(
        error_details_pb2.ErrorInfo(domain="other", reason="stale", metadata={"kind": "StalePage"})
    )
    assert from_status(foreign) is None
    lying = to_status(StalePage("stale"))
    lying.code = code_pb2.UNAVAILABLE
    assert from_status(lying) is None
    broken = to_status(StalePage("stale"))
    broken.details[0].value = b"\xff\xff\xff"
    assert from_status(broken) is None


async def test_transport_errors_become_typed():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Do")(b"", timeout=5)
    gone = from_rpc(caught.value)
    assert (type(gone), gone.reason) == (Unavailable, "peer_unreachable")

    async def slow(request, context):
        await asyncio.sleep(30)

    server = grpc.aio.server()
    handlers = {"Do": grpc.unary_unary_rpc_method_handler(slow)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await channel.unary_unary("/t.T/Do")(b"", timeout=0.1)
    await server.stop(0)
    assert type(from_rpc(late.value)) is DeadlineExceeded


async def test_a_bug_in_a_handler_is_not_a_transport_error():
    async def handler(request, context):
        raise ValueError("the prompt was: secret")

    back = from_rpc(await _call(handler))
    assert (type(back), back.reason) == (GenlockError, "peer_internal")


def test_internal_surprises_do_not_quote_their_text():
    error = as_genlock_error(ValueError("the prompt was: secret"))
    assert (type(error), error.reason) == (GenlockError, "internal")
    assert "secret" not in error.message
    assert "ValueError" in error.message
    stale = StalePage("stale")
    assert as_genlock_error(stale) is stale
    assert type(as_genlock_error(asyncio.CancelledError())) is Cancelled


def test_a_message_that_is_too_large_is_its_senders_mistake():
    """grpc's status for it is that of a server without room, for which a caller would come again."""
    told = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), grpc.aio.Metadata(),
        "SERVER: Received message larger than max (10000027 vs. 4194304)",
    )  # fmt: skip
    error = from_rpc(told)
    assert isinstance(error, InvalidInput)
    assert error.reason == "body_too_large"
