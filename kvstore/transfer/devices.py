"""The network devices that a transfer library may listen on: that of its worker's address. What this host has is read
here, and judged by pure functions."""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s4x4s16x")  # name, family and port, address
_MAX_INTERFACES = 1024
_INET6 = Path("/proc/net/if_inet6")
_INFINIBAND = Path("/sys/class/infiniband")

Devices = Mapping[str, frozenset[str]]


def device_of(addresses: Iterable[str], devices: Devices) -> str:
    """The name of the device that has one of the addresses; "" where none has, as for 0.0.0.0. All of 127.0.0.0/8 is
    the loopback device's."""
    for text in addresses:
        address = _address(text)
        for name, own in devices.items():
            if address in map(_address, own) or (_is_loopback([text]) and _is_loopback(own)):
                return name
    return ""


def ucx_devices(addresses: Iterable[str], devices: Devices, fabric: Iterable[str] = ()) -> str:
    """UCX_NET_DEVICES for a worker at these addresses; "" where they are no device's: then UCX listens on all.
    `fabric`: RDMA ports, which UCX counts among the network devices. Loopback does without: who listens there is not to
    be reached from outside."""
    name = device_of(addresses, devices)
    if not name:
        return ""
    return ",".join([name, *([] if _is_loopback(devices[name]) else fabric)])


def addresses_of(host: str) -> tuple[str, ...]:
    """What a name or address means here; none for what nobody knows."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    return ()


def devices_here() -> dict[str, frozenset[str]]:
    """The addresses of this host's network devices that are up."""
    found: dict[str, set[str]] = {}
    for name, address in (*_inet(), *_inet6()):
        found.setdefault(name, set()).add(address)
    return {name: frozenset(addresses) for name, addresses in found.items()}


def fabric_here(folder: Path = _INFINIBAND) -> tuple[str, ...]:
    """RDMA ports as UCX names them, such as mlx5_0:1."""
    return tuple(sorted(f"{port.parent.parent.name}:{port.name}" for port in folder.glob("*/ports/*")))


def _inet() -> list[tuple[str, str]]:
    space = array.array("B", bytes(_IFREQ.size * _MAX_INTERFACES))
    start, size = space.buffer_info()
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked.fileno(), SIOCGIFCONF, struct.pack("iP", size, start))
        used = struct.unpack("iP", answer)[0]
        return [
            (name.partition(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address))
            for name, address in _IFREQ.iter_unpack(space.tobytes()[:used])
        ]
    return []


def _inet6() -> list[tuple[str, str]]:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in _INET6.read_text().splitlines()]
        return [(line[5], str(ipaddress.IPv6Address(bytes.fromhex(line[0])))) for line in lines if len(line) == 6]
    return []


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_loopback(texts: Iterable[str]) -> bool:
    return any(address is not None and address.is_loopback for address in map(_address, texts))
