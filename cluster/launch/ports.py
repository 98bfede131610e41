"""The port of a worker's server: the first free one of a short range, which firewalls and NetworkPolicies can name."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.errors import Unavailable

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
