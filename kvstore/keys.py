"""Prefix keys: what a page's content *is*, as a keyed 256-bit hash chain over everything that shapes it.

key(page i) = BLAKE2b-256(key = root(tenant), previous key | token ids of page i), root = BLAKE2b-256(key = cluster
secret, identity | tenant). Two pages have one key only if tenant, model, tokenizer, layout, adapter and every token
up to the page's end are equal. Without the cluster's secret nobody can compute or guess a key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from kvstore.errors import InvalidInput
from kvstore.header import KEY_BYTES

MIN_SECRET_BYTES = 16


@dataclass(frozen=True)
class PrefixIdentity:
    """Everything but tenant and tokens that makes KV differ. A new field here changes every key."""

    model_revision: str
    tokenizer_digest: str
    layout_fingerprint: int
    adapter: str = ""


class PrefixKeyer:
    """Computes prefix keys of one model on one cluster."""

    def __init__(self, secret: bytes, identity: PrefixIdentity) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise InvalidInput(
                "weak_secret", f"cluster.secret needs at least {MIN_SECRET_BYTES} bytes", field="cluster.secret"
            )
        self._secret = hashlib.blake2b(secret, person=b"genlock-prefix").digest()
        self._identity = b"".join(
            _framed(str(getattr(identity, f.name)).encode(errors="surrogatepass")) for f in fields(PrefixIdentity)
        )

    def root(self, tenant: str) -> bytes:
        """32 bytes that every chain of this tenant starts from: the tenant's salt."""
        hasher = hashlib.blake2b(self._identity, key=self._secret, digest_size=KEY_BYTES)
        hasher.update(_framed(tenant.encode(errors="surrogatepass")))
        return hasher.digest()

    def extend(self, root: bytes, previous: bytes, token_ids: Sequence[int]) -> bytes:
        """The key of the page that follows `previous` (`root` for the first page) and holds `token_ids`."""
        if len(root) != KEY_BYTES or len(previous) != KEY_BYTES:  # else its bytes could stand for tokens
            raise InvalidInput("bad_prefix_key", f"a prefix key has {KEY_BYTES} bytes", field="previous")
        hasher = hashlib.blake2b(previous, key=root, digest_size=KEY_BYTES)
        hasher.update(np.asarray(token_ids, dtype="<i8").tobytes())
        return hasher.digest()

    def chain(self, tenant: str, token_ids: Sequence[int], page_tokens: int) -> tuple[bytes, ...]:
        """Keys of all pages of a prompt, the last page perhaps partial."""
        if page_tokens < 1:
            raise InvalidInput("bad_layout", "layout.page_tokens must be at least 1", field="layout.page_tokens")
        root = previous = self.root(tenant)
        keys: list[bytes] = []
        for start in range(0, len(token_ids), page_tokens):
            previous = self.extend(root, previous, token_ids[start : start + page_tokens])
            keys.append(previous)
        return tuple(keys)


def token_pages(token_ids: Sequence[int], page_tokens: int) -> tuple[bytes, ...]:
    """The token ids of each page of a prompt, the last page perhaps partial, 8 bytes an id."""
    raw, size = np.asarray(token_ids, dtype="<i8").tobytes(), 8 * page_tokens
    return tuple(raw[at : at + size] for at in range(0, len(raw), size))


def _framed(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw
