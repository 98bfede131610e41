"""The settings' sources of callers, put together."""

from __future__ import annotations

import time

from cluster.gateway.credentials import Credentials, RegistryKeys, TokenFile
from cluster.gateway.jwt_tokens import JwtRules, JwtTokens
from cluster.registry.make import is_shared, registry_from
from cluster.settings import Config
from kvstore.errors import InvalidInput
from wire.clocks import now_ms


def credentials_of(config: Config) -> Credentials | None:
    """None where no source is named: then everybody who reaches the port is the one tenant. Raises InvalidInput."""
    auth, name = config.auth, config.api.tenants_file
    if not (name or auth.registry_keys or auth.issuer):
        return None
    return Credentials(TokenFile(name, now_ms) if name else None, _keys(config), _jwt(config))


def _keys(config: Config) -> RegistryKeys | None:
    if not config.auth.registry_keys:
        return None
    if not is_shared(config):
        raise InvalidInput(
            "no_shared_registry",
            "auth.registry_keys needs a registry that `genlock keys` reaches too: set registry.url to a Redis server, "
            "or use api.tenants_file",
            field="auth.registry_keys",
        )
    return RegistryKeys(registry_from(config, now_ms), config.registry.poll_ms)


def _jwt(config: Config) -> JwtTokens | None:
    auth = config.auth
    if not auth.issuer:
        return None
    if not auth.jwks:
        raise InvalidInput(
            "bad_setting", "auth.issuer needs its public keys: set auth.jwks to a file or an https address",
            field="auth.jwks",
        )  # fmt: skip
    local = ("http://127.0.0.1", "http://localhost", "http://[::1]")
    if auth.jwks.startswith("http://") and not auth.jwks.startswith(local):
        raise InvalidInput(
            "bad_setting", "auth.jwks must be an https address: who can change its answer can sign in as anybody",
            field="auth.jwks",
        )  # fmt: skip
    rules = JwtRules(auth.issuer, auth.audience, auth.jwks, auth.tenant_claim, auth.role_claim, auth.operator_role)
    return JwtTokens(rules, time.monotonic)
