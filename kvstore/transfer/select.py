"""Engines by name, as configuration gives them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidInput, Unavailable
from kvstore.transfer.base import TransferEngine
from kvstore.transfer.common import PageDigester
from kvstore.transfer.mooncake import MooncakeEngine
from kvstore.transfer.nixl import NixlEngine
from kvstore.transfer.shm import ShmEngine

FIELD = "transfer.engine"


@dataclass(frozen=True)
class EngineChoice:
    """One engine that has a name; `unavailable` tells why it cannot be made on this host, "" if it can."""

    name: str
    unavailable: str


def available_engines() -> tuple[EngineChoice, ...]:
    """The engines that a worker can be configured with. Loads optional libraries to find out."""
    return (
        EngineChoice("shm", ""),
        EngineChoice("mooncake", MooncakeEngine.available() or ""),
        EngineChoice("nixl", NixlEngine.available() or ""),
    )


def make_engine(
    name: str,
    *,
    digester: PageDigester | None = None,
    host: str = "127.0.0.1",
    protocol: str = "tcp",
    device: str = "",
    nixl_transport: str = "auto",
) -> TransferEngine:
    """Makes a worker's engine. `host`, where the worker listens, is for mooncake and nixl, `protocol` and `device` are
    for mooncake, `nixl_transport` for nixl.

    Raises InvalidInput (field transfer.engine) for a name that is unknown, Unavailable when the engine's library
    cannot be loaded or started. The `memory` engine is made where its fabric is.
    """
    if name == "shm":
        return ShmEngine(digester)
    if name == "mooncake":
        reason = MooncakeEngine.available()
        if reason is not None:
            raise Unavailable("library_missing", reason, field=FIELD)
        return MooncakeEngine(host, protocol, device, digester)
    if name == "nixl":
        reason = NixlEngine.available()
        if reason is not None:
            raise Unavailable("library_missing", reason, field=FIELD)
        return NixlEngine(nixl_transport, digester, host=host)
    raise InvalidInput("unknown_engine", f"transfer.engine {name!r} is unknown; use shm, mooncake or nixl", field=FIELD)
