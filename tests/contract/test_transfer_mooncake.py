"""What mooncake does when a peer stops answering."""

import signal
import threading
import time

import numpy as np
import pytest

from kvstore.errors import TransferTimeout, Unavailable
from kvstore.transfer.base import (
    PagePair,
    TransferState,
)
from tests.contract.transfer_kit import TIMEOUT_MS, Kit, read


def test_a_stopped_peer_times_out_within_our_deadline(mooncake: Kit) -> None:
    child, reader = mooncake.child(16, 1 << 20, seed=1), mooncake.pool(16, 1 << 20)
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    pairs = [PagePair(i, 15 - i) for i in range(16)]
    transfer = reader.engine.read_pages(peer, pairs)
    started = time.monotonic()
    assert transfer.wait(300) is TransferState.TIMED_OUT
    assert not transfer.quiesced()
    with pytest.raises(TransferTimeout):
        reader.engine.read_tags(peer, 300)
    with pytest.raises(TransferTimeout):
        reader.engine.read_tags(peer, 300)  # the stuck read is not overtaken
    assert time.monotonic() - started < 5
    child.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while not transfer.quiesced() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert transfer.quiesced()  # each descriptor reached its end
    assert transfer.wait(TIMEOUT_MS) is TransferState.TIMED_OUT
    for pair in pairs:
        landed = reader.slots[pair.local_page_id]
        assert (landed == child.slots[pair.remote_page_id]).all() or not landed.any()
    reader.engine.read_tags(peer, TIMEOUT_MS)


def test_late_bytes_do_land_after_a_time_out(mooncake: Kit) -> None:
    """The reason for quarantine: without `quiesced` a reused slot would be overwritten."""
    child, reader = mooncake.child(16, 1 << 20, seed=1), mooncake.pool(16, 1 << 20)
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    transfer = reader.engine.read_pages(peer, [PagePair(i, 15 - i) for i in range(16)])
    assert transfer.wait(200) is TransferState.TIMED_OUT
    at_time_out = reader.buffer.copy()
    child.signal(signal.SIGCONT)
    deadline = time.monotonic() + 20
    while not transfer.quiesced() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (reader.buffer != at_time_out).any()


def test_closing_the_engine_proves_that_a_stuck_transfer_ended(mooncake: Kit) -> None:
    child, reader = mooncake.child(16, 1 << 20, seed=1), mooncake.pool(16, 1 << 20)
    view = reader.buffer
    peer = reader.engine.connect(child.export)
    child.signal(signal.SIGSTOP)
    transfer = reader.engine.read_pages(peer, [PagePair(i, i) for i in range(16)])
    assert transfer.wait(200) is TransferState.TIMED_OUT
    assert not transfer.quiesced()
    reader.engine.close()
    assert transfer.quiesced()
    kept = view.copy()
    child.signal(signal.SIGCONT)
    time.sleep(0.3)
    np.testing.assert_array_equal(view, kept)


def test_a_stopped_peer_is_refused_at_connect_and_holds_up_nobody(mooncake: Kit) -> None:
    child, source = mooncake.child(8, 192, seed=1), mooncake.pool(8, 192, seed=3)
    reader = mooncake.pool(8, 192, connect_timeout_ms=400)
    peer = reader.engine.connect(source.export)
    child.signal(signal.SIGSTOP)
    outcome: list[str] = []

    def connect() -> None:
        with pytest.raises(Unavailable) as caught:
            reader.engine.connect(child.export)
        outcome.append(caught.value.reason)

    thread = threading.Thread(target=connect)
    thread.start()
    for _ in range(20):
        assert read(reader, peer, [PagePair(1, 1)], 2_000) is TransferState.DONE
    thread.join(10)
    assert outcome == ["peer_gone"]
