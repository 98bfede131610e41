"""Who calls. A tenant comes from the credential and from nowhere else: no body and no other metadata names one."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from cluster.gateway.queueing import PRIORITIES, Priority
from cluster.strict_yaml import Tree, YamlReader, shown
from kvstore.errors import InvalidInput, PermissionDenied, Unauthenticated
from kvstore.files import FileReader

DEFAULT_TENANT = "default"
MAX_TOKEN_CHARS = 4096
MAX_TENANT_REQUESTS = 65_536
# Room for a hundred thousand tenants.
TENANTS_FILE = FileReader("bad_tenants_file", "api.tenants_file", limit=16 << 20)
TENANTS_TEXT = YamlReader(TENANTS_FILE.reason, TENANTS_FILE.field, None, TENANTS_FILE.limit, max_nodes=2_000_000)
_KEYS = frozenset({"tokens_sha256", "operator", "inference", "max_requests", "max_priority"})


@dataclass(frozen=True)
class Caller:
    tenant: str
    # May ask what concerns all tenants, and change the fleet.
    operator: bool = False
    # May use the model.
    inference: bool = True
    # Most requests of this tenant at once; None: what the settings say, 0: no limit of its own.
    max_requests: int | None = None
    # The highest priority that its requests may have.
    max_priority: Priority = Priority.HIGH


class Authenticator(Protocol):
    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """The caller behind a request's metadata. Raises Unauthenticated."""
        ...


class SingleTenant:
    """Everybody who reaches the port is the one tenant."""

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        return Caller(DEFAULT_TENANT, operator=True)


class BearerTenants:
    """`authorization: Bearer <token>`; only digests of tokens are known here."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        """`callers`: SHA-256 of a token -> who holds it."""
        self._callers = MappingProxyType(dict(callers))

    @property
    def callers(self) -> Mapping[bytes, Caller]:
        return self._callers

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        caller = self._callers.get(digest_of(bearer_token(metadata)))
        if caller is None:
            raise Unauthenticated("bad_credential", "the token is not known here")
        return caller


class Several:
    """The first of several that knows the caller."""

    def __init__(self, *sources: Authenticator) -> None:
        self._sources = sources

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Raises what the last one raises."""
        kept = tuple(metadata)
        for source in self._sources[:-1]:
            with contextlib.suppress(Unauthenticated):
                return source.caller(kept)
        return self._sources[-1].caller(kept)


def user(caller: Caller) -> Caller:
    """Raises PermissionDenied (`operator_only`) for a credential that is for the fleet alone."""
    if not caller.inference:
        raise PermissionDenied("operator_only", "this credential is for operators; the model needs a tenant's")
    return caller


def operator(caller: Caller) -> str:
    """The operator's name. Raises PermissionDenied (`not_an_operator`)."""
    if not caller.operator:
        raise PermissionDenied("not_an_operator", "this credential may not see or change the whole cluster")
    return caller.tenant


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The one token of a call. Raises Unauthenticated (`no_credential`)."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise Unauthenticated("no_credential", "send one `authorization: Bearer <token>`")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_CHARS:
        raise Unauthenticated("no_credential", "send one `authorization: Bearer <token>`")
    return token


def digest_of(token: str) -> bytes:
    """A look-up by digest tells nothing about how much of a token was right."""
    return hashlib.sha256(token.encode()).digest()


def authenticator_from(text: str, name: str) -> BearerTenants:
    """Reads a tenants file. Raises InvalidInput naming what is wrong.

    tenants:
      acme: {tokens_sha256: [<64 hex digits>, ...], max_requests: 32, max_priority: normal}
      ops: {tokens_sha256: [...], operator: true}

    All but the digests may be absent: no operator, `api.tenant_max_requests`, every priority. An operator may not use
    the model unless `inference: true` says so: the two are separate roles.
    """
    tree = TENANTS_TEXT.tree(text, name)
    callers: dict[bytes, Caller] = {}
    try:
        tenants = tree.get("tenants") if isinstance(tree, dict) else tree
        if not isinstance(tenants, dict):
            raise ValueError(f"tenants = {shown(tenants)} is no section")
        for tenant, entry in tenants.items():
            digests, caller = _digests(tenant, entry), _caller(tenant, entry)
            for digest in map(bytes.fromhex, digests):
                if digest in callers:
                    raise ValueError(f"a token of tenant {tenant!r} is there twice")
                callers[digest] = caller
    except ValueError as error:
        raise InvalidInput(
            "bad_tenants_file",
            f"{name}: {error}; expected "
            "`tenants: {name: {tokens_sha256: [64 hexadecimal digits], operator: false, max_requests: 32, "
            "max_priority: normal}}` with no token twice",
            field="api.tenants_file",
        ) from error
    if not callers:
        raise InvalidInput("bad_tenants_file", f"{name} names no token", field="api.tenants_file")
    return BearerTenants(callers)


def _digests(tenant: str, entry: Tree) -> list[str]:
    """Raises ValueError naming the tenant; digests are not shown."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
        raise ValueError(f"{shown(tenant)} is no name of a tenant")
    if not isinstance(entry, dict):
        raise ValueError(f"tenant {tenant!r} = {shown(entry)} is no section")
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"tenant {tenant!r} has {shown(unknown[0])}, which is no field")
    digests = entry.get("tokens_sha256")
    if not isinstance(digests, list):
        raise ValueError(f"tenant {tenant!r} has no list tokens_sha256")
    for digest in digests:
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise ValueError(f"a token of tenant {tenant!r} is no digest of 64 hexadecimal digits")
    return digests


def _caller(tenant: str, entry: Mapping[str, object]) -> Caller:
    """Raises ValueError naming the field."""
    most = entry.get("max_requests")
    if most is not None and (type(most) is not int or not 0 <= most <= MAX_TENANT_REQUESTS):
        raise ValueError(f"max_requests of tenant {tenant!r} is no number from 0 to {MAX_TENANT_REQUESTS}")
    named = entry.get("max_priority", "high")
    priority = PRIORITIES.get(named) if isinstance(named, str) else None
    if priority is None:
        raise ValueError(f"max_priority of tenant {tenant!r} is none of {', '.join(PRIORITIES)}")
    roles = {name: entry[name] for name in ("operator", "inference") if name in entry}
    for name, value in roles.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} of tenant {tenant!r} is neither true nor false")
    operator = bool(roles.get("operator", False))
    return Caller(tenant, operator, bool(roles.get("inference", not operator)), most, priority)
