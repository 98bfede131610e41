"""Where callers come from: a tenants file that is read again when it changes, keys in the registry that are revoked for
all gateways at once, tokens of an identity provider. What cannot be read anew leaves what was known in force, and says
so."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cluster.gateway.identity import TENANTS_FILE, Caller, authenticator_from, bearer_token, digest_of
from cluster.gateway.jwt_tokens import JwtTokens
from cluster.gateway.queueing import PRIORITIES
from cluster.registry.base import Registry
from kvstore.errors import GenlockError, InvalidInput, Unauthenticated
from kvstore.json_text import parse_json
from wire.ending import end_tasks
from wire.errors import surprise
from wire.loops import keep_going
from wire.watched import WatchedFiles

log = logging.getLogger("genlock.credentials")

FILE_LOOK_MS = 1_000.0
MAX_KEYS = 100_000


class TokenFile:
    """Callers of a tenants file; looks at the file's time once a second."""

    def __init__(self, path: str, now_ms: Callable[[], float]) -> None:
        """Raises InvalidInput (`bad_tenants_file`)."""
        self._path = path
        self._now_ms = now_ms
        self._looked_ms = now_ms()
        self._file = WatchedFiles(path)
        self._known = self._read()
        self.rejected = 0

    @property
    def callers(self) -> Mapping[bytes, Caller]:
        if self._now_ms() - self._looked_ms >= FILE_LOOK_MS:
            self._looked_ms = self._now_ms()
            if self._file.changed():
                try:
                    self._known = self._read()
                    log.info("tenants were read again: %d tokens", len(self._known))
                except InvalidInput as error:
                    self.rejected += 1
                    log.warning("tenants were not read again, the former ones hold: %s", error.message)
        return self._known

    def _read(self) -> Mapping[bytes, Caller]:
        return authenticator_from(TENANTS_FILE.text(self._path), self._path).callers


class RegistryKeys:
    """Callers whose keys the registry keeps. Without the registry the last view holds, revocations included."""

    def __init__(self, registry: Registry, poll_ms: int) -> None:
        self._registry = registry
        self._poll_ms = poll_ms
        self._task: asyncio.Task[None] | None = None
        self.callers: Mapping[bytes, Caller] = {}
        self.skipped = 0
        self.surprises = 0
        # Why the last look changed nothing; empty: it counted.
        self.error = ""

    async def start(self) -> None:
        await self.look()
        self._task = asyncio.create_task(keep_going(self._again, "keys of the registry", self._surprised), name="keys")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def look(self) -> None:
        """One look; a registry that does not answer, or answers what nobody expects, changes nothing. Told once, not at
        every look."""
        error = ""
        try:
            kept = await self._registry.keys()
            callers: dict[bytes, Caller] = {}
            skipped = 0
            for digest, text in list(kept.items())[:MAX_KEYS]:
                try:
                    callers[bytes.fromhex(digest)] = caller_from(text)
                except ValueError:
                    skipped += 1
            self.callers, self.skipped = callers, skipped
        except GenlockError as failure:
            error = failure.message
        except Exception as unexpected:
            self._surprised()
            error = f"internal error ({type(unexpected).__name__})"
            if error != self.error:
                surprise(unexpected, "keys of the registry")
        if error and error != self.error:
            log.warning("keys of the registry were not read, those that are known hold: %s", error)
        self.error = error

    async def _again(self) -> None:
        await asyncio.sleep(self._poll_ms / 1000)
        await self.look()

    def _surprised(self) -> None:
        self.surprises += 1


def key_record(
    key_id: str, tenant: str, *, operator: bool, created_ms: int, label: str = "", max_requests: int | None = None,
    max_priority: str = "high",
) -> str:  # fmt: skip
    """What the registry keeps of a key: never the key. Raises InvalidInput."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
        raise InvalidInput("bad_tenant", f"{tenant[:80]!r} must be 1 to 64 of letters, digits, . _ -", field="tenant")
    return json.dumps(
        {
            "v": 1, "id": key_id, "tenant": tenant, "operator": operator, "created_ms": created_ms,
            "label": label[:128], "max_requests": max_requests, "max_priority": max_priority,
        }
    )  # fmt: skip


def caller_from(text: str) -> Caller:
    """Raises ValueError for a record that cannot be read."""
    tree: Any = parse_json(text)
    if not isinstance(tree, dict) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", str(tree.get("tenant"))):
        raise ValueError("no tenant")
    operator = tree.get("operator") is True
    most = tree.get("max_requests")
    priority = PRIORITIES.get(str(tree.get("max_priority", "high")))
    if priority is None or (most is not None and (type(most) is not int or most < 0)):
        raise ValueError("bad limits")
    return Caller(tree["tenant"], operator, not operator, most, priority)


class Credentials:
    """All sources together, an Authenticator. A token is looked for in the file, then in the registry, then read as a
    token of the identity provider."""

    def __init__(
        self, file: TokenFile | None = None, keys: RegistryKeys | None = None, jwt: JwtTokens | None = None
    ) -> None:
        self._file = file
        self._keys = keys
        self._jwt = jwt

    @property
    def surprises(self) -> int:
        return sum(source.surprises for source in (self._keys, self._jwt) if source is not None)

    async def start(self) -> None:
        """Looks once at what is elsewhere, then again and again."""
        for source in (self._keys, self._jwt):
            if source is not None:
                await source.start()

    async def stop(self) -> None:
        for source in (self._keys, self._jwt):
            if source is not None:
                await source.stop()

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises Unauthenticated."""
        token = bearer_token(metadata)
        digest = digest_of(token)
        for source in (self._file, self._keys):
            known = source.callers.get(digest) if source is not None else None
            if known is not None:
                return known
        if self._jwt is not None and token.count(".") == 2:
            return self._jwt.caller(token)
        raise Unauthenticated("bad_credential", "the token is not known here")
