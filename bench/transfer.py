"""What verification costs: pages pulled and proved, against the same engine moving the same pages unchecked.

*Verified* is what a receiver does: read the pages, judge each page's digest, then read the source's live tags and
compare them. *Bare* is the engine's own library moving the same pages: for `shm` one copy per page out of the mapped
pool, for `mooncake` and `nixl` one batch read of their libraries. Both run alternately in one process, against a pool
in another process, over pages drawn anew each round; the figures are medians. `gbps_memcpy` is a copy inside this
process.

    python -m bench.transfer --engine shm --pages 1 --pages 16
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import click
import numpy as np

from kvstore.digest import Digester
from kvstore.errors import TransferError
from kvstore.transfer.base import PagePair, Peer, PoolExport, TransferState, tag_table_bytes
from kvstore.transfer.common import I64, U8, slots_of, tags_of
from kvstore.transfer.mooncake import MooncakeEngine
from kvstore.transfer.mooncake import parse_address as parse_mooncake
from kvstore.transfer.nixl import NixlEngine
from kvstore.transfer.nixl_address import parse_address as parse_nixl
from kvstore.transfer.nixl_agent import ReadState, Rows
from kvstore.transfer.shm import ShmEngine
from kvstore.transfer.shm import parse_address as parse_shm

ENGINES = ("shm", "mooncake", "nixl")
PAGE_BYTES = (64 << 10, 391_808, 1 << 20)
PAGES = (1, 16, 128)
SECRET = b"benchmark secret"
SLOTS = 160
INCARNATION = 4_242
TIMEOUT_MS = 30_000
MIN_ROUNDS, MAX_ROUNDS = 5, 400


@dataclass(frozen=True)
class Row:
    """One cell. Throughputs are GB/s (1e9 bytes) of page bytes; `ratio` is verified over bare."""

    engine: str
    page_bytes: int
    pages: int
    gbps_verified: float
    gbps_bare: float
    ratio: float
    gbps_memcpy: float
    p50_us_verified: float
    p50_us_bare: float
    rounds: int


Engine = ShmEngine | MooncakeEngine | NixlEngine


def _make(name: str, page_bytes: int) -> Engine:
    digester = Digester(SECRET, page_bytes)
    digester.warm_up()
    if name == "shm":
        return ShmEngine(digester)
    return MooncakeEngine(digester=digester) if name == "mooncake" else NixlEngine(digester=digester)


def _missing(name: str) -> str | None:
    """Why an engine cannot be used here; None if it can."""
    if name == "mooncake":
        return MooncakeEngine.available()
    return NixlEngine.available() if name == "nixl" else None


def _fill(buffer: U8, page_bytes: int) -> None:
    """The same content in every process."""
    rng = np.random.default_rng(page_bytes)
    slots_SU8 = slots_of(buffer, SLOTS, page_bytes)
    slots_SU8[:] = np.frombuffer(rng.bytes(slots_SU8.size), np.uint8).reshape(slots_SU8.shape)
    tags_of(buffer, SLOTS)[:, 1] = rng.integers(1, 1 << 62, SLOTS)


def serve(name: str, page_bytes: int) -> None:
    """Publishes a filled pool, prints its export as one JSON line and stays until stdin ends."""
    engine = _make(name, page_bytes)
    buffer = engine.allocate(SLOTS, page_bytes)
    export = engine.publish(INCARNATION, "bench")
    _fill(buffer, page_bytes)
    print(json.dumps(asdict(export)), flush=True)
    sys.stdin.read()
    engine.close()


class _Receiver:
    """Our end: an engine with a pool, and what the pages must be."""

    def __init__(self, name: str, page_bytes: int, export: PoolExport) -> None:
        self.engine = _make(name, page_bytes)
        self.page_bytes = page_bytes
        self.slots_SU8 = slots_of(self.engine.allocate(SLOTS, page_bytes), SLOTS, page_bytes)
        self.engine.publish(INCARNATION + 1, "bench")
        self.peer: Peer = self.engine.connect(export)
        self._digester = Digester(SECRET, page_bytes)
        model = np.frombuffer(mmap.mmap(-1, tag_table_bytes(SLOTS) + SLOTS * page_bytes), np.uint8)
        _fill(model, page_bytes)
        tags_of(model, SLOTS)[:, 0] = INCARNATION
        self.model_SU8 = slots_of(model, SLOTS, page_bytes)
        self._tags_S2 = tags_of(model, SLOTS).copy()
        self._digests_S = np.array([self._digester.digest(slot_U8) for slot_U8 in self.model_SU8], np.uint64)
        bare = {"shm": self._bare_shm, "mooncake": self._bare_mooncake, "nixl": self._bare_nixl}
        self._bare = bare[name](export)

    def verified(self, remote_n: I64, local_n: I64) -> None:
        """One batch, proved. Raises TransferError when a check fails."""
        pairs = [PagePair(*pair) for pair in zip(remote_n.tolist(), local_n.tolist(), strict=True)]
        transfer = self.engine.read_pages(self.peer, pairs)
        if transfer.wait(TIMEOUT_MS) is not TransferState.DONE:
            raise TransferError("not_done", "the batch did not arrive")
        sums_n2 = transfer.body_sums
        if sums_n2 is None:
            sums_n2 = self._digester.body_sums_many(self.slots_SU8, local_n)
        digests_n = self._digester.finish_many(sums_n2, self.slots_SU8, local_n)
        if not np.array_equal(digests_n, self._digests_S[remote_n]):
            raise TransferError("digest", "a page is not what was sealed")
        live_S2 = self.engine.read_tags(self.peer, TIMEOUT_MS)
        if not np.array_equal(live_S2[remote_n], self._tags_S2[remote_n]):
            raise TransferError("stale", "a page moved on while it was read")

    def bare(self, remote_n: I64, local_n: I64) -> None:
        self._bare(remote_n, local_n)

    def memcpy(self, remote_n: I64, local_n: I64) -> None:
        _copy_pages(self.model_SU8, self.slots_SU8, remote_n, local_n)

    def _bare_shm(self, export: PoolExport) -> Callable[[I64, I64], None]:
        address = parse_shm(export.address)
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY)
        mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        os.close(fd)
        source_SU8 = slots_of(np.frombuffer(mapping, np.uint8), SLOTS, self.page_bytes)
        return lambda remote_n, local_n: _copy_pages(source_SU8, self.slots_SU8, remote_n, local_n)

    def _bare_mooncake(self, export: PoolExport) -> Callable[[I64, I64], None]:
        address = parse_mooncake(export.address)
        engine = self.engine
        assert isinstance(engine, MooncakeEngine)
        base, local_base = address.base + tag_table_bytes(SLOTS), self.slots_SU8.ctypes.data

        def read(remote_n: I64, local_n: I64) -> None:
            local = (local_base + local_n * self.page_bytes).tolist()
            remote = (base + remote_n * self.page_bytes).tolist()
            sizes = [self.page_bytes] * len(local)
            if engine.call(lambda lib: lib.batch_transfer_sync_read(address.session, local, remote, sizes)) != 0:
                raise TransferError("not_done", "the library's batch failed")

        return read

    def _bare_nixl(self, export: PoolExport) -> Callable[[I64, I64], None]:
        address = parse_nixl(export.address)
        engine = self.engine
        assert isinstance(engine, NixlEngine)
        agent = engine.agent
        base, local_base = address.base + tag_table_bytes(SLOTS), self.slots_SU8.ctypes.data

        def read(remote_n: I64, local_n: I64) -> None:
            local: Rows = [(local_base + slot * self.page_bytes, self.page_bytes, 0) for slot in local_n.tolist()]
            remote: Rows = [(base + slot * self.page_bytes, self.page_bytes, 0) for slot in remote_n.tolist()]
            handle, state = agent.post(address.agent, local, remote)
            while state is ReadState.RUNNING:
                state = agent.poll(handle)
            if state is not ReadState.DONE:
                raise TransferError("not_done", "the library's batch failed")

        return read


def _copy_pages(source_SU8: U8, target_SU8: U8, remote_n: I64, local_n: I64) -> None:
    for remote, local in zip(remote_n.tolist(), local_n.tolist(), strict=True):
        np.copyto(target_SU8[local], source_SU8[remote])


def _cell(receiver: _Receiver, engine: str, pages: int, budget_s: float) -> Row:
    rng = np.random.default_rng(pages)
    ways = (receiver.verified, receiver.bare, receiver.memcpy)
    spent_s: list[list[float]] = [[], [], []]
    until_s = time.perf_counter() + budget_s
    for turn in range(-1, MAX_ROUNDS):  # the first round warms up
        if turn >= MIN_ROUNDS and time.perf_counter() > until_s:
            break
        remote_n, local_n = rng.permutation(SLOTS)[:pages], rng.permutation(SLOTS)[:pages]
        for step in range(3):
            way = (turn + step) % 3  # each way comes first as often as the others
            start_s = time.perf_counter()
            ways[way](remote_n, local_n)
            if turn >= 0:
                spent_s[way].append(time.perf_counter() - start_s)
    verified_s, bare_s, memcpy_s = (float(np.median(s)) for s in spent_s)
    nbytes = pages * receiver.page_bytes
    return Row(
        engine=engine,
        page_bytes=receiver.page_bytes,
        pages=pages,
        gbps_verified=round(nbytes / verified_s / 1e9, 3),
        gbps_bare=round(nbytes / bare_s / 1e9, 3),
        ratio=round(bare_s / verified_s, 3),
        gbps_memcpy=round(nbytes / memcpy_s / 1e9, 3),
        p50_us_verified=round(verified_s * 1e6, 1),
        p50_us_bare=round(bare_s * 1e6, 1),
        rounds=len(spent_s[0]),
    )


def run(
    engines: Sequence[str] = ENGINES,
    page_bytes: Sequence[int] = PAGE_BYTES,
    pages: Sequence[int] = PAGES,
    budget_s: float = 1.0,
    report: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """Measures every cell, `budget_s` seconds each. Engines whose library cannot be loaded are left out; `report` hears
    of them, and of each size that is begun."""
    rows: list[Row] = []
    for engine in engines:
        missing = _missing(engine)
        if missing:
            report(f"{engine} is left out: {missing}")
            continue
        for size in page_bytes:
            report(f"{engine}: pages of {size} bytes")
            command = [sys.executable, "-m", "bench.transfer", "--serve", "--engine", engine, "--page-bytes", str(size)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
                assert source.stdout is not None
                receiver = _Receiver(engine, size, PoolExport(**json.loads(source.stdout.readline())))
                rows += [_cell(receiver, engine, count, budget_s) for count in pages]
                receiver.engine.close()
    return rows


@click.command(
    epilog="""\b
