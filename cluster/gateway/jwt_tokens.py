"""Tokens of an OpenID Connect provider: signed, in time, for us, and naming a tenant. PyJWT is an optional extra.

Keys come from a file or from the provider's JWKS address; the address is asked again every few minutes, and sooner for
a key that is not known, never more often than every half minute. Only asymmetric signatures are taken.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib
import logging
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.gateway.identity import Caller
from kvstore.errors import InvalidInput, Unauthenticated
from kvstore.files import FileReader
from kvstore.json_text import parse_json
from wire.ending import end_tasks
from wire.errors import surprise
from wire.loops import keep_going

log = logging.getLogger("genlock.credentials")

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
REFRESH_S = 300.0
SOONEST_S = 30.0
FETCH_S = 5.0
MAX_JWKS_BYTES = 1 << 20
JWKS_FILE = FileReader("bad_jwks", "auth.jwks", limit=MAX_JWKS_BYTES)
LEEWAY_S = 30


@dataclass(frozen=True)
class JwtRules:
    """What a token must say. `jwks`: path of a file, or an https address."""

    issuer: str
    audience: str
    jwks: str
    tenant_claim: str = "tenant"
    role_claim: str = "genlock_role"
    operator_role: str = "operator"


class JwtTokens:
    def __init__(
        self, rules: JwtRules, now_s: Callable[[], float], fetch: Callable[[str], bytes] | None = None
    ) -> None:
        """`now_s`: a clock that does not go back. Raises InvalidInput without the library, or for a file that cannot be
        read; an address is asked at `start`."""
        try:
            self._jwt: Any = importlib.import_module("jwt")
        except ModuleNotFoundError as error:
            raise InvalidInput(
                "jwt_not_installed", "auth.issuer needs PyJWT: pip install 'genlock[oidc]'", field="auth.issuer"
            ) from error
        self._rules = rules
        self._now_s = now_s
        self._fetch = fetch or _fetch
        self._keys: Mapping[str, Any] = {}
        self._asked_s = -SOONEST_S
        # Why the keys were not read the last time; empty: they were.
        self.error = ""
        self.surprises = 0
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        if not self._remote:
            self._keys = self._read(self._file())

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(
            keep_going(self._again, "the identity provider's keys", self._surprised), name="jwks"
        )

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def refresh(self) -> None:
        """Reads the keys again; a failure of any kind leaves those that are known. Told once, not at every try."""
        self._asked_s = self._now_s()
        self._wanted.clear()
        try:
            if self._remote:
                data = await asyncio.get_running_loop().run_in_executor(None, self._fetch, self._rules.jwks)
            else:
                data = self._file()
            self._keys = self._read(data)
        # HTTPException: what answers is no HTTP server, or a proxy before it is not well.
        except (OSError, http.client.HTTPException, InvalidInput) as error:
            self._failed(f"{type(error).__name__}: {error}"[:256])
        except Exception as unexpected:
            self._surprised()
            said = f"internal error ({type(unexpected).__name__})"
            if said != self.error:
                surprise(unexpected, "the identity provider's keys")
            self._failed(said)
        else:
            if self.error:
                log.info("keys of the identity provider were read again")
            self.error = ""

    def _failed(self, error: str) -> None:
        if error != self.error:
            log.warning("keys of the identity provider were not read, those that are known hold: %s", error)
        self.error = error

    def _surprised(self) -> None:
        self.surprises += 1

    def caller(self, token: str) -> Caller:
        """Raises Unauthenticated (`bad_credential`)."""
        rules, jwt = self._rules, self._jwt
        try:
            key_id = str(jwt.get_unverified_header(token).get("kid", ""))
            key = self._keys.get(key_id)
            if key is None:
                self._wanted.set()
                raise Unauthenticated("bad_credential", "the token is signed with a key that is not known")
            claims = jwt.decode(
                token,
                key.key,
                algorithms=[key.algorithm_name],
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            # Its text may quote the token; the class says enough.
            raise Unauthenticated("bad_credential", f"the token does not hold: {type(error).__name__}") from None
        tenant = claims.get(rules.tenant_claim)
        if not isinstance(tenant, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
            raise Unauthenticated("bad_credential", f"the token names no tenant in {rules.tenant_claim}")
        roles = claims.get(rules.role_claim, [])
        if isinstance(roles, str):
            roles = [roles]
        operator = isinstance(roles, list) and rules.operator_role in roles
        return Caller(tenant, operator, not operator)

    @property
    def _remote(self) -> bool:
        return self._rules.jwks.startswith(("https://", "http://"))

    async def _again(self) -> None:
        try:
            async with asyncio.timeout(REFRESH_S):
                await self._wanted.wait()
        except TimeoutError:
            pass
        await asyncio.sleep(max(0.0, self._asked_s + SOONEST_S - self._now_s()))
        await self.refresh()

    def _file(self) -> bytes:
        return JWKS_FILE.data(self._rules.jwks)

    def _read(self, data: bytes) -> Mapping[str, Any]:
        """Key id -> key. Raises InvalidInput (`bad_jwks`)."""
        try:
            kept = self._jwt.PyJWKSet.from_dict(parse_json(data))
        except (ValueError, AttributeError, TypeError, self._jwt.PyJWTError) as error:
            raise InvalidInput("bad_jwks", f"{self._rules.jwks} holds no keys: {error}", field="auth.jwks") from error
        return {str(key.key_id): key for key in kept.keys if key.key_id and key.algorithm_name in ALGORITHMS}


def _fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=FETCH_S) as reply:
        data: bytes = reply.read(MAX_JWKS_BYTES + 1)
    if len(data) > MAX_JWKS_BYTES:
        raise OSError("more than a megabyte")
    return data
