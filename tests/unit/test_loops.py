"""Nothing that one turn of a background loop raises ends the loop: each of them, and that there is no other kind."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import cluster.gateway.jwt_tokens as jwt_tokens
from cluster.config import load
from cluster.control.room import RoomKeeper
from cluster.control.state import State
from cluster.gateway.credentials import Credentials, RegistryKeys, key_record
from cluster.gateway.fleet import Fleet, WorkerState
from cluster.gateway.jwt_tokens import JwtRules, JwtTokens
from cluster.gateway.poller import Poller
from cluster.gateway.watch import RegistryWatch
from cluster.openai.server import _renewal
from cluster.registry.heartbeat import Heartbeat
from cluster.registry.memory import MemoryRegistry
from cluster.registry.records import WorkerRecord
from cluster.roles import Role
from tests.support.control_world import World
from wire.ending import end_tasks
from wire.loops import keep_going

ROOT = Path(__file__).parents[2]
# Tasks that end with what they were made for, each by file and function that makes it. What one raises is heard by who
# waits for it; where nobody waits, the reason says what follows.
ENDING = {
    "cluster/cli/up.py serve": "a start and a stop of the command, awaited",
    "cluster/cli/up.py or_done": "a wait for a signal, awaited",
    "cluster/control/controller.py _spawn": "one action or question; both catch everything (_guarded, _ask)",
    "cluster/gateway/path.py _merged": "an answer's messages; what is raised goes through the queue",
    "cluster/gateway/poller.py _check_pairs": "one exchange of a page; it catches everything",
    "cluster/gateway/schemas.py _join": "schemas until nobody waits; each one's failure goes to its callers",
    "cluster/gateway/server.py _tell_health": "one change of the health service, told again with the next change",
    "cluster/gateway/sessions.py __init__": "a call to a worker; its end reaches each request, the next opens another",
    "cluster/gateway/sessions.py _run": "a call's writing half; its failure ends the call",
    "cluster/gateway/state.py retire_channel": "an end of a channel that nobody uses any more",
    "cluster/launch/ray_launcher.py _begin_watch": "a wait for a worker's end; it catches everything",
    "cluster/launch/up.py _load_all": "starts in a task group, awaited",
    "cluster/openai/app.py __call__": "a request and its watch, awaited",
    "cluster/openai/lobby.py connection_made": "one greeting; what is raised in it ends that connection",
    "cluster/openai/server.py start": "the HTTP server: where it ends its port is closed, and probes see it",
    "decode/pull.py run": "one handoff's halves, awaited together",
    "decode/pull.py _wait": "one handoff's end, awaited",
    "prefill/service.py _prefill": "one handoff's commands, awaited with the call",
    "wire/replies.py _begin": "a call's first bytes, awaited with it",
    "wire/session.py run": "a call's reading half, awaited with it",
    "wire/session.py _submit": "the start of one request; it catches everything",
}


def makers() -> Iterator[tuple[str, str]]:
    """Where tasks are made, and what the task runs."""
    for room in ("cluster", "wire", "prefill", "decode"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("cluster/chaos/", "cluster/selftest/")):
                continue  # not the product's own processes
            yield from ((f"{name} {function}", what) for function, what in _made(ast.parse(path.read_text()), ""))


def _made(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr in ("create_task", "ensure_future"):
        yield function, ast.unparse(node.args[0])
    for child in ast.iter_child_nodes(node):
        yield from _made(child, function)


def test_every_task_is_a_loop_that_goes_on_or_ends_with_what_it_is_for():
    found = list(makers())
    going_on = [where for where, what in found if what.startswith("keep_going(")]
    assert len(going_on) >= 8
    unknown = {where for where, what in found if not what.startswith("keep_going(")} - set(ENDING)
    assert not unknown, "make it a keep_going, or say why it ends"
    assert set(ENDING) <= {where for where, _what in found}, "entries that are no more"


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def going(turn, count: Callable[[], None] = lambda: None):
    task = asyncio.create_task(keep_going(turn, "a loop of a test", count, retry_s=0))
    try:
        yield task
    finally:
        await end_tasks([task])


async def test_a_surprise_costs_its_turn_and_is_told_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    raised = [ValueError("one"), ValueError("two"), None, KeyError("three"), None, None]
    counted, turned = [], []

    async def turn() -> None:
        turned.append(1)
        await asyncio.sleep(0)
        if (error := raised.pop(0) if raised else None) is not None:
            raise error

    async with going(turn, lambda: counted.append(1)) as task:
        await until(lambda: len(turned) > 8)
        assert not task.done()
    assert task.cancelled()
    assert len(counted) == 3
    said = [record.getMessage().split("\n")[0] for record in caplog.records if "a loop of a test" in record.message]
    assert said == [
        "internal error in a loop of a test: ValueError", "a loop of a test: well again",
        "internal error in a loop of a test: KeyError", "a loop of a test: well again",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(keep_going.__kwdefaults__, "retry_s", 0.01)


@contextlib.contextmanager
def provider(answers: list[bytes]) -> Iterator[tuple[str, list[int]]]:
    """An address that gives one answer to each connection, the last one for ever."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked = [0]

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                with caller:
                    caller.recv(4096)
                    asked[0] += 1
                    caller.sendall(answers.pop(0) if len(answers) > 1 else answers[0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/jwks", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def http(body: bytes, size: int | None = None) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (size or len(body)) + body


KEY = b'{"kty": "EC", "crv": "P-256", "kid": "%s", "alg": "ES256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"}'  # noqa: E501


def keys(name: bytes) -> bytes:
    return http(b'{"keys": [' + KEY % name + b"]}")


@pytest.mark.parametrize(
    "bad",
    [
        b"garbage\r\n\r\n", b"", http(b'{"keys"', 900), http(b"no json"), http(b"\xff"), http(b"[]"), http(b"{}"),
        http(b'{"keys": 3}'), http(b'{"keys": [3]}'), http(b'{"keys": [{"kty": 3}]}'), http(b'{"keys": null}'),
        http(b'{"keys": [{"kty": "EC", "kid": ["x"], "crv": {}}]}'), b"HTTP/1.1 500 no\r\n\r\n", http(b"[" * 100_000),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
async def test_keys_of_a_provider_are_read_again_after_any_answer(bad: bytes, monkeypatch, caplog):
    """The known ones hold meanwhile, and it is said once."""
    monkeypatch.setattr(jwt_tokens, "SOONEST_S", 0.01)
    monkeypatch.setattr(jwt_tokens, "REFRESH_S", 0.01)
    answers = [keys(b"old"), bad, bad, bad, keys(b"new")]
    with provider(answers) as (address, asked):
        tokens = JwtTokens(JwtRules("i", "a", address), time.monotonic)
        await tokens.start()
        assert set(tokens._keys) == {"old"}
        await until(lambda: asked[0] >= 3)
        assert set(tokens._keys) in ({"old"}, {"new"})
        await until(lambda: "new" in tokens._keys)
        await tokens.stop()
    assert tokens.surprises == 0
    assert sum("were not read" in record.message for record in caplog.records) == 1


async def test_keys_of_a_provider_are_read_again_after_a_surprise(monkeypatch, caplog):
    monkeypatch.setattr(jwt_tokens, "SOONEST_S", 0.01)
    monkeypatch.setattr(jwt_tokens, "REFRESH_S", 0.01)
    asked: list[str] = []

    def fetch(address: str) -> bytes:
        asked.append(address)
        if len(asked) < 4:
            raise RuntimeError("surprise")
        return keys(b"k").split(b"\r\n\r\n", 1)[1]

    tokens = JwtTokens(JwtRules("i", "a", "https://id/jwks"), time.monotonic, fetch)
    await tokens.start()
    await until(lambda: "k" in tokens._keys)
    await tokens.stop()
    assert tokens.surprises == Credentials(jwt=tokens).surprises == 3
    assert sum("internal error in" in record.message for record in caplog.records) == 1


async def test_a_provider_that_is_not_well_at_the_start_keeps_no_gateway_from_starting(monkeypatch):
    monkeypatch.setattr(jwt_tokens, "SOONEST_S", 0.01)
    monkeypatch.setattr(jwt_tokens, "REFRESH_S", 0.01)
    with provider([b"garbage\r\n\r\n", keys(b"k")]) as (address, _asked):
        tokens = JwtTokens(JwtRules("i", "a", address), time.monotonic)
        await tokens.start()
        await until(lambda: "k" in tokens._keys)
        await tokens.stop()


async def test_keys_of_the_registry_are_read_again_after_a_surprise():
    registry = MemoryRegistry(lambda: 0.0)
    given: list[object] = [RuntimeError("surprise"), {"zz": 3}, {"aa": None}, None]
    real = registry.keys

    async def answered() -> object:
        answer = given.pop(0) if given else await real()
        if isinstance(answer, Exception):
            raise answer
        return answer

    registry.keys = answered
    known = RegistryKeys(registry, poll_ms=1)
    await registry.put_key("ab" * 32, key_record("1", "acme", operator=False, created_ms=1))
    await known.start()
    await until(lambda: len(known.callers) == 1)
    await known.stop()
    assert known.surprises == Credentials(keys=known).surprises > 0


WORKER = WorkerRecord("decode-0", Role.DECODE, "h:1", 11, "aa")


def gateway_state(**fields: object) -> SimpleNamespace:
    state = SimpleNamespace(
        fleet=Fleet().added("decode-0", Role.DECODE, "h:1"), surprises=0, registry_health=None, arrived=0, waiting=(),
        sources=SimpleNamespace(now_ms=lambda: 0.0, random_bytes=bytes), peer_endpoint="",
        config=load(flags={"registry.poll_ms": 100, "workers.status_poll_ms": 100}).config,
        look_again=lambda: None, retire_channel=lambda _endpoint: None, set_asleep=lambda _asleep: None, **fields,
    )  # fmt: skip
    state.surprised = lambda: setattr(state, "surprises", state.surprises + 1)
    return state


async def test_the_registry_is_watched_on_after_a_surprise():
    raised = [RuntimeError("surprise")]
    registry = MemoryRegistry(lambda: 0.0)
    state = gateway_state()

    def set_fleet(fleet: Fleet) -> None:
        if raised:
            raise raised.pop()
        state.fleet = fleet

    state.set_fleet = set_fleet
    await registry.put_worker(WorkerRecord("decode-1", Role.DECODE, "h:2", 12, "aa"), 60_000)
    await registry.put_worker(WORKER, 60_000)
    watch = RegistryWatch(state, registry, lambda: 0)
    watch.start()
    await registry.put_worker(WorkerRecord("decode-2", Role.DECODE, "h:3", 13, "aa"), 60_000)
    await until(lambda: "decode-2" in state.fleet.workers)
    await watch.stop()
    assert state.surprises == 1


async def test_workers_are_asked_on_after_a_surprise():
    """Of one question, which makes that worker unreachable; and of a whole round."""
    asked: list[str] = []
    raised = [RuntimeError("surprise")]

    def stub(endpoint: str) -> object:
        asked.append(endpoint)
        raise RuntimeError("a surprise of the library")

    async def pause(_limit_ms: float) -> None:
        await asyncio.sleep(0.001)
        if raised:
            raise raised.pop()

    state = gateway_state(worker_stub=stub, pause=pause)
    state.set_fleet = lambda fleet: setattr(state, "fleet", fleet)
    poller = Poller(state)
    poller.start()
    await until(lambda: len(asked) > 3)
    await poller.stop()
    record = state.fleet.workers["decode-0"]
    assert record.state is WorkerState.UNREACHABLE
    assert record.detail == "internal error (RuntimeError)"
    assert state.surprises > 3


async def test_a_heart_beats_on_after_a_surprise(monkeypatch):
    registry = MemoryRegistry(lambda: 0.0)
    beat = Heartbeat(registry, lambda: WORKER, 3, lambda: 0.0)
    real, raised = beat.beat, [RuntimeError("surprise")]

    async def beaten() -> None:
        if raised:
            raise raised.pop()
        await real()

    monkeypatch.setattr(beat, "beat", beaten)
    beat.start()
    await until(lambda: beat.state.beats > 2)
    await beat.stop()
    assert beat.surprises == 1


async def test_certificates_are_looked_at_on_after_a_surprise(monkeypatch):
    monkeypatch.setattr("cluster.openai.server.RENEW_S", 0.001)
    seen: list[int] = []

    def refresh(_context: object, generation: int) -> int:
        seen.append(generation)
        if len(seen) == 2:
            raise OSError("a library's surprise")
        return generation + 1

    tls = SimpleNamespace(current=lambda: SimpleNamespace(generation=7), refresh=refresh)
    async with going(_renewal(tls, None)):
        await until(lambda: len(seen) > 3)
    assert seen[:4] == [7, 8, 8, 9]


async def test_the_controller_goes_on_after_surprises_of_all_its_loops(monkeypatch):
    async with World() as world:
        controller = world.controller
        spawn, append = controller._spawn, world.registry.append_event
        broken = {"ask", "event"}

        def spawned(work, name: str):
            if name.startswith("ask ") and "ask" in broken:
                broken.remove("ask")
                work.close()
                raise RuntimeError("surprise")
            return spawn(work, name)

        async def appended(event):
            if event.kind == "test" and "event" in broken:
                broken.remove("event")
                raise TypeError(f"cannot be written: {event.message}")
            return await append(event)

        monkeypatch.setattr(controller, "_spawn", spawned)
        monkeypatch.setattr(world.registry, "append_event", appended)
        controller.record("test", "fleet", "one that cannot be written")
        controller.record("test", "fleet", "one that can")
        await until(lambda: not broken and not controller.events_waiting)
        assert [event.message for event in await world.registry.events() if event.kind == "test"] == ["one that can"]
        await world.settled()
        assert controller.surprises >= 2
        assert not [task for task in controller._loops if task.done()]


async def test_nodes_are_looked_at_on_after_a_surprise():
    looks: list[int] = []

    def look() -> State:
        looks.append(1)
        raise RuntimeError("surprise")

    keeper = RoomKeeper(None, MemoryRegistry(lambda: 0.0), look, lambda _text: None, 1)
    async with going(keeper.turn):
        await asyncio.sleep(0.01)
        assert not looks, "not before the first rows are known"
        keeper.wake()
        await until(lambda: len(looks) > 2)
