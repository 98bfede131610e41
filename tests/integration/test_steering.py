"""Where requests go and who waits, at both doors: affinity, limits of tenants, the waiting room, a drain."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from cluster.gateway.identity import authenticator_from
from genlock.v1 import inference_pb2 as pb
from kvstore.errors import DeadlineExceeded, InvalidInput, NoCapacity, PermissionDenied, Unavailable
from tests.support.fake_workers import echo, finished, hang, tokens
from tests.support.gateway_cluster import cluster, idle, prompt, read, refused, text_of
from tests.support.http_door import client_of, scripted


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TENANTS = f"""
tenants:
  acme: {{tokens_sha256: [{digest("acme")}], max_requests: 1, max_priority: normal}}
  zeta: {{tokens_sha256: [{digest("zeta")}]}}
"""


def bearer(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {tenant}"),)


class Turns:
    """A script: each request waits for its release, and the order in which they came is kept."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.release = asyncio.Semaphore(0)

    async def __call__(self, _fake, request):
        text = bytes(request.ticket.token_ids).decode()
        self.order.append(text.rstrip("\n").rpartition(":")[2])
        await self.release.acquire()
        yield tokens("x")
        yield finished(1)


async def waiting(env, count: int) -> None:
    async with asyncio.timeout(10):
        while len(env.state.waiting) != count:
            await asyncio.sleep(0.005)


ONE_PLACE = {"workers__max_running": 1, "workers__max_waiting": 0}


# --- affinity --------------------------------------------------------------------------------------------------------


async def test_requests_of_one_key_meet_at_one_worker_from_both_doors():
    async with scripted(echo, decoders=4) as env:
        used = set()
        for key in ("one", "two", "three", "four", "five"):
            before = [len(worker.seen) for worker in env.decoders]
            await read(env.stub.Generate(prompt(), timeout=10, metadata=(("x-session-affinity", key),)))
            field = prompt()
            field.session_affinity = key
            await read(env.stub.Generate(field, timeout=10, metadata=(("x-session-affinity", "not this"),)))
            await env.client.completions.create(model="toy", prompt="hello", extra_headers={"x-session-affinity": key})
            came = {w.worker_id: len(w.seen) - n for w, n in zip(env.decoders, before, strict=True) if len(w.seen) > n}
            assert list(came.values()) == [3], "all of one key went to one worker"
            used |= set(came)
        assert len(used) > 1
        await idle(env)


async def test_a_key_whose_worker_is_full_is_served_elsewhere():
    # A prefill worker is free again at the first token.
    async with cluster(hang, decoders=2, **ONE_PLACE) as env:
        key = (("x-session-affinity", "k"),)
        first = env.stub.Generate(prompt(), timeout=30, metadata=key)
        await first.read()
        second = env.stub.Generate(prompt(), timeout=30, metadata=key)
        await second.read()
        assert sorted(len(w.seen) for w in env.decoders) == [1, 1]
        first.cancel()
        second.cancel()
        await idle(env)


@pytest.mark.parametrize(
    ("metadata", "reason", "field"),
    [
        ((("x-session-affinity", "k" * 257),), "bad_session_affinity", "x-session-affinity"),
        ((("x-session-affinity", "a"), ("x-session-affinity", "b")), "bad_session_affinity", "x-session-affinity"),
        ((("x-priority", "urgent"),), "bad_priority", "x-priority"),
    ],
)
async def test_words_of_steering_that_are_none(metadata, reason: str, field: str):
    async with scripted() as env:
        error = await refused(env.stub.Generate(prompt(), timeout=5, metadata=metadata))
        assert (type(error), error.reason, error.field) == (InvalidInput, reason, field)
        assert env.decode.seen == []


# --- limits of tenants -----------------------------------------------------------------------------------------------


