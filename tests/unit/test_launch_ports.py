"""A worker's port: the first free one of a range that others can name."""

from __future__ import annotations

import pytest

from cluster.launch.ports import PORTS_TO_TRY, first_free
from kvstore.errors import Unavailable


class Host:
    """Ports of one host, some of them taken."""

    def __init__(self, *taken: int) -> None:
        self.taken = set(taken)
        self.asked: list[str] = []

    def add(self, address: str) -> int:
        self.asked.append(address)
        port = int(address.rpartition(":")[2]) or 50_123
        if port in self.taken:
            raise RuntimeError("taken")
        self.taken.add(port)
        return port


def test_workers_of_one_host_take_one_after_the_other() -> None:
    host = Host(20_001)
    assert [first_free(host.add, "10.0.0.1", 20_000) for _ in range(3)] == [20_000, 20_002, 20_003]
    assert host.asked[0] == "10.0.0.1:20000"


def test_any_port() -> None:
    host = Host()
    assert first_free(host.add, "10.0.0.1", 0) == 50_123
    assert host.asked == ["10.0.0.1:0"]


def test_a_full_range_is_a_typed_error() -> None:
    host = Host(*range(20_000, 20_000 + PORTS_TO_TRY))
    with pytest.raises(Unavailable, match="ports 20000 to 20063") as caught:
        first_free(host.add, "10.0.0.1", 20_000)
    assert (caught.value.reason, caught.value.field) == ("port_taken", "workers.port")
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1:0"):
        first_free(Host(50_123).add, "10.0.0.1", 0)


def test_a_range_ends_with_the_ports() -> None:
    host = Host(*range(65_472, 65_536))
    with pytest.raises(Unavailable, match="to 65535"):
        first_free(host.add, "10.0.0.1", 65_472)
