"""Who calls. A tenant comes from the credential and from nowhere else: no body and no other metadata names one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import yaml

from kvstore.errors import InvalidInput, Unauthenticated

DEFAULT_TENANT = "default"
MAX_TOKEN_CHARS = 4096


@dataclass(frozen=True)
class Caller:
    tenant: str
    # May ask what concerns all tenants.
    operator: bool = False


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

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        values = [value for key, value in metadata if key == "authorization"]
        if len(values) != 1 or not isinstance(values[0], str):
            raise Unauthenticated("no_credential", "send one `authorization: Bearer <token>`")
        scheme, _, token = values[0].partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated("no_credential", "send one `authorization: Bearer <token>`")
        # A look-up by digest tells nothing about how much of a token was right.
        caller = self._callers.get(hashlib.sha256(token.encode()).digest())
        if caller is None:
            raise Unauthenticated("bad_credential", "the token is not known here")
        return caller


def authenticator_from(text: str, name: str) -> BearerTenants:
    """Reads a tenants file. Raises InvalidInput naming what is wrong.

    tenants:
      acme: {tokens_sha256: [<64 hex digits>, ...], operator: false}
    """
    try:
        tree = yaml.safe_load(text)
        callers: dict[bytes, Caller] = {}
        for tenant, entry in tree["tenants"].items():
            unknown = set(entry) - {"tokens_sha256", "operator"}
            if unknown or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", tenant):
                raise ValueError(f"tenant {str(tenant)[:64]!r}")
            for digest in entry["tokens_sha256"]:
                if not re.fullmatch(r"[0-9a-fA-F]{64}", digest) or bytes.fromhex(digest) in callers:
                    raise ValueError(f"a token digest of tenant {tenant!r}")
                callers[bytes.fromhex(digest)] = Caller(tenant, bool(entry.get("operator", False)))
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(
            "bad_tenants_file",
            f"{name}: {' '.join(str(error).split())[:200]}; expected "
            "`tenants: {name: {tokens_sha256: [64 hexadecimal digits], operator: false}}` with no token twice",
            field="api.tenants_file",
        ) from error
    if not callers:
        raise InvalidInput("bad_tenants_file", f"{name} names no token", field="api.tenants_file")
    return BearerTenants(callers)