async def test_a_tenant_at_its_limit_is_refused_at_both_doors_and_another_is_served():
    async with scripted(hang, authenticator=authenticator_from(TENANTS, "t"), api__retry_after_ms=1234) as env:
        first = env.stub.Generate(prompt(), timeout=30, metadata=bearer("acme"))
        await first.read()
        error = await refused(env.stub.Generate(prompt(), timeout=5, metadata=bearer("acme")))
        assert (type(error), error.reason, error.retry_after_ms) == (NoCapacity, "tenant_full", 1234)
        async with client_of(env.url, "acme") as client:
            with pytest.raises(Exception) as caught:
                await client.completions.create(model="toy", prompt="x")
        response = caught.value.response
        assert (response.status_code, caught.value.code) == (429, "tenant_full")
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("2", "1234")
        others = [env.stub.Generate(prompt(), timeout=30, metadata=bearer("zeta")) for _ in range(3)]
        for call in others:
            await call.read()
        first.cancel()
        async with asyncio.timeout(5):
            while len(env.state.running) > 3:
                await asyncio.sleep(0.005)
        again = env.stub.Generate(prompt(), timeout=30, metadata=bearer("acme"))
        await again.read()
        for call in (again, *others):
            call.cancel()
        await idle(env)


async def test_the_settings_limit_is_of_tenants_that_have_none_of_their_own():
    async with cluster(hang, authenticator=authenticator_from(TENANTS, "t"), api__tenant_max_requests=2) as env:
        calls = [env.stub.Generate(prompt(), timeout=30, metadata=bearer("zeta")) for _ in range(2)]
        for call in calls:
            await call.read()
        error = await refused(env.stub.Generate(prompt(), timeout=5, metadata=bearer("zeta")))
        assert error.reason == "tenant_full"
        for call in calls:
            call.cancel()
        await idle(env)


async def test_a_priority_above_the_tenants_is_denied():
    async with scripted(echo, authenticator=authenticator_from(TENANTS, "t")) as env:
        high = (("x-priority", "high"),)
        error = await refused(env.stub.Generate(prompt(), timeout=5, metadata=(*bearer("acme"), *high)))
        assert (type(error), error.reason) == (PermissionDenied, "priority_not_allowed")
        assert text_of(await read(env.stub.Generate(prompt(), timeout=5, metadata=(*bearer("zeta"), *high)))) == "hello"
        async with client_of(env.url, "acme") as client:
            with pytest.raises(Exception) as caught:
                await client.completions.create(model="toy", prompt="x", extra_body={"priority": "high"})
        assert (caught.value.status_code, caught.value.code) == (403, "priority_not_allowed")
        await idle(env)


# --- the waiting room ------------------------------------------------------------------------------------------------


async def test_whoever_waits_is_served_by_priority_then_by_turns_of_tenants():
    script = Turns()
    tenants = authenticator_from(TENANTS.replace("max_requests: 1, ", ""), "t")
    async with scripted(script, authenticator=tenants, **ONE_PLACE, api__queue_ms=60_000) as env:
        calls = []

        async def ask(text: str, tenant: str, priority: str) -> None:
            metadata = (*bearer(tenant), ("x-priority", priority))
            calls.append(asyncio.create_task(read(env.stub.Generate(prompt(text), timeout=60, metadata=metadata))))

        await ask("first", "zeta", "low")
        async with asyncio.timeout(10):
            while not script.order:
                await asyncio.sleep(0.005)
        asked = (("z1", "zeta", "normal"), ("z2", "zeta", "normal"), ("a1", "acme", "normal"), ("l1", "acme", "low"))
        for count, (text, tenant, priority) in enumerate((*asked, ("h1", "zeta", "high")), 1):
            await ask(text, tenant, priority)
            await waiting(env, count)
        async with client_of(env.url, "acme") as client:
            http = asyncio.create_task(
                client.completions.create(model="toy", prompt="a2", extra_headers={"x-priority": "normal"})
            )
            await waiting(env, 6)
            for _ in range(7):
                script.release.release()
            await asyncio.gather(*calls, http)
        assert script.order == ["first", "h1", "z1", "a1", "z2", "a2", "l1"]
        await idle(env)


