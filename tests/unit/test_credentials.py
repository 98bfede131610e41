"""Who calls, from each source: live files, registry keys, tokens of an identity provider."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cluster.gateway.credentials import Credentials, RegistryKeys, TokenFile, key_record
from cluster.gateway.identity import Caller, Several, SingleTenant, authenticator_from, user
from cluster.gateway.jwt_tokens import JwtRules, JwtTokens
from cluster.launch.credentials import credentials_of
from cluster.registry.memory import MemoryRegistry
from kvstore.errors import InvalidInput, PermissionDenied, Unauthenticated
from tests.support.fake_workers import config


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("authorization", f"Bearer {token}")]


def sha(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def tenants(**tokens: str) -> str:
    return "tenants:\n" + "".join(f"  {name}: {{tokens_sha256: [{sha(token)}]}}\n" for name, token in tokens.items())


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms


def test_a_file_that_changes_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path, clock = tmp_path / "tenants.yaml", Clock()
    path.write_text(tenants(acme="one", umbrella="two"))
    known = Credentials(TokenFile(str(path), clock))
    assert known.caller(bearer("one")) == Caller("acme")
    path.write_text(tenants(umbrella="two-and-longer"))
    assert known.caller(bearer("one")) == Caller("acme"), "not looked at yet"
    clock.ms += 1000
    with pytest.raises(Unauthenticated):
        known.caller(bearer("one"))
    assert known.caller(bearer("two-and-longer")) == Caller("umbrella")
    path.write_text("tenants: {broken")
    clock.ms += 1000
    assert known.caller(bearer("two-and-longer")) == Caller("umbrella")
    path.unlink()
    clock.ms += 1000
    assert known.caller(bearer("two-and-longer")) == Caller("umbrella")


def test_operators_and_tenants_are_separate_roles() -> None:
    text = (
        f"tenants:\n  ops: {{tokens_sha256: [{sha('a')}], operator: true}}\n"
        f"  both: {{tokens_sha256: [{sha('b')}], operator: true, inference: true}}\n"
        f"  app: {{tokens_sha256: [{sha('c')}]}}\n"
    )
    known = authenticator_from(text, "file")
    with pytest.raises(PermissionDenied) as caught:
        user(known.caller(bearer("a")))
    assert caught.value.reason == "operator_only"
    assert user(known.caller(bearer("b"))).operator
    assert not user(known.caller(bearer("c"))).operator
    assert user(SingleTenant().caller([])).operator
    with pytest.raises(InvalidInput):
        authenticator_from(f"tenants: {{a: {{tokens_sha256: [{sha('a')}], operator: 1}}}}", "file")


async def test_a_key_of_the_registry_is_revoked_live_and_outlives_the_registry() -> None:
    registry = MemoryRegistry(lambda: 0.0)
    keys = RegistryKeys(registry, 1000)
    known = Credentials(keys=keys)
    await registry.put_key(sha("k1"), key_record("01", "acme", operator=False, created_ms=1, max_requests=3))
    await registry.put_key(sha("k2"), key_record("02", "ops", operator=True, created_ms=1))
    await registry.put_key(sha("k3"), "rubbish")
    await registry.put_key("no digest", key_record("04", "x", operator=False, created_ms=1))
    await known.start()
    try:
        assert known.caller(bearer("k1")) == Caller("acme", max_requests=3)
        assert known.caller(bearer("k2")) == Caller("ops", operator=True, inference=False)
        assert keys.skipped == 2
        assert await registry.remove_key(sha("k1"))
        assert not await registry.remove_key(sha("k1"))
        await keys.look()
        with pytest.raises(Unauthenticated):
            known.caller(bearer("k1"))

        async def away() -> None:
            from kvstore.errors import Unavailable

            raise Unavailable("registry_unreachable", "away")

        registry.keys = away  # type: ignore[assignment, method-assign]  # a registry that does not answer
        await keys.look()
        assert known.caller(bearer("k2")).tenant == "ops"
    finally:
        await known.stop()


def test_a_record_never_holds_the_key_and_names_bad_tenants() -> None:
    assert "secret" not in key_record("01", "acme", operator=False, created_ms=1)
    with pytest.raises(InvalidInput):
        key_record("01", "no spaces", operator=False, created_ms=1)


RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())


def jwks(**keys: object) -> bytes:
    out = []
    for name, key in keys.items():
        algorithm = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
        tree = json.loads(algorithm.to_jwk(key.public_key()))  # type: ignore[attr-defined]  # one of the two kinds
        out.append(
            {**tree, "kid": name, "alg": "RS256" if isinstance(key, rsa.RSAPrivateKey) else "ES256", "use": "sig"}
        )
    return json.dumps({"keys": out}).encode()


def token(key: object = RSA, kid: str = "r", alg: str = "RS256", **claims: object) -> str:
    body = {"iss": "https://id", "aud": "genlock", "exp": time.time() + 60, "tenant": "acme", **claims}
    return jwt.encode({k: v for k, v in body.items() if v is not None}, key, algorithm=alg, headers={"kid": kid})  # type: ignore[arg-type]


@pytest.fixture
def provider(tmp_path: Path) -> JwtTokens:
    path = tmp_path / "jwks.json"
    path.write_bytes(jwks(r=RSA, e=EC))
    return JwtTokens(JwtRules("https://id", "genlock", str(path)), time.monotonic)


def test_a_token_of_the_provider_names_tenant_and_role(provider: JwtTokens) -> None:
    known = Credentials(jwt=provider)
    assert known.caller(bearer(token())) == Caller("acme")
    assert known.caller(bearer(token(EC, "e", "ES256"))) == Caller("acme")
    operator = known.caller(bearer(token(genlock_role=["reader", "operator"])))
    assert operator == Caller("acme", operator=True, inference=False)
    assert known.caller(bearer(token(genlock_role="operator"))).operator


OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: token(exp=time.time() - 120),
        lambda: token(exp=None),
        lambda: token(iss="https://other"),
        lambda: token(aud="another"),
        lambda: token(aud=None),
        lambda: token(tenant=None),
        lambda: token(tenant="../acme"),
        lambda: token(tenant=7),
        lambda: token(OTHER),
        lambda: token(kid="unknown"),
        lambda: token(nbf=time.time() + 600),
        lambda: jwt.encode({"tenant": "acme"}, None, algorithm="none"),
        # The public key as a shared secret: the algorithm is the key's, not the token's.
        lambda: jwt.encode({"iss": "https://id", "aud": "genlock", "exp": time.time() + 60, "tenant": "acme"},
                           "x" * 64, algorithm="HS256", headers={"kid": "r"}),
        lambda: token()[:-4] + "AAAA",
        lambda: "a.b.c",
    ],
)  # fmt: skip
def test_a_token_that_does_not_hold_is_refused_and_not_quoted(provider: JwtTokens, bad) -> None:
    text = bad()
    with pytest.raises(Unauthenticated) as caught:
        Credentials(jwt=provider).caller(bearer(text))
    assert caught.value.reason == "bad_credential"
    assert text not in caught.value.message


async def test_keys_of_an_address_are_asked_again_and_kept_when_it_is_away() -> None:
    answers = [jwks(e=EC), OSError("away"), b"no json", jwks(r=RSA)]

    def fetch(_address: str) -> bytes:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    provider = JwtTokens(JwtRules("https://id", "genlock", "https://id/jwks"), time.monotonic, fetch)
    await provider.refresh()
    assert provider.caller(token(EC, "e", "ES256")).tenant == "acme"
    for _ in range(2):
        await provider.refresh()
        assert provider.caller(token(EC, "e", "ES256")).tenant == "acme"
    await provider.refresh()
    assert provider.caller(token()).tenant == "acme"
    with pytest.raises(Unauthenticated):
        provider.caller(token(EC, "e", "ES256"))


def test_several_sources_are_asked_in_turn(provider: JwtTokens) -> None:
    both = Several(authenticator_from(tenants(acme="one"), "file"), Credentials(jwt=provider))
    assert both.caller(bearer("one")).tenant == "acme"
    assert both.caller(bearer(token(tenant="umbrella"))).tenant == "umbrella"
    with pytest.raises(Unauthenticated):
        both.caller(bearer("nobody"))


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"auth__registry_keys": True}, "auth.registry_keys"),
        ({"auth__issuer": "https://id"}, "auth.jwks"),
        ({"auth__issuer": "https://id", "auth__jwks": "http://id.example/jwks"}, "auth.jwks"),
        ({"auth__issuer": "https://id", "auth__jwks": "/nowhere.json"}, "auth.jwks"),
        ({"api__tenants_file": "/nowhere.yaml"}, "api.tenants_file"),
    ],
)
def test_settings_that_cannot_work_are_named(flags: dict, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        credentials_of(config(**flags))
    assert caught.value.field == field


def test_no_source_means_one_tenant() -> None:
    assert credentials_of(config()) is None
