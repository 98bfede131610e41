"""What `genlock doctor` says about listeners that others may reach. Pure but for a look at this host's interfaces."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cluster.cli.doctor_finding import OK, WARN, Finding

if TYPE_CHECKING:
    from cluster.settings import Config

FENCE = "let only workers reach its ports (NetworkPolicy, firewall)"


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def exposure(config: Config) -> Iterator[Finding]:
    """Listeners that anybody may reach."""
    found = list(judge(config, nixl_devices(config)))
    yield from found or [Finding("exposure", OK, "everything listens on this host alone")]


def judge(config: Config, devices: str | None) -> Iterator[Finding]:
    """`devices`: those that nixl will listen on, with commas between; "": all; None: that cannot be known here."""
    if not (is_loopback(config.api.host) and is_loopback(config.api.http_host)):
        if config.api.tenants_file or config.auth.registry_keys or config.auth.issuer:
            yield Finding("front door", OK, "listens beyond this host, and asks for credentials")
        else:
            fix = "set api.tenants_file, auth.registry_keys or auth.issuer, or listen on 127.0.0.1"
            yield Finding("front door", WARN, "listens beyond this host without credentials", fix)
    if not is_loopback(config.workers.host):
        yield Finding("worker ports", WARN, "workers listen beyond this host",
                      "keep them in a private network; docs/security.md")  # fmt: skip
    metrics = config.metrics
    if max(metrics.port, metrics.worker_port, metrics.controller_port) >= 0 and not is_loopback(metrics.host):
        yield Finding("metrics", WARN, "metrics listen beyond this host, and ask nobody who they are",
                      "keep them in a private network, or set metrics.host to 127.0.0.1")  # fmt: skip
    yield from _transfer(config, devices)
    if config.log.prompts:
        yield Finding("log.prompts", WARN, "prompts and answers go to the log", "turn it off after the debugging")


def _transfer(config: Config, devices: str | None) -> Iterator[Finding]:
    """A transfer engine's listener knows no authentication: it is told wherever others may reach it."""
    check, host = "transfer listener", config.workers.host
    if config.transfer.engine == "mooncake":
        told = f"Mooncake listens on 0.0.0.0, whatever workers.host is ({host}), and asks nobody who they are"
        yield Finding(check, WARN, told, FENCE)
    if config.transfer.engine != "nixl" or devices == "lo":
        return
    if devices:
        yield Finding(check, WARN, f"UCX listens on {devices} without authentication", FENCE)
    elif devices is None:
        told = f"UCX listens without authentication; on what, is decided where workers.host ({host}) is known"
        yield Finding(check, WARN, told, FENCE)
    else:
        told = f"UCX listens on all interfaces without authentication: no device here has workers.host ({host})"
        yield Finding(check, WARN, told, f"set workers.host, or UCX_NET_DEVICES for the workers; {FENCE}")


def nixl_devices(config: Config) -> str | None:
    if config.transfer.engine != "nixl" or importlib.util.find_spec("numpy") is None:
        return None
    from cluster.launch.ports import own_address
    from kvstore.errors import InvalidInput
    from kvstore.transfer.nixl import devices_for
    from kvstore.transfer.nixl_agent import DEVICES_VARIABLE

    if given := os.environ.get(DEVICES_VARIABLE):
        return "" if given == "all" else given
    try:
        return devices_for(own_address(config.workers.host), config.transfer.nixl_transport)
    except InvalidInput:
        return None
