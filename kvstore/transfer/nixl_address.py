"""The address of a nixl pool, as it stands in an export."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict, dataclass

from kvstore.json_text import parse_json
from kvstore.transfer.common import refusing_address

NONCE_BYTES = 16
_MAX_ADDR = 1 << 63


@dataclass(frozen=True)
class NixlAddress:
    """How a peer's agent is loaded (`agent`, `metadata` base64) and where its region lies in its process (`base`).

    `sum` is over both: damaged metadata would break a connection that stands, and an agent of the library that has
    loaded a peer by half (1.5.1) can never load it again.
    """

    agent: str
    base: int
    nonce: str  # hex
    metadata: str
    sum: str  # hex

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def metadata_sum(agent: str, metadata: bytes) -> str:
    return hashlib.blake2b(agent.encode() + b"\0" + metadata, digest_size=8).hexdigest()


def parse_address(text: str) -> NixlAddress:
    """Raises InvalidInput (field export.address) for text that is no address of this engine."""
    with refusing_address("nixl"):
        address = NixlAddress(**parse_json(text))
        if type(address.base) is not int or not 0 < address.base < _MAX_ADDR:
            raise ValueError("base out of range")
        if not isinstance(address.agent, str) or not address.agent:
            raise ValueError("no agent")
        if len(bytes.fromhex(address.nonce)) != NONCE_BYTES:
            raise ValueError("nonce of another length")
        metadata = base64.b64decode(address.metadata, validate=True)
        if address.agent.encode() not in metadata:
            raise ValueError("the metadata are another agent's")
        if metadata_sum(address.agent, metadata) != address.sum:
            raise ValueError("the metadata are damaged")
        return address