async def test_a_wait_ends_with_its_time_its_deadline_and_its_caller():
    async with cluster(hang, **ONE_PLACE, api__queue_ms=300, api__max_queued=2) as env:
        held = env.stub.Generate(prompt(), timeout=60)
        await held.read()
        error = await refused(env.stub.Generate(prompt(), timeout=30))
        assert (type(error), error.reason) == (NoCapacity, "decode_full")
        assert "waited 300 ms" in error.message
        late = await refused(env.stub.Generate(prompt(), timeout=0.1))
        assert isinstance(late, DeadlineExceeded)
        leaver, stayer = (env.stub.Generate(prompt(), timeout=30) for _ in range(2))
        readers = [asyncio.create_task(refused(call)) for call in (leaver, stayer)]
        await waiting(env, 2)
        full = await refused(env.stub.Generate(prompt(), timeout=30))
        assert (type(full), full.reason) == (NoCapacity, "waiting_room_full")
        leaver.cancel()
        await asyncio.gather(*readers)
        held.cancel()
        await idle(env)
        assert (len(env.state.waiting), len(env.decode.seen)) == (0, 1)


async def test_abort_ends_a_wait_and_the_next_one_is_served():
    script = Turns()
    async with cluster(script, **ONE_PLACE, api__queue_ms=60_000) as env:
        calls = [asyncio.create_task(read(env.stub.Generate(prompt("one"), timeout=60)))]
        async with asyncio.timeout(10):
            while not script.order:
                await asyncio.sleep(0.005)
        doomed = asyncio.create_task(refused(env.stub.Generate(prompt("two", request_id="doomed"), timeout=60)))
        await waiting(env, 1)
        calls.append(asyncio.create_task(read(env.stub.Generate(prompt("three"), timeout=60))))
        await waiting(env, 2)
        assert (await env.stub.Abort(pb.AbortRequest(request_id="doomed"))).aborted == 1
        assert (await doomed).reason == "aborted_by_caller"
        script.release.release()
        script.release.release()
        await asyncio.gather(*calls)
        assert script.order == ["one", "three"]
        await idle(env)


async def test_a_gateway_that_drains_refuses_at_both_doors_and_serves_those_who_wait():
    script = Turns()
    async with scripted(script, **ONE_PLACE, api__queue_ms=60_000) as env:
        calls = [asyncio.create_task(read(env.stub.Generate(prompt("one"), timeout=60)))]
        async with asyncio.timeout(10):
            while not script.order:
                await asyncio.sleep(0.005)
        calls.append(asyncio.create_task(read(env.stub.Generate(prompt("two"), timeout=60))))
        await waiting(env, 1)
        env.state.draining = True
        error = await refused(env.stub.Generate(prompt(), timeout=5))
        assert (type(error), error.reason) == (Unavailable, "draining")
        with pytest.raises(Exception) as caught:
            await env.client.completions.create(model="toy", prompt="x")
        assert (caught.value.status_code, caught.value.code) == (503, "draining")
        script.release.release()
        script.release.release()
        await asyncio.gather(*calls)
        assert script.order == ["one", "two"]
        await idle(env)


async def test_an_http_client_that_leaves_while_it_waits_is_forgotten_at_once():
    async with scripted(hang, **ONE_PLACE, api__queue_ms=60_000) as env:
        held = env.stub.Generate(prompt(), timeout=60)
        await held.read()
        leaver = asyncio.create_task(env.client.completions.create(model="toy", prompt="x", stream=True))
        await waiting(env, 1)
        leaver.cancel()
        await waiting(env, 0)
        async with asyncio.timeout(10):
            while len(env.state.running) != 1:
                await asyncio.sleep(0.005)
        assert len(env.decode.seen) == 1
        held.cancel()
        await idle(env)