Examples:
  genlock bench transfer
  genlock bench transfer --engine shm --page-bytes 391808 --pages 1 --pages 16
  genlock bench transfer --json"""
)
@click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES), default=ENGINES, show_default=True)
@click.option("--page-bytes", multiple=True, type=click.IntRange(64), default=PAGE_BYTES, show_default=True)
@click.option("--pages", multiple=True, type=click.IntRange(1, SLOTS), default=PAGES, show_default=True)
@click.option("--budget-s", type=click.FloatRange(0.01, 600), default=1.0, show_default=True, help="For each cell.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--serve", "as_source", is_flag=True, hidden=True)
def command(
    engines: tuple[str, ...], page_bytes: tuple[int, ...], pages: tuple[int, ...], budget_s: float, as_json: bool,
    as_source: bool,
) -> int:  # fmt: skip
    """Measures verified page reads against bare ones, engine by engine."""
    if as_source:
        serve(engines[0], page_bytes[0])
        return 0
    rows = run(engines, page_bytes, pages, budget_s, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    click.echo("engine     page bytes  pages  verified GB/s  bare GB/s  ratio  memcpy GB/s  p50 us verified / bare")
    for row in rows:
        click.echo(
            f"{row.engine:9s}  {row.page_bytes:10d}  {row.pages:5d}  {row.gbps_verified:13.2f}  {row.gbps_bare:9.2f}"
            f"  {row.ratio:5.2f}  {row.gbps_memcpy:11.2f}  {row.p50_us_verified:10.1f} / {row.p50_us_bare:.1f}"
        )
    return 0


if __name__ == "__main__":
    command()
