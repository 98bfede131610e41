"""What the shared memory engine promises beyond the contract."""

import json
import mmap
import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from kvstore.errors import InvalidInput, Unavailable
from kvstore.transfer.base import (
    PagePair,
    TransferState,
)
from tests.contract.transfer_kit import TIMEOUT_MS, Kit, read


def test_a_stopped_peer_can_still_be_read_over_shared_memory(shm: Kit) -> None:
    child, reader = shm.child(8, 192, seed=1), shm.pool(8, 192)
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    assert read(reader, peer, [PagePair(3, 4)]) is TransferState.DONE
    np.testing.assert_array_equal(reader.slots[4], child.slots[3])


def test_peers_cannot_map_a_pool_writable(shm: Kit) -> None:
    child = shm.child(8, 192)
    address = json.loads(child.export.address)
    fd = os.open(f"/proc/{address['pid']}/fd/{address['fd']}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"boot_id": "another"}, "other_host"),
        ({"pid_namespace": "pid:[1]"}, "other_pid_namespace"),
        ({"start_ticks": 1}, "peer_gone"),
        ({"pid": 2**22 + 1}, "peer_gone"),
        ({"fd": 10_000}, "peer_gone"),
        ({"fd": 0}, "peer_gone"),
        ({"nonce": "00" * 16}, "incarnation_changed"),
    ],
)
def test_shared_memory_refuses_what_is_not_that_pool(shm: Kit, change: dict[str, object], reason: str) -> None:
    child, reader = shm.child(8, 192), shm.pool(8, 192)
    address = json.loads(child.export.address) | change
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(child.export, address=json.dumps(address)))
    assert caught.value.reason == reason


@pytest.mark.parametrize("change", [{"pid": 1 << 31}, {"fd": 1 << 63}, {"start_ticks": 1 << 64}, {"pid": True}])
def test_numbers_that_no_kernel_gives_are_no_address(shm: Kit, change: dict[str, object]) -> None:
    source, reader = shm.pool(8, 192), shm.pool(8, 192)
    address = json.loads(source.export.address) | change
    with pytest.raises(InvalidInput) as caught:
        reader.engine.connect(replace(source.export, address=json.dumps(address)))
    assert caught.value.field == "export.address"


def test_no_access_to_the_peers_process_names_the_remedy(shm: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    child, reader = shm.child(8, 192), shm.pool(8, 192)
    really_read = os.readlink

    def refuse(path: str) -> str:
        if str(child.process.pid) in str(path):
            raise PermissionError(13, "Permission denied")
        return really_read(path)

    monkeypatch.setattr(os, "readlink", refuse)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(child.export)
    assert caught.value.reason == "no_access"
    assert "transfer.engine" in caught.value.message


def test_without_a_pidfd_death_is_still_noticed(shm: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", unsupported)
    child, reader = shm.child(8, 192), shm.pool(8, 192)
    peer = reader.engine.connect(child.export)
    assert read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
    child.process.kill()
    deadline = time.monotonic() + 10
    while read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE and time.monotonic() < deadline:
        time.sleep(0.01)  # not reaped yet: a zombie counts as dead
    assert read(reader, peer, [PagePair(0, 0)]) is TransferState.FAILED


def test_shared_memory_stops_at_its_deadline(shm: Kit) -> None:
    now_ms = [0]

    def clock_ms() -> int:
        now_ms[0] += 10
        return now_ms[0]

    source, reader = shm.pool(40, 1 << 20, seed=1), shm.pool(40, 1 << 20, clock_ms=clock_ms)
    reader.slots[:] = 0
    peer, pairs = reader.engine.connect(source.export), [PagePair(i, i) for i in range(40)]
    transfer = reader.engine.read_pages(peer, pairs)
    assert transfer.wait(25) is TransferState.TIMED_OUT
    assert transfer.quiesced()
    assert transfer.wait(TIMEOUT_MS) is TransferState.TIMED_OUT
    assert not (reader.slots[39]).any()
    assert read(reader, peer, pairs) is TransferState.DONE
