"""What `genlock doctor` finds out about versions, transfer engines, Ray, the registry and its clock."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cluster.cli.doctor_finding import FAIL, OK, SKIP, WARN, Finding
from cluster.cli.doctor_probe import MOONCAKE, NIXL, RAY, Answer, ask
from wire.clocks import now_ms

if TYPE_CHECKING:
    from cluster.settings import Config

CONNECT_S = 3.0
CLOCK_LIMIT_MS = 1_000
SHOWN = ("torch", "ray", "grpcio", "protobuf", "numba", "redis")
# Engine, the modules of which one must be there, the question that loads it, the library's own needs.
LIBRARIES = (
    ("mooncake", ("mooncake",), MOONCAKE, "it needs libibverbs and libcurl: apt-get install libibverbs1 libcurl4"),
    ("nixl", ("nixl_cu12", "nixl_cu13"), NIXL, "install it anew, in the version that docs/dependencies.md names"),
)


def versions(_config: Config) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] == (3, 11)
    yield Finding("python", OK if good else FAIL, version, "" if good else "use Python 3.11")
    try:
        own, wanted = importlib.metadata.version("genlock"), importlib.metadata.requires("genlock") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("genlock", FAIL, "not installed", "pip install genlock")
        return
    yield Finding("genlock", OK, own)
    yield from judge_versions(wanted, {name: _installed(name) for name in names_of(wanted)})


def names_of(wanted: Sequence[str]) -> tuple[str, ...]:
    from packaging.requirements import Requirement

    return tuple(Requirement(text).name for text in wanted)


def judge_versions(wanted: Sequence[str], installed: Mapping[str, str]) -> Iterator[Finding]:
    """Installed versions ("" is none) against the requirements of the package's metadata. Those of an extra may be
    missing, but where they are there they count too."""
    from packaging.requirements import Requirement

    fitting = 0
    for requirement in map(Requirement, wanted):
        name, version = requirement.name, installed.get(requirement.name, "")
        extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if not version:
            if not extra:
                yield Finding(name, FAIL, "not installed", f"pip install '{name}{requirement.specifier}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            fix = f"pip install '{name}{requirement.specifier}'"
            yield Finding(name, WARN, f"{version}; genlock is made for {requirement.specifier}", fix)
        elif name in SHOWN:
            yield Finding(name, OK, version)
        else:
            fitting += 1
    yield Finding("other libraries", OK, f"{fitting} fit the versions that genlock is made for")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def engines(config: Config) -> Iterator[Finding]:
    """Loads each library, in a process of its own."""
    for name, modules, question, advice in LIBRARIES:
        chosen = config.transfer.engine == name
        there = any(importlib.util.find_spec(module) is not None for module in modules)
        yield judge_engine(name, chosen, ask(question) if there else None, advice)


def judge_engine(name: str, chosen: bool, answer: Answer | None, advice: str) -> Finding:
    """`answer` None: the library is not installed."""
    check = f"engine {name}"
    if answer is None:
        if not chosen:
            return Finding(check, SKIP, "not installed")
        return Finding(check, FAIL, "not installed", f"pip install 'genlock[{name}]'")
    why = answer.error or str(answer.value or "")
    if not why:
        return Finding(check, OK, "its library loads")
    return Finding(check, FAIL if chosen else WARN, f"its library is installed and does not load: {why[:300]}", advice)


def ray(config: Config) -> Iterator[Finding]:
    address = config.control.ray_address
    if importlib.util.find_spec("ray") is None:
        return  # `versions` says so
    if address == "local":
        yield Finding("ray cluster", OK, "control.ray_address is local: `genlock up` starts a Ray of its own")
        return
    answer = Answer(error=_unreachable(address)) if address != "auto" else Answer()
    if not answer.error:
        answer = ask(f"ADDRESS = {address!r}\n{RAY}")
    yield judge_ray(address, answer, ".".join(map(str, sys.version_info[:3])))


def _unreachable(address: str) -> str:
    """Why nobody answers at host:port; Ray itself would try for long."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), CONNECT_S):
            return ""
    except (OSError, ValueError) as error:
        return str(error)


def judge_ray(wanted: str, answer: Answer, python: str) -> Finding:
    """What a question about the Ray at `wanted` (host:port, or auto) found, judged by a process of this Python."""
    found = answer.value
    if not isinstance(found, dict):
        fix = "start Ray there, or set control.ray_address; where Ray has a token, RAY_AUTH_TOKEN or its file is needed"
        return Finding("ray cluster", FAIL, f"{wanted}: {answer.error}", fix)
    address, theirs = str(found.get("address") or ""), found.get("cluster") or {}
    if not address:
        detail = f"control.ray_address is {wanted}, and no Ray runs on this host"
        return Finding("ray cluster", FAIL, detail, "`ray start` on this host, or name another: control.ray_address")
    where = address if address == wanted else f"{wanted} is {address}"
    other = (str(theirs.get("ray_version", "")), str(theirs.get("python_version", "")))
    ours = (str(found.get("ours", "")), python)
    if not all(other):
        return Finding("ray cluster", WARN, f"{where} answers and does not say its version",
                       "see that it runs the Ray and the Python of this host")  # fmt: skip
    told = f"Ray {other[0]} with Python {other[1]}"
    if other != ours:
        return Finding("ray cluster", FAIL, f"{where} runs {told}, this host Ray {ours[0]} with Python {ours[1]}",
                       "Ray refuses to attach: install the same versions on both")  # fmt: skip
    return Finding("ray cluster", OK, f"{where} answers: {told}, as here")


def registry(config: Config) -> Iterator[Finding]:
    from cluster.registry.make import is_shared

    if not is_shared(config):
        yield Finding("registry", OK, "in memory: for one process; `genlock gateway` and `controller` need Redis")
        return
    import asyncio

    from cluster.registry.redis import RedisRegistry
    from kvstore.errors import GenlockError

    async def look() -> tuple[int, int, Finding]:
        store = RedisRegistry(config.registry)
        await store.open()
        try:
            before_ms, started = time.time() * 1000, now_ms()
            theirs_ms = await store.server_time_ms()
            clock = judge_clock(before_ms, now_ms() - started, theirs_ms)
            return len(await store.workers()), (await store.desired()).revision, clock
        finally:
            await store.close()

    try:
        workers, revision, clock = asyncio.run(look())
    except GenlockError as error:
        yield Finding("registry", FAIL, error.message[:200], "start Redis, or correct registry.*")
    else:
        yield Finding("registry", OK, f"{config.registry.url} answers: {workers} workers, revision {revision}")
        yield clock


def judge_clock(asked_ms: float, took_ms: float, theirs_ms: float) -> Finding:
    """This host's wall clock against the registry's, which was read at some time during the call."""
    ahead_ms = asked_ms + took_ms / 2 - theirs_ms
    words = f"{abs(ahead_ms):.0f} ms {'ahead of' if ahead_ms > 0 else 'behind'} the registry's, ±{took_ms / 2:.0f} ms"
    if abs(ahead_ms) - took_ms / 2 <= CLOCK_LIMIT_MS:
        return Finding("clock and registry", OK, words)
    fix = "run NTP on both; ages and event times will be wrong, tokens may be refused, pages stay safe"
    return Finding("clock and registry", WARN, words, fix)
