"""What nixl does that others do not, and what the engine makes of it. Everything runs with the real library."""

import base64
import ctypes
import importlib.util
import json
import mmap
import os
import random
import socket
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from cluster.launch.ports import own_address
from kvstore.errors import InvalidInput, TransferError, Unavailable
from kvstore.transfer import nixl as nixl_engine
from kvstore.transfer import nixl_agent
from kvstore.transfer.base import PagePair, TransferState
from kvstore.transfer.nixl import NixlEngine
from kvstore.transfer.nixl_address import metadata_sum, parse_address
from kvstore.transfer.select import make_engine
from tests.contract.nixl_kit import MIB, in_a_process
from tests.contract.transfer_kit import INCARNATION, TIMEOUT_MS, Kit, assert_exactly, read

# -- loading ---------------------------------------------------------------------------------------------------------


def test_without_the_library_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in nixl_agent.PACKAGES:
        monkeypatch.delitem(sys.modules, f"{package}._bindings", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "nixl_cu12" in (NixlEngine.available() or "")
    for make in (lambda: make_engine("nixl"), NixlEngine):
        with pytest.raises(Unavailable) as caught:
            make()
        assert caught.value.reason == "library_missing"


def test_transports_are_checked(nixl: Kit) -> None:
    with pytest.raises(InvalidInput) as caught:
        make_engine("nixl", nixl_transport="carrier_pigeon")
    assert caught.value.field == "nixl_transport"


def test_a_process_keeps_its_environment_its_logging_and_its_exit_code(nixl: Kit) -> None:
    """The library crashes a process at exit beside the system's libibverbs, and its package resets logging."""
    code = """
import logging, os
logging.basicConfig(filename="/dev/null")
handlers, before = list(logging._handlerList), dict(os.environ)
from kvstore.transfer.nixl import NixlEngine
for transport in ("auto", "tcp"):
    engine = NixlEngine(transport)
    engine.allocate(4, 192)
    engine.publish(1, "layout")
    engine.close()
left = NixlEngine()  # dropped without close
left.allocate(4, 192)
assert dict(os.environ) == before
assert [ref() for ref in logging._handlerList] == [ref() for ref in handlers] and logging.raiseExceptions
assert not any("libibverbs" in line for line in open("/proc/self/maps"))
print("fine")
"""
    if nixl_agent._INFINIBAND.is_dir() and any(nixl_agent._INFINIBAND.iterdir()):
        pytest.skip("this host has InfiniBand, so its module is loaded")
    done = in_a_process(code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "fine", "")


LISTENERS = """
import contextlib, os
from kvstore.transfer.select import make_engine

def listeners():
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{{name}}"))
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{{name}}").readlines()[1:]]
    return {{row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{{row[9]}}]" in own}}

engine = make_engine("nixl", host="{host}", nixl_transport="{transport}")
engine.allocate(4, 192)
engine.publish(1, "layout")
print(*sorted(listeners()))
engine.close()
"""
LOOPBACK = "0100007F"


def listens(host: str, transport: str = "auto", **environment: str) -> list[str]:
    """Addresses, as /proc/net/tcp writes them, at which an engine of that host listens."""
    done = in_a_process(LISTENERS.format(host=host, transport=transport), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_it_listens_where_its_worker_does(nixl: Kit, transport: str) -> None:
    if "UCX_NET_DEVICES" in os.environ:
        pytest.skip("UCX_NET_DEVICES is set, and decides")
    assert listens("127.0.0.1", transport) == [LOOPBACK]
    assert listens("localhost", transport) == [LOOPBACK]
    assert LOOPBACK in listens("0.0.0.0", transport), "no device has it: everywhere"
    try:
        outer = own_address("auto")
    except InvalidInput:
        pytest.skip("this host has no address but loopback")
    assert listens(outer, transport) == [socket.inet_aton(outer)[::-1].hex().upper()]


def test_the_operators_devices_go_before(nixl: Kit) -> None:
    try:
        outer = own_address("auto")
    except InvalidInput:
        pytest.skip("this host has no address but loopback")
    assert listens(outer, UCX_NET_DEVICES="lo") == [LOOPBACK]


def test_what_the_operator_sets_stays(nixl: Kit) -> None:
    code = """
import os
from kvstore.transfer import nixl_agent
with nixl_agent._environment():
    print(os.environ["NIXL_LOG_LEVEL"], os.environ["UCX_LOG_LEVEL"])
print(os.environ.get("NIXL_LOG_LEVEL"), os.environ.get("UCX_LOG_LEVEL"))
"""
    assert in_a_process(code, NIXL_LOG_LEVEL="WARN").stdout.split() == ["WARN", "fatal", "WARN", "None"]


def test_an_idle_engine_burns_no_core(nixl: Kit) -> None:
    """With the library's default each of the two agents takes a whole core."""
    source, reader = nixl.pool(8, 192), nixl.pool(8, 192)
    peer = reader.engine.connect(source.export)
    assert read(reader, peer, [PagePair(0, 0)]) is TransferState.DONE
    started_s = time.process_time()
    time.sleep(1)
    assert time.process_time() - started_s < 0.25


# -- lives of a pool -------------------------------------------------------------------------------------------------


def test_deregistered_memory_can_still_be_read_and_the_life_page_refuses_it(nixl: Kit) -> None:
    source, reader = nixl.pool(8, 192, seed=1), nixl.pool(8, 192, seed=2)
    peer = reader.engine.connect(source.export)
    engine = source.engine
    assert isinstance(engine, NixlEngine)
    engine._agent.deregister(engine._region_U8)
    assert read(reader, peer, [PagePair(1, 1)]) is TransferState.DONE  # the library does not mind
    life_at = nixl_engine._life_offset(8, 192)
    engine._region_U8[life_at : life_at + 64] = 0  # what `close` does first
    before = reader.buffer.copy()
    transfer = reader.engine.read_pages(peer, [PagePair(2, 2)])
    assert transfer.wait(TIMEOUT_MS) is TransferState.FAILED
    assert transfer.quiesced()
    np.testing.assert_array_equal(reader.buffer, before)
    with pytest.raises(TransferError):
        reader.engine.read_tags(peer, TIMEOUT_MS)


def test_close_zeroes_the_life_page(nixl: Kit) -> None:
    source = nixl.pool(8, 192)
    region = source.engine._region_U8
    life_at = nixl_engine._life_offset(8, 192)
    assert region[life_at : life_at + 24].any()
    source.engine.close()
    assert not region[life_at:][:4096].any()


@pytest.mark.parametrize("kind", ["nixl", "nixl_tcp"])
def test_connect_refuses_memory_with_another_nonce(kind: str, request: pytest.FixtureRequest) -> None:
    kit = request.getfixturevalue(kind)
    source, reader = kit.pool(8, 192), kit.pool(8, 192)
    address = replace(parse_address(source.export.address), nonce="00" * 16)
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(source.export, address=address.text()))
    assert caught.value.reason == "peer_gone"
    reader.engine.connect(source.export)


def test_bad_addresses_are_refused_and_harm_no_connection(nixl: Kit) -> None:
    """The library itself drops a standing connection when it is given damaged metadata of the same peer."""
    source, reader = nixl.pool(8, 192, seed=1), nixl.pool(8, 192)
    peer = reader.engine.connect(source.export)
    good, rng = json.loads(source.export.address), random.Random(5)
    metadata = base64.b64decode(good["metadata"])
    changes: list[dict[str, object]] = [
        {"metadata": "?"}, {"metadata": 7}, {"metadata": ""}, {"agent": 7}, {"agent": "another"}, {"agent": ""},
        {"base": -1}, {"base": 1 << 64}, {"base": 1.5}, {"nonce": "00"}, {"sum": "00"}, {"more": 1},
    ]  # fmt: skip
    changes += [{"metadata": base64.b64encode(metadata[:cut]).decode()} for cut in (1, 90, len(metadata) - 1)]
    for _ in range(20):
        torn = bytearray(metadata)
        torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
        changes.append({"metadata": base64.b64encode(torn).decode()})
    for change in changes:
        with pytest.raises(InvalidInput) as caught:
            reader.engine.connect(replace(source.export, address=json.dumps(good | change)))
        assert caught.value.field == "export.address"
    assert read(reader, peer, [PagePair(1, 1)]) is TransferState.DONE


def test_metadata_that_the_library_refuses(nixl: Kit) -> None:
    source, other, reader = nixl.pool(8, 192, seed=1), nixl.pool(8, 192), nixl.pool(8, 192)
    peer = reader.engine.connect(source.export)
    good = parse_address(other.export.address)
    cut = base64.b64decode(good.metadata)[:-9]
    bad = replace(good, metadata=base64.b64encode(cut).decode(), sum=metadata_sum(good.agent, cut))
    with pytest.raises(Unavailable) as caught:
        reader.engine.connect(replace(other.export, address=bad.text()))
    assert caught.value.reason == "peer_gone"
    assert read(reader, peer, [PagePair(1, 1)]) is TransferState.DONE


@pytest.mark.parametrize("places", [(2,), (2, 5), (5, 2), (0, 2, 5, 7)])
def test_memory_that_cannot_be_read_fails_the_whole_batch_and_a_new_connection_heals(
    nixl: Kit, places: tuple[int, ...]
) -> None:
    """The library reports a request's last row only: it calls (2, 5) done."""
    source, reader = nixl.pool(8, 4096, seed=1), nixl.pool(8, 4096)
    other = nixl.pool(8, 4096, seed=3)
    peer, bystander = reader.engine.connect(source.export), reader.engine.connect(other.export)
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(source.slots[2].ctypes.data)
    assert libc.mprotect(page, ctypes.c_size_t(4096), 0) == 0
    try:
        transfer = reader.engine.read_pages(peer, [PagePair(place, 7 - place) for place in places])
        assert transfer.wait(TIMEOUT_MS) is TransferState.FAILED
        assert transfer.quiesced()
        assert read(reader, peer, [PagePair(1, 1)]) is TransferState.FAILED  # the connection is closed for good
        assert read(reader, bystander, [PagePair(1, 1)]) is TransferState.DONE
        again = reader.engine.connect(source.export)
        assert read(reader, again, [PagePair(5, 5)]) is TransferState.DONE
        np.testing.assert_array_equal(reader.slots[5], source.slots[5])
    finally:
        assert libc.mprotect(page, ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_a_refused_connection_does_not_break_another_to_the_same_peer(nixl: Kit) -> None:
    source, reader = nixl.pool(8, 192, seed=1), nixl.pool(8, 192)
    peer = reader.engine.connect(source.export)
    with pytest.raises(Unavailable):
        reader.engine.connect(replace(source.export, slots=1 << 20))  # beyond what the peer registered
    with pytest.raises(Unavailable):
        reader.engine.connect(replace(source.export, incarnation=INCARNATION + 1))
    assert read(reader, peer, [PagePair(1, 1)]) is TransferState.DONE


def test_a_tag_table_that_cannot_be_read_gives_no_old_tags(nixl: Kit) -> None:
    source, reader = nixl.pool(8, 4096, seed=1), nixl.pool(8, 4096)
    peer = reader.engine.connect(source.export)
    libc = ctypes.CDLL(None, use_errno=True)
    table = ctypes.c_void_p(source.buffer.ctypes.data)
    assert libc.mprotect(table, ctypes.c_size_t(4096), 0) == 0
    try:
        with pytest.raises(TransferError):
            reader.engine.read_tags(peer, TIMEOUT_MS)
    finally:
        assert libc.mprotect(table, ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE) == 0


# -- batches ---------------------------------------------------------------------------------------------------------


def test_pages_become_rows_and_batches(nixl: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = nixl.pool(3000, 64, seed=1), nixl.pool(3000, 64, seed=2)
    engine = reader.engine
    peer = engine.connect(source.export)

    def batches(pairs: list[PagePair]) -> list[nixl_engine.Batch]:
        made = list(engine._batches(engine._source(peer), *zip(*pairs, strict=True)))
        assert [batch.first for batch in made] == [sum(b.pages for b in made[:i]) for i in range(len(made))]
        assert sum(batch.nbytes for batch in made) == 64 * len(pairs)
        return made

    (one,) = batches([PagePair(i, i + 500) for i in range(2500)])
    assert len(one.local_rows) == 1  # neighbours are one row
    scattered = [PagePair(i, 2999 - i) for i in range(3000)]
    made = batches(scattered)
    assert [len(batch.local_rows) for batch in made] == [512] * 5 + [440]
    before = reader.buffer.copy()
    assert read(reader, peer, scattered) is TransferState.DONE
    assert_exactly(before, reader, source.slots, scattered)
    monkeypatch.setattr(nixl_engine, "MAX_BATCH_BYTES", 64 * 10)
    assert [batch.pages for batch in batches([PagePair(i, i) for i in range(25)])] == [10, 10, 5]
    assert [batch.pages for batch in batches(scattered[:25])] == [10, 10, 5]


def test_the_deadline_is_looked_at_between_batches(nixl: Kit) -> None:
    """Over CMA the library copies before it returns, so a batch is the longest that a deadline can be missed by."""
    now_ms = [0]

    def clock_ms() -> int:
        now_ms[0] += 10
        return now_ms[0]

    source, reader = nixl.pool(40, MIB, seed=1), nixl.pool(40, MIB, clock_ms=clock_ms)
    reader.slots[:] = 0
    peer, pairs = reader.engine.connect(source.export), [PagePair(i, i) for i in range(40)]
    transfer = reader.engine.read_pages(peer, pairs)
    assert transfer.wait(25) is TransferState.TIMED_OUT
    assert transfer.quiesced()
    assert not reader.slots[39].any()
    assert read(reader, peer, pairs) is TransferState.DONE


def test_transfers_that_have_not_ended_are_limited(nixl: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = nixl.pool(8, 192, seed=1), nixl.pool(8, 192)
    engine, peer = reader.engine, reader.engine.connect(source.export)
    cells, engine._cells[1:] = engine._cells[1:], []
    first = engine.read_pages(peer, [PagePair(0, 0)])
    with pytest.raises(TransferError) as caught:
        engine.read_pages(peer, [PagePair(1, 1)])
    assert caught.value.reason == "too_many_transfers"
    assert first.wait(TIMEOUT_MS) is TransferState.DONE
    assert read(reader, peer, [PagePair(1, 1)]) is TransferState.DONE  # its cell came back
    engine._cells += cells


THREADS = """
import random, threading
from kvstore.transfer.base import PagePair, TransferState
from kvstore.transfer.nixl import NixlEngine
engines = [NixlEngine() for _ in range(3)]
exports = [(engine.allocate(64, 8256), engine.publish(1, "layout"))[1] for engine in engines]
reader, wrong = engines[0], []

def work(worker):
    rng = random.Random(worker)
    for _ in range(80):
        peer = reader.connect(exports[1 + rng.randrange(2)])
        for _ in range(5):
            pairs = [PagePair(rng.randrange(64), worker * 16 + i) for i in range(16)]
            if reader.read_pages(peer, pairs).wait(10_000) is not TransferState.DONE:
                wrong.append("not done")
            if not (reader.read_tags(peer, 10_000)[:, 0] == 1).all():
                wrong.append("tags")
        reader.disconnect(peer)

def guarded(worker):
    try:
        work(worker)
    except Exception as error:
        wrong.append(repr(error))

threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(wrong[:3], reader._remotes)
for engine in engines: engine.close()
"""


def test_threads_connect_read_and_disconnect_at_once(nixl: Kit) -> None:
    """In a process of its own: without thread synchronisation the library crashes it more often than not."""
    done = in_a_process(THREADS)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[] {}", "")
