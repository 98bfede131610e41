"""Where a worker listens: the address of its own host, and the first free port of a short range that firewalls and
NetworkPolicies can name."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable

from kvstore.errors import InvalidInput, Unavailable

# The host's own address, found where the worker runs: one setting for workers on many hosts.
AUTO = "auto"
# Reserved for documents (RFC 5737). Connecting a datagram socket sends nothing; it only asks for the route.
_ANYWHERE = ("192.0.2.1", 9)

# Workers of one host look for theirs in the same range.
PORTS_TO_TRY = 64


def first_free(add: Callable[[str], int], host: str, first: int) -> int:
    """`add` listens at `host:port` and returns the port, or raises RuntimeError. `first` 0: any free port. Returns the
    port. Raises Unavailable (`port_taken`)."""
    last = min(first + PORTS_TO_TRY, 65_536) - 1 if first else 0
    for port in range(first, last + 1):
        try:
            return add(f"{host}:{port}")
        except RuntimeError:
            continue
    where = f"{host}:{first}" if last == first else f"{host}, ports {first} to {last}"
    raise Unavailable(
        "port_taken", f"cannot listen on {where}: set workers.port to another range", field="workers.port"
    )


def check_free(ports: Iterable[tuple[str, str, int]]) -> None:
    """`ports`: each setting with its host and port; 0 and less are none to check. Raises Unavailable (`port_taken`) for
    the first that somebody else has. It may still be taken later: this is so that nobody waits for nothing."""
    for setting, host, port in ports:
        if port <= 0:
            continue
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except OSError:
            continue  # the door itself says what is wrong with its host
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise Unavailable(
                    "port_taken",
                    f"cannot listen on {host}:{port} ({error.strerror}): stop what listens there, or choose another "
                    f"{setting} (0: any free one)",
                    field=setting,
                ) from error


def own_address(setting: str, field: str = "workers.host") -> str:
    """The address that a setting (`field`) means on this host: for `auto` that of its default route. Raises
    InvalidInput."""
    if setting != AUTO:
        return setting
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ANYWHERE)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidInput(
            "bad_setting", f"{field} is auto, and this host has no route ({error}): name its address",
            field=field,
        ) from error  # fmt: skip
