"""Engines by name, as configuration gives them."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidInput, Unavailable
from kvstore.transfer.base import TransferEngine
from kvstore.transfer.common import PageDigester
from kvstore.transfer.mooncake import MooncakeEngine
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
        EngineChoice("nixl", "not built yet"),
    )


def make_engine(
    name: str, *, digester: PageDigester | None = None, host: str = "127.0.0.1", protocol: str = "tcp", device: str = ""
) -> TransferEngine:
    """Makes a worker's engine. `host`, `protocol` and `device` are for engines that use a network.

    Raises InvalidInput (field transfer.engine) for a name that is unknown or not built, Unavailable when the
    engine's library cannot be loaded or started. The `memory` engine is made where its fabric is.
    """
    if name == "shm":
        return ShmEngine(digester)
    if name == "mooncake":
        reason = MooncakeEngine.available()
        if reason is not None:
            raise Unavailable("library_missing", reason, field=FIELD)
        return MooncakeEngine(host, protocol, device, digester)
    if name == "nixl":
        raise InvalidInput("not_built", "transfer.engine nixl is not built yet; use shm or mooncake", field=FIELD)
    raise InvalidInput("unknown_engine", f"transfer.engine {name!r} is unknown; use shm or mooncake", field=FIELD)
