"""What the tests of nixl's traits share: processes of their own, peers that stand still."""

import os
import pathlib
import signal
import subprocess
import sys
import time

from kvstore.transfer.base import PagePair, Transfer, TransferState
from tests.contract.transfer_kit import Child, Kit, Pool, read

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip


def stop(child: Child) -> None:
    """Stops a process; returns once all its threads stand still."""
    child.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)


def stuck_read(kit: Kit) -> tuple[Child, Pool, Transfer]:
    """A transfer over TCP that timed out because its peer is stopped."""
    child, reader = kit.child(16, MIB, seed=1), kit.pool(16, MIB)
    reader.slots[:] = 0
    peer = reader.engine.connect(child.export)
    assert read(reader, peer, [PagePair(0, 15)]) is TransferState.DONE
    stop(child)
    transfer = reader.engine.read_pages(peer, [PagePair(i, 15 - i) for i in range(16)])
    assert transfer.wait(300) is TransferState.TIMED_OUT
    return child, reader, transfer


def until_quiesced(transfer: Transfer) -> bool:
    deadline = time.monotonic() + 20
    while not transfer.quiesced() and time.monotonic() < deadline:
        time.sleep(0.01)
    return transfer.quiesced()
