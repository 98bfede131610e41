"""The Redis registry and a real server that is killed, frozen, flushed, guarded, filled with rubbish."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cluster.cli import doctor_parts
from cluster.cli.doctor_finding import OK, WARN
from cluster.config import load
from cluster.registry import redis
from cluster.registry.records import Desired, Event, WorkerRecord
from cluster.registry.redis import RedisRegistry
from cluster.roles import Role
from kvstore.errors import Conflict, Unavailable
from tests.support.valkey import Valkey

RECORD = WorkerRecord("decode-0", Role.DECODE, "127.0.0.1:7001", 11, "aa")
EVENT = Event(1, "scale", "fleet", "alice", "2 → 3")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Valkey]:
    valkey = Valkey(tmp_path)
    await valkey.start()
    yield valkey
    valkey.kill()


@asynccontextmanager
async def opened(server: Valkey, **fields: object) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry(server.settings(**{"timeout_ms": 5000, **fields}))
    try:
        await registry.open()
        yield registry
    finally:
        await registry.close()


async def unreachable(work: Any) -> Unavailable:
    with pytest.raises(Unavailable) as caught:
        await work
    assert caught.value.reason == "registry_unreachable"
    return caught.value


async def test_every_call_says_unreachable_while_the_server_is_gone_and_works_when_it_is_back(server: Valkey) -> None:
    async with opened(server) as registry:
        await registry.put_worker(RECORD, 60_000)
        server.kill()
        calls: list[Callable[[], Any]] = [
            registry.open, lambda: registry.put_worker(RECORD, 1000), lambda: registry.remove_worker("decode-0", 11),
            registry.workers, registry.desired, lambda: registry.replace_desired(Desired(), 0),
            lambda: registry.append_event(EVENT), registry.events, registry.last_events,
            lambda: registry.remember("k", b"", 1000),
            lambda: registry.recall("k"),
        ]  # fmt: skip
        for call in calls:
            assert server.url in (await unreachable(call())).message
        await server.start()
        await registry.put_worker(RECORD, 60_000)
        assert await registry.workers() == (RECORD,)


async def test_a_connection_that_broke_is_made_again_within_one_call(server: Valkey) -> None:
    async with opened(server) as registry:
        await registry.put_worker(RECORD, 60_000)
        await server.restart()
        assert await registry.workers() == ()


async def test_a_server_that_hangs_costs_one_timeout(server: Valkey) -> None:
    async with opened(server, timeout_ms=100) as registry:
        server.freeze()
        error = await unreachable(registry.workers())
        assert "100 ms" in error.message or "Timeout" in error.message
        # More calls at once than there are places wait no longer either.
        results = await asyncio.gather(*(registry.workers() for _ in range(40)), return_exceptions=True)
        assert all(isinstance(result, Unavailable) for result in results)
        server.thaw()
    async with opened(server) as registry:
        assert await registry.workers() == ()


async def test_after_a_flush_no_revision_and_no_sequence_number_comes_again(server: Valkey) -> None:
    async with opened(server) as registry:
        used, numbers, last = [], [], Desired()
        for prefill in range(5):
            last = await registry.replace_desired(replace(last, prefill=prefill), last.revision)
            used.append(last.revision)
            numbers.append((await registry.append_event(EVENT)).sequence)
        await server.flush()
        assert await registry.desired() == Desired()
        with pytest.raises(Conflict):
            await registry.replace_desired(last, last.revision)
        again = await registry.replace_desired(last, 0)  # who saw the old state carries its revision
        assert again.revision > max(used)
        assert again.prefill == last.prefill
        await server.flush()
        await asyncio.sleep(0.05)  # the server's clock passes the few revisions that were ahead of it
        forgetful = await registry.replace_desired(Desired(prefill=1), 0)  # who did not is above the server's clock
        assert forgetful.revision > again.revision
        assert (await registry.append_event(EVENT)).sequence > max(numbers)


async def test_a_change_whose_answer_was_lost_is_carried_out_once(server: Valkey) -> None:
    async with opened(server) as registry:
        first = await registry.replace_desired(Desired(prefill=1), 0)
        real = registry._redis.eval
        lost = []

        async def losing(*args: object) -> object:
            answer = await real(*args)
            if not lost:
                lost.append(answer)
                raise RedisConnectionError("the answer was lost")
            return answer

        registry._redis.eval = losing
        second = await registry.replace_desired(replace(first, prefill=2), first.revision)
        assert len(lost) == 1
        assert await registry.desired() == second
        lost.clear()
        kept = await registry.append_event(EVENT)
        assert await registry.events() == (kept,)


async def test_what_cannot_be_read_is_passed_over_and_counted(server: Valkey) -> None:
    async with opened(server) as registry, server.client() as raw:
        await registry.put_worker(RECORD, 60_000)
        for name, text in (("a", b"\xff"), ("b", b"{}"), ("c", b'{"v":2,"worker_id":"c"}')):
            await raw.hset("{genlock}:workers", name, text)
            await raw.zadd("{genlock}:expiry", {name: 1e15})
        await raw.zadd("{genlock}:expiry", {"nobody": 1e15})
        assert await registry.workers() == (RECORD,)
        assert registry.skipped == 3
        kept = await registry.append_event(EVENT)
        await raw.xadd("{genlock}:events", {"event": "rubbish"})
        await raw.xadd("{genlock}:events", {"other": "rubbish"})
        assert await registry.events() == (kept,)
        assert await registry.last_events() == (kept,)
        assert registry.skipped == 7
        later = await registry.append_event(EVENT)
        assert later.sequence > kept.sequence
        # A rubbish record under a name does not keep the worker of that name away.
        named = replace(RECORD, worker_id="a")
        await registry.put_worker(named, 60_000)
        assert await registry.workers() == (named, RECORD)


async def test_a_wanted_state_that_cannot_be_read_is_replaced_and_a_later_release_s_is_not(server: Valkey) -> None:
    async with opened(server) as registry, server.client() as raw:
        first = await registry.replace_desired(Desired(prefill=1), 0)
        await raw.hset("{genlock}:desired", "state", "rubbish")
        assert await registry.desired() == Desired()
        assert registry.skipped == 1
        with pytest.raises(Conflict):
            await registry.replace_desired(Desired(), first.revision + 1)
        second = await registry.replace_desired(Desired(prefill=2), 0)
        assert second.revision > first.revision
        await raw.hset("{genlock}:desired", "state", '{"v":2}')
        with pytest.raises(Unavailable) as caught:
            await registry.desired()
        assert caught.value.reason == "registry_newer"
        with pytest.raises(Unavailable):
            await registry.replace_desired(Desired(), 0)
        with pytest.raises(Conflict):
            await registry.replace_desired(Desired(), 1)


async def test_a_key_of_another_kind_is_an_error_and_no_crash(server: Valkey) -> None:
    async with opened(server) as registry, server.client() as raw:
        for name in ("workers", "expiry", "desired", "events"):
            await raw.set(f"{{genlock}}:{name}", "a text")
        for call in (registry.workers, registry.desired, registry.events, lambda: registry.put_worker(RECORD, 1000)):
            assert "WRONGTYPE" in (await unreachable(call())).message


async def test_namespaces_do_not_see_each_other(server: Valkey) -> None:
    async with opened(server) as one, opened(server, namespace="two") as two:
        await one.put_worker(RECORD, 60_000)
        await one.replace_desired(Desired(prefill=1), 0)
        await one.append_event(EVENT)
        await one.remember("k", b"x", 60_000)
        assert (await two.workers(), await two.desired(), await two.events()) == ((), Desired(), ())
        assert await two.recall("k") is None


async def test_nothing_of_workers_and_answers_stays_for_ever(server: Valkey) -> None:
    async with opened(server) as registry, server.client() as raw:
        await registry.put_worker(RECORD, 1000)
        await registry.remember("k", b"x", 1000)
        for name in await raw.keys("*"):
            assert 0 < await raw.pttl(name) <= 61_000


async def test_the_password_is_needed_and_never_told(tmp_path: Path) -> None:
    server = Valkey(tmp_path, password="open-sesame")
    await server.start()
    try:
        async with opened(server, password="open-sesame") as registry:
            assert await registry.workers() == ()
        for password in ("", "wrong-word"):
            registry = RedisRegistry(server.settings(password=password))
            error = await unreachable(registry.open())
            assert "registry.password" in error.message
            assert "wrong-word" not in error.message
            await registry.close()
    finally:
        server.kill()


async def test_a_user_that_may_touch_this_namespace_alone(server: Valkey) -> None:
    """The rights that docs/registry.md tells."""
    async with server.client() as raw:
        rights = ["on", ">word", "~{genlock}:*", "-@all", "+@read", "+@write", "+@scripting", "+@connection", "+time"]
        await raw.execute_command("ACL", "SETUSER", "genlock", *rights)
    async with opened(server, username="genlock", password="word") as registry:
        await registry.put_worker(RECORD, 60_000)
        assert await registry.workers() == (RECORD,)
        await registry.replace_desired(Desired(prefill=1), 0)
        await registry.append_event(EVENT)
        await registry.remember("k", b"x", 1000)
    with pytest.raises(Unavailable):
        async with opened(server, username="genlock", password="word", namespace="another") as registry:
            await registry.put_worker(RECORD, 60_000)


async def test_a_unix_socket(tmp_path: Path) -> None:
    place = tmp_path / "valkey.sock"
    server = Valkey(tmp_path, ["--unixsocket", str(place)])
    await server.start()
    try:
        async with opened(server, url=f"unix://{place}") as registry:
            await registry.put_worker(RECORD, 60_000)
            assert await registry.workers() == (RECORD,)
    finally:
        server.kill()


async def test_sentinels_name_the_server(server: Valkey, tmp_path: Path) -> None:
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor fleet 127.0.0.1 {server.port} 1\n")
    sentinel = Valkey(tmp_path, first=[str(config), "--sentinel"])
    await sentinel.start()
    try:
        places = f"127.0.0.1:{sentinel.port}"
        async with opened(server, url="redis://fleet/0", sentinels=places) as registry:
            await registry.put_worker(RECORD, 60_000)
        async with opened(server) as direct:
            assert await direct.workers() == (RECORD,)
        unknown = RedisRegistry(server.settings(url="redis://nobody/0", sentinels=places))
        await unreachable(unknown.open())
        await unknown.close()
    finally:
        sentinel.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")
async def test_tls_checks_the_server_and_shows_a_certificate(server: Valkey, tmp_path: Path) -> None:
    """A real TLS end before the server, which is built without: it demands a client's certificate."""
    for name, subject in (("ca", "/CN=test ca"), ("other", "/CN=another ca")):
        _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", subject,
                 "-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem")  # fmt: skip
    (tmp_path / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=both ends",
             "-keyout", tmp_path / "end.key", "-out", tmp_path / "end.csr")  # fmt: skip
    _openssl("x509", "-req", "-in", tmp_path / "end.csr", "-CA", tmp_path / "ca.pem", "-CAkey", tmp_path / "ca.key",
             "-CAcreateserial", "-days", "2", "-extfile", tmp_path / "san", "-out", tmp_path / "end.pem")  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(tmp_path / "end.pem", tmp_path / "end.key")
    door = await asyncio.start_server(lambda r, w: _pipe(r, w, server.port), "127.0.0.1", 0, ssl=context)
    url = f"rediss://127.0.0.1:{door.sockets[0].getsockname()[1]}/0"
    ends = {"cert_file": str(tmp_path / "end.pem"), "key_file": str(tmp_path / "end.key")}
    async with opened(server, url=url, ca_file=str(tmp_path / "ca.pem"), **ends) as registry:
        await registry.put_worker(RECORD, 60_000)
        assert await registry.workers() == (RECORD,)
    for wrong in ({"ca_file": str(tmp_path / "other.pem"), **ends}, {"ca_file": str(tmp_path / "ca.pem")}):
        refused = RedisRegistry(server.settings(url=url, **wrong))
        await unreachable(refused.open())
        await refused.close()
    door.close()


async def test_decisions_are_bounded_where_they_are_kept_and_where_they_are_asked_for(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either bound would hide the other."""
    texts = [bytes([number]) for number in range(6)]
    async with opened(server) as registry:
        monkeypatch.setattr(redis, "MAX_DECISIONS", 4)
        for text in texts:
            await registry.append_decision(text)
        monkeypatch.setattr(redis, "MAX_DECISIONS", 100)
        assert await registry.last_decisions() == tuple(reversed(texts[2:]))
        monkeypatch.setattr(redis, "MAX_DECISIONS", 2)
        assert await registry.last_decisions() == tuple(reversed(texts[4:]))


async def test_the_doctor_asks_the_registry_for_its_time(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(flags={"registry.url": server.url}).config
    found = await asyncio.to_thread(lambda: {one.check: one for one in doctor_parts.registry(config)})
    assert {one.result for one in found.values()} == {OK}
    assert set(found) == {"registry", "clock and registry"}
    monkeypatch.setattr(doctor_parts.time, "time", lambda: 1_000.0)
    found = await asyncio.to_thread(lambda: {one.check: one for one in doctor_parts.registry(config)})
    assert found["clock and registry"].result == WARN


def _openssl(*args: object) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        finally:
            sink.close()

    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)
