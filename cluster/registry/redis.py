"""The registry in a Redis-protocol server (Redis 6.2 or later, Valkey), for more than one host.

Keys, all in one hash slot: {namespace}:workers, :expiry, :gateways, :gateway_expiry, :desired, :events,
:decisions, :answer:<digest>. See docs/registry.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cluster.registry import codec, scripts
from cluster.registry.base import Registry
from cluster.registry.records import Desired, Event, GatewayRecord, WorkerRecord
from cluster.registry.rules import (
    MAX_DECISIONS,
    MAX_EVENT_BATCH,
    MAX_GATEWAYS,
    MAX_KEYS,
    MAX_RECORDS,
    check_answer,
    check_decision,
    check_gateway,
    check_ttl,
    check_worker,
    revision_moved,
    too_many_gateways,
    too_many_keys,
    too_many_workers,
)
from cluster.settings import RegistryConfig
from kvstore.errors import InvalidInput, Unavailable

MAX_CALLS = 8  # at once; more wait
ATTEMPTS = 2
RETRY_PAUSE_S = 0.02

T = TypeVar("T")


class RedisRegistry(Registry):
    """Each call ends within `timeout_ms`, a second attempt included. Calls that change something carry a mark of their
    own, so that the second attempt does nothing where the first was carried out and only its answer was lost."""

    def __init__(self, config: RegistryConfig, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        """Raises InvalidInput where a file of the settings is not there. Connects with the first call."""
        self._config = config
        self._random_bytes = random_bytes
        self._timeout_s = config.timeout_ms / 1000
        self._redis: Any = _client(config)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._skipped = 0

    @property
    def skipped(self) -> int:
        return self._skipped

    async def open(self) -> None:
        await self._call(self._redis.ping)

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._redis.aclose()
        except (RedisError, OSError, TimeoutError):
            return  # it is gone already

    async def server_time_ms(self) -> float:
        """The server's wall clock, milliseconds since 1970."""
        seconds, microseconds = await self._call(self._redis.time)
        return float(seconds) * 1000 + float(microseconds) / 1000

    async def put_worker(self, record: WorkerRecord, ttl_ms: int) -> None:
        check_worker(record)
        check_ttl(ttl_ms)
        text = codec.encode_worker(record)
        kept = await self._eval(
            scripts.PUT_RECORD, ("workers", "expiry"),
            record.worker_id, text, ttl_ms, record.incarnation, record.started_ms, MAX_RECORDS,
        )  # fmt: skip
        if kept == -1:
            raise too_many_workers()

    async def remove_worker(self, worker_id: str, incarnation: int) -> None:
        await self._eval(scripts.REMOVE_WORKER, ("workers", "expiry"), worker_id, incarnation)

    async def workers(self) -> tuple[WorkerRecord, ...]:
        texts = await self._eval(scripts.RECORDS, ("workers", "expiry"))
        records = [self._read(partial(codec.decode_worker, text)) for text in texts]
        return tuple(sorted((r for r in records if r is not None), key=lambda record: record.worker_id))

    async def put_gateway(self, record: GatewayRecord, ttl_ms: int) -> None:
        check_gateway(record)
        check_ttl(ttl_ms)
        # A gateway has one life under its id: there is none to be superseded by.
        kept = await self._eval(
            scripts.PUT_RECORD, ("gateways", "gateway_expiry"),
            record.gateway_id, codec.encode_gateway(record), ttl_ms, 0, 0, MAX_GATEWAYS,
        )  # fmt: skip
        if kept == -1:
            raise too_many_gateways()

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        texts = await self._eval(scripts.RECORDS, ("gateways", "gateway_expiry"))
        records = [self._read(partial(codec.decode_gateway, text)) for text in texts]
        return tuple(sorted((r for r in records if r is not None), key=lambda record: record.gateway_id))

    async def desired(self) -> Desired:
        """Raises also Unavailable (`registry_newer`) where a later release has written it."""
        return (await self._stored())[0]

    async def replace_desired(self, wanted: Desired, expected_revision: int) -> Desired:
        writer = self._random_bytes(16).hex()
        text = codec.encode_desired(wanted)

        async def attempt(expected: int) -> tuple[bool, int]:
            done, revision = await self._eval(
                scripts.REPLACE_DESIRED, ("desired",), expected, wanted.revision, text, writer
            )
            return bool(done), int(revision)

        done, revision = await attempt(expected_revision)
        if not done and expected_revision == 0:
            # A state that cannot be read is as good as none: it must not stand in the way for ever.
            readable, kept = await self._stored()
            if readable.revision == 0 and kept == revision:
                done, revision = await attempt(revision)
        if not done:
            raise revision_moved(revision, expected_revision)
        return replace(wanted, revision=revision)

    async def append_event(self, event: Event) -> Event:
        writer, limit = self._random_bytes(16).hex(), self._config.event_limit
        sequence = await self._eval(scripts.APPEND, ("events",), codec.encode_event(event), writer, limit)
        return replace(event, sequence=int(sequence))

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        count = min(limit, MAX_EVENT_BATCH)
        if count < 1:
            return ()
        key, first = self._key("events"), f"{max(0, after) + 1}-0"
        return self._events(await self._call(lambda: self._redis.xrange(key, first, "+", count)))

    async def last_events(self, limit: int = 100) -> tuple[Event, ...]:
        count, key = min(limit, MAX_EVENT_BATCH), self._key("events")
        if count < 1:
            return ()
        return self._events(reversed(await self._call(lambda: self._redis.xrevrange(key, "+", "-", count))))

    async def append_decision(self, decision: bytes) -> None:
        check_decision(decision)
        writer = self._random_bytes(16).hex()
        await self._eval(scripts.APPEND, ("decisions",), decision, writer, MAX_DECISIONS)

    async def last_decisions(self, limit: int = 100) -> tuple[bytes, ...]:
        count, key = min(limit, MAX_DECISIONS), self._key("decisions")
        if count < 1:
            return ()
        entries = await self._call(lambda: self._redis.xrevrange(key, "+", "-", count))
        return tuple(fields[b"event"] for _entry_id, fields in entries if b"event" in fields)

    async def remember(self, key: str, answer: bytes, ttl_ms: int) -> bytes | None:
        check_answer(key, answer)
        check_ttl(ttl_ms)
        earlier: bytes | None = await self._eval(scripts.REMEMBER, (_answer_key(key),), answer, ttl_ms)
        return earlier

    async def recall(self, key: str) -> bytes | None:
        name = self._key(_answer_key(key))
        kept: bytes | None = await self._call(lambda: self._redis.get(name))
        return kept

    async def keys(self) -> Mapping[str, str]:
        kept = await self._call(lambda: self._redis.hgetall(self._key("keys")))
        return {digest.decode("ascii", "replace"): text.decode("utf-8", "replace") for digest, text in kept.items()}

    async def put_key(self, digest: str, record: str) -> None:
        name = self._key("keys")
        if int(await self._call(lambda: self._redis.hlen(name))) >= MAX_KEYS:
            raise too_many_keys()
        await self._call(lambda: self._redis.hset(name, digest, record))

    async def remove_key(self, digest: str) -> bool:
        return bool(await self._call(lambda: self._redis.hdel(self._key("keys"), digest)))

    # --- the server ---------------------------------------------------------------------------------------------

    def _events(self, entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> tuple[Event, ...]:
        """Those entries of the stream that can be read."""
        out = []
        for entry_id, fields in entries:
            text, sequence = fields.get(b"event", b""), int(entry_id.split(b"-")[0])
            out.append(self._read(partial(codec.decode_event, text, sequence)))
        return tuple(event for event in out if event is not None)

    async def _stored(self) -> tuple[Desired, int]:
        """What is wanted, and the revision that is kept even where the state cannot be read."""
        key = self._key("desired")
        revision, text = await self._call(lambda: self._redis.hmget(key, ["revision", "state"]))
        if revision is None and text is None:
            return Desired(), 0
        try:
            kept = int(revision)
        except (TypeError, ValueError):
            self._skipped += 1
            return Desired(), 0
        try:
            return codec.decode_desired(text or b"", kept), kept
        except InvalidInput as error:
            if error.reason == "record_newer":
                raise Unavailable(
                    "registry_newer",
                    f"what is wanted was written by a later release ({error.message}): update this one",
                ) from error
            self._skipped += 1
            return Desired(), kept

    def _read(self, decode: Callable[[], T]) -> T | None:
        try:
            return decode()
        except InvalidInput:
            self._skipped += 1
            return None

    def _key(self, name: str) -> str:
        return f"{{{self._config.namespace}}}:{name}"

    async def _eval(self, script: str, names: tuple[str, ...], *args: str | int | bytes) -> Any:
        keys = [self._key(name) for name in names]
        return await self._call(lambda: self._redis.eval(script, len(keys), *keys, *args))

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """One call within the limit. A connection that broke (the server was restarted) is tried once more."""
        left = ATTEMPTS
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                while True:
                    left -= 1
                    try:
                        return await work()
                    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                        if left == 0 or isinstance(error, AuthenticationError):
                            raise
                    await asyncio.sleep(RETRY_PAUSE_S)
        except (RedisError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Unavailable:
        detail = " ".join(str(error).split())[:200] or f"no answer within {self._config.timeout_ms} ms"
        hint = " (see registry.username and registry.password)" if isinstance(error, AuthenticationError) else ""
        return Unavailable(
            "registry_unreachable",
            f"the registry at {self._config.url} does not answer: {detail}{hint}",
            field="registry.url",
        )


def _answer_key(key: str) -> str:
    """Keys are callers' texts of any kind; a digest is short and holds nothing of them."""
    return f"answer:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _client(config: RegistryConfig) -> Any:
    """A client of the server, or of whichever server the sentinels name at the time."""
    parts = urlsplit(config.url)
    timeout_s = config.timeout_ms / 1000
    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Attempts are counted in one place, `RedisRegistry._call`.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    tls = _tls(config) if parts.scheme == "rediss" else {}
    options: dict[str, Any] = {
        **common,
        **tls,
        "username": config.username or None,
        "password": config.password or None,
        "db": _database(config),
    }
    if config.sentinels:
        places = [(host, int(port)) for host, port in (one.rsplit(":", 1) for one in config.sentinels.split(","))]
        # They may want a password of their own, and answer an unwanted one with an error.
        own = {**common, **tls, "password": config.sentinel_password or None}
        sentinel = Sentinel(places, sentinel_kwargs=own, **options)  # type: ignore[no-untyped-call]  # the library's own gap
        return sentinel.master_for(parts.hostname or "")
    if parts.scheme == "unix":
        return Redis(unix_socket_path=unquote(parts.path), **options)
    return Redis(host=parts.hostname or "", port=parts.port or 6379, **options)


def _database(config: RegistryConfig) -> int:
    parts = urlsplit(config.url)
    text = "" if parts.scheme == "unix" else parts.path.strip("/")
    if text and not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InvalidInput(
            "bad_setting", f"registry.url ends in {text[:40]!r}: must be a database number", field="registry.url"
        )
    return int(text or 0)


def _tls(config: RegistryConfig) -> dict[str, Any]:
    for field in ("ca_file", "cert_file", "key_file"):
        name = getattr(config, field)
        if name and not Path(name).is_file():
            raise InvalidInput("no_such_file", f"registry.{field}: {name} is no file", field=f"registry.{field}")
    return {
        "ssl": True,
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_ca_certs": config.ca_file or None,
        "ssl_certfile": config.cert_file or None,
        "ssl_keyfile": config.key_file or None,
    }
