"""Which network device an address belongs to, and what UCX is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.transfer.devices import addresses_of, device_of, devices_here, fabric_here, ucx_devices

DEVICES = {
    "lo": frozenset({"127.0.0.1", "::1"}),
    "eth0": frozenset({"10.0.0.7", "10.0.0.8", "fe80::1"}),
    "eth1": frozenset({"192.168.1.7"}),
}
FABRIC = ("mlx5_0:1", "mlx5_1:1")


@pytest.mark.parametrize(
    ("addresses", "device"),
    [
        (["127.0.0.1"], "lo"),
        (["127.0.0.9"], "lo"),
        (["::1"], "lo"),
        (["10.0.0.8"], "eth0"),
        (["FE80::1"], "eth0"),
        (["10.0.0.9", "192.168.1.7"], "eth1"),
        (["0.0.0.0"], ""),
        (["::"], ""),
        (["10.0.0.9"], ""),
        (["no address"], ""),
        ([], ""),
    ],
)
def test_the_device_of_an_address(addresses: list[str], device: str) -> None:
    assert device_of(addresses, DEVICES) == device


def test_rdma_stays_beside_an_outer_device_and_nothing_beside_loopback() -> None:
    assert ucx_devices(["10.0.0.7"], DEVICES, FABRIC) == "eth0,mlx5_0:1,mlx5_1:1"
    assert ucx_devices(["127.0.0.1"], DEVICES, FABRIC) == "lo"
    assert ucx_devices(["0.0.0.0"], DEVICES, FABRIC) == "", "no list: all devices"


def test_what_is_here() -> None:
    here = devices_here()
    assert any("127.0.0.1" in addresses for addresses in here.values())
    assert all(name and addresses for name, addresses in here.items())
    assert "127.0.0.1" in addresses_of("localhost")
    assert addresses_of("10.0.0.7") == ("10.0.0.7",)
    assert addresses_of("no such name.invalid") == addresses_of("x" * 70) == ()


def test_rdma_ports_as_ucx_names_them(tmp_path: Path) -> None:
    assert fabric_here(tmp_path / "none") == ()
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert fabric_here(tmp_path) == ("mlx5_0:1", "mlx5_0:2", "mlx5_1:1")
