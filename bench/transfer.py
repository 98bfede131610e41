"""What verification costs: pages pulled and proved, against the same engine moving the same pages unchecked.

*Verified* is what a decode worker does, with its own receiver and guard: judge the descriptors, read the pages, judge
headers, prefix keys and digests, read the source's live tags and compare them, adopt the pages. *Bare* is the engine's
own library moving the same pages: for `shm` one copy per page out of the mapped pool, for `mooncake` and `nixl` one
batch read of their libraries. `nixl` takes the fastest way that the library finds, which on one host is CMA; `nixl-tcp`
is the same library over TCP alone, as between hosts without RDMA, on both sides and for both figures. Both run
alternately in one process, against a pool of sealed pages in another process, over pages drawn anew each round; the
figures are medians. `gbps_memcpy` is a copy inside this process. Where the time of a verified pull goes is told by
part, for each page.

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
from typing import Any

import click
import numpy as np

from kvstore.descriptor import PageDescriptor
from kvstore.digest import Digester
from kvstore.errors import TransferError
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef, Tag
from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.layout import HEADER_BYTES, AttentionKind, KvFormat, PageLayout
from kvstore.receipt import ExpectedPages
from kvstore.receive import PageOrder, PageReceiver
from kvstore.transfer.base import Peer, PoolExport, tag_table_bytes
from kvstore.transfer.common import I64, SLEEP_S, SPIN_BYTES, U8, slots_of
from kvstore.transfer.mooncake import MooncakeEngine
from kvstore.transfer.mooncake import parse_address as parse_mooncake
from kvstore.transfer.nixl import NixlEngine
from kvstore.transfer.nixl_address import parse_address as parse_nixl
from kvstore.transfer.nixl_agent import ReadState, Rows
from kvstore.transfer.shm import ShmEngine
from kvstore.transfer.shm import parse_address as parse_shm

ENGINES = ("shm", "mooncake", "nixl", "nixl-tcp")
NIXL_TRANSPORTS = {"nixl": "auto", "nixl-tcp": "tcp"}
PAGE_BYTES = (4 << 10, 64 << 10, 391_808, 1 << 20)
PAGES = (1, 16, 128, 1024)
MAX_PAGES = 4096
MIN_SLOTS = 160  # small batches, too, come from more memory than the caches hold
MIN_PAGE_BYTES, PAGE_STEP_BYTES = 256, 128
SECRET = b"benchmark secret"
INCARNATION = 4_242
OWNER = 1
PAGE_TOKENS = 4
TIMEOUT_MS = 30_000
MIN_ROUNDS, MAX_ROUNDS = 5, 400


@dataclass(frozen=True)
class Parts:
    """Microseconds of a verified pull, for each page."""

    bytes: float  # the engine moves them; `shm` digests in the same pass
    digest: float  # of engines that do not, and the comparison
    tags: float  # the read of the source's live tags
    book: float  # the rest: descriptors and headers judged, holds, states of the slots


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
    us_a_page: Parts  # of a verified pull, medians
    bare_us_a_page: float


class _Watch:
    """Seconds of one pull by part."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = {}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._spent_s[part] = self._spent_s.get(part, 0.0) + time.perf_counter() - begin_s

        return run

    def take(self, total_s: float, pages: int) -> Parts:
        """What was spent since the last time; the rest of `total_s` is the book's."""
        spent, self._spent_s = self._spent_s, {}
        known = {part: spent.get(part, 0.0) * 1e6 / pages for part in ("bytes", "digest", "tags")}
        return Parts(**known, book=total_s * 1e6 / pages - sum(known.values()))


class _Over:
    """An object some of whose methods are replaced."""

    def __init__(self, inner: Any, **methods: Callable[..., Any]) -> None:
        self.__dict__.update(methods)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


Engine = ShmEngine | MooncakeEngine | NixlEngine


def _make(name: str, page_bytes: int) -> Engine:
    digester = Digester(SECRET, page_bytes)
    digester.warm_up()
    if name == "shm":
        return ShmEngine(digester)
    if name == "mooncake":
        return MooncakeEngine(digester=digester)
    return NixlEngine(NIXL_TRANSPORTS[name], digester)


def _missing(name: str) -> str | None:
    """Why an engine cannot be used here; None if it can."""
    if name == "mooncake":
        return MooncakeEngine.available()
    return NixlEngine.available() if name in NIXL_TRANSPORTS else None


def _layout(page_bytes: int) -> PageLayout:
    """Pages of a few tokens and exactly `page_bytes`, so that a pool is one long prompt."""
    heads = (page_bytes - HEADER_BYTES) // PAGE_STEP_BYTES
    layout = PageLayout(
        "bench", AttentionKind.GQA, layers=1, kv_heads=heads, key_width=4, value_width=4, page_tokens=PAGE_TOKENS,
        kv_format=KvFormat.NONE,
    )  # fmt: skip
    if layout.slot_bytes != page_bytes:
        raise click.BadParameter(f"--page-bytes must be a multiple of {PAGE_STEP_BYTES} from {MIN_PAGE_BYTES} on")
    return layout


def _guard(engine: Engine, page_bytes: int, slots: int, incarnation: int) -> Guard:
    digester = Digester(SECRET, page_bytes)
    return Guard(_layout(page_bytes), slots, engine, incarnation, digester, scrub=False)


def _expected(page_bytes: int, slots: int) -> ExpectedPages:
    keyer = PrefixKeyer(SECRET, PrefixIdentity("bench", "bench", _layout(page_bytes).fingerprint))
    tokens = slots * PAGE_TOKENS
    return ExpectedPages(tokens, PAGE_TOKENS, keyer.chain("bench", range(tokens), PAGE_TOKENS))


def serve(name: str, page_bytes: int, slots: int) -> None:
    """Publishes a pool of sealed pages, prints its export and [page id, generation, digest] of each page as one JSON
    line, and stays until stdin ends."""
    engine = _make(name, page_bytes)
    guard = _guard(engine, page_bytes, slots, INCARNATION)
    rng = np.random.default_rng(page_bytes)
    expected, sealed = _expected(page_bytes, slots), []
    for i, ref in enumerate(guard.allocate(OWNER, slots)):
        guard.fill(ref, OWNER, rng.bytes(page_bytes - HEADER_BYTES))
        header = PageHeader(ref.tag, guard.layout.fingerprint, i * PAGE_TOKENS, PAGE_TOKENS, expected.keys[i])
        desc = guard.seal(ref, OWNER, header, i)
        sealed.append([ref.page_id, ref.tag.generation, desc.digest])
    print(json.dumps({"export": asdict(guard.export), "pages": sealed}), flush=True)
    sys.stdin.read()
    engine.close()


def start_source(name: str, page_bytes: int, slots: int) -> subprocess.Popen[str]:
    """A process that runs `serve`; it ends with its stdin."""
    command = [
        sys.executable, "-m", "bench.transfer", "--serve", "--engine", name, "--page-bytes", str(page_bytes),
        "--pages", str(slots),
    ]  # fmt: skip
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class Receiver:
    """Our end: a decode worker's guard and receiver, and what the pages must be."""

    def __init__(self, name: str, page_bytes: int, slots: int, told: dict[str, Any]) -> None:
        export = PoolExport(**told["export"])
        self.engine = _make(name, page_bytes)
        self.page_bytes, self.slots = page_bytes, slots
        self.guard = _guard(self.engine, page_bytes, slots, INCARNATION + 1)
        self.slots_SU8 = self.engine.slots_SU8
        self.peer: Peer = self.engine.connect(export)
        self.watch = watch = _Watch()
        read_pages = watch.timed("bytes", self.engine.read_pages)

        def timed_read(*arguments: Any) -> Any:
            transfer = read_pages(*arguments)
            return _Over(transfer, wait=watch.timed("bytes", transfer.wait))

        guard: Any = _Over(self.guard, landed_digests=watch.timed("digest", self.guard.landed_digests))
        moving: Any = _Over(self.engine, read_pages=timed_read, read_tags=watch.timed("tags", self.engine.read_tags))
        self._receiver = PageReceiver(guard, moving)
        self._expected = _expected(page_bytes, slots)
        fingerprint = self.guard.layout.fingerprint
        self._descs = [
            PageDescriptor(
                PageRef(page_id, Tag(INCARNATION, generation)), i, i * PAGE_TOKENS, PAGE_TOKENS, page_bytes,
                fingerprint, self._expected.keys[i], digest,
            )
            for i, (page_id, generation, digest) in enumerate(told["pages"])
        ]  # fmt: skip
        # Sequence of the prompt is the order of the source's slots, so a place in it names a slot.
        model = np.frombuffer(mmap.mmap(-1, slots * page_bytes), np.uint8).reshape(slots, page_bytes)
        model[:] = np.arange(page_bytes, dtype=np.uint8)
        self.model_SU8 = model
        bare = {"shm": self._bare_shm, "mooncake": self._bare_mooncake}
        self._bare = bare.get(name, self._bare_nixl)(export)

    def verified(self, places_n: I64, local_n: I64) -> float:
        """One batch, proved; seconds of the pull. Raises a GenlockError when a check fails."""
        locals_n = self.guard.allocate(OWNER, places_n.size)
        orders = [PageOrder(self._descs[i], ref) for i, ref in zip(places_n.tolist(), locals_n, strict=True)]
        start_s = time.perf_counter()
        self._receiver.pull(self.peer, orders, OWNER, self._expected, TIMEOUT_MS)
        spent_s = time.perf_counter() - start_s
        self.guard.retire(locals_n, OWNER)
        return spent_s

    def bare(self, places_n: I64, local_n: I64) -> float:
        remote_n = np.array([self._descs[i].ref.page_id for i in places_n.tolist()], np.int64)
        start_s = time.perf_counter()
        self._bare(remote_n, local_n)
        return time.perf_counter() - start_s

    def memcpy(self, places_n: I64, local_n: I64) -> float:
        start_s = time.perf_counter()
        _copy_pages(self.model_SU8, self.slots_SU8, places_n, local_n)
        return time.perf_counter() - start_s

    def _bare_shm(self, export: PoolExport) -> Callable[[I64, I64], None]:
        address = parse_shm(export.address)
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY)
        mapping = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        os.close(fd)
        source_SU8 = slots_of(np.frombuffer(mapping, np.uint8), self.slots, self.page_bytes)
        return lambda remote_n, local_n: _copy_pages(source_SU8, self.slots_SU8, remote_n, local_n)

    def _bare_mooncake(self, export: PoolExport) -> Callable[[I64, I64], None]:
        address = parse_mooncake(export.address)
        engine = self.engine
        assert isinstance(engine, MooncakeEngine)
        base, local_base = address.base + tag_table_bytes(self.slots), self.slots_SU8.ctypes.data

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
        base, local_base = address.base + tag_table_bytes(self.slots), self.slots_SU8.ctypes.data

        def read(remote_n: I64, local_n: I64) -> None:
            local: Rows = [(local_base + slot * self.page_bytes, self.page_bytes, 0) for slot in local_n.tolist()]
            remote: Rows = [(base + slot * self.page_bytes, self.page_bytes, 0) for slot in remote_n.tolist()]
            handle, state = agent.post(address.agent, local, remote)
            many = len(local) * self.page_bytes > SPIN_BYTES
            while state is ReadState.RUNNING:
                if many:  # as the engine does: asking all the time takes the core that the library's thread needs
                    time.sleep(SLEEP_S)
                state = agent.poll(handle)
            if state is not ReadState.DONE:
                raise TransferError("not_done", "the library's batch failed")

        return read


def _copy_pages(source_SU8: U8, target_SU8: U8, remote_n: I64, local_n: I64) -> None:
    for remote, local in zip(remote_n.tolist(), local_n.tolist(), strict=True):
        np.copyto(target_SU8[local], source_SU8[remote])


def _cell(receiver: Receiver, engine: str, pages: int, budget_s: float) -> Row:
    rng = np.random.default_rng(pages)
    ways = (receiver.verified, receiver.bare, receiver.memcpy)
    spent_s: list[list[float]] = [[], [], []]
    parts: list[Parts] = []
    until_s = time.perf_counter() + budget_s
    for turn in range(-1, MAX_ROUNDS):  # the first round warms up
        if turn >= MIN_ROUNDS and time.perf_counter() > until_s:
            break
        places_n, local_n = rng.permutation(receiver.slots)[:pages], rng.permutation(receiver.slots)[:pages]
        for step in range(3):
            way = (turn + step) % 3  # each way comes first as often as the others
            seconds = ways[way](places_n, local_n)
            taken = receiver.watch.take(seconds, pages)
            if turn >= 0:
                spent_s[way].append(seconds)
                if way == 0:
                    parts.append(taken)
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
        us_a_page=Parts(
            **{
                name: round(float(np.median([getattr(one, name) for one in parts])), 2)
                for name in ("bytes", "digest", "tags", "book")
            }
        ),
        bare_us_a_page=round(bare_s * 1e6 / pages, 2),
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
            slots = max(MIN_SLOTS, *pages)
            with start_source(engine, size, slots) as source:
                assert source.stdout is not None
                receiver = Receiver(engine, size, slots, json.loads(source.stdout.readline()))
                rows += [_cell(receiver, engine, count, budget_s) for count in pages]
                receiver.engine.close()
    return rows


@click.command(
    epilog="""\b
Examples:
  genlock bench transfer
  genlock bench transfer --engine shm --page-bytes 391808 --pages 1 --pages 16
  genlock bench transfer --engine nixl --engine nixl-tcp --pages 128
  genlock bench transfer --json"""
)
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(ENGINES), default=ENGINES, show_default=True,
    help="nixl: the fastest way there is, on one host CMA; nixl-tcp: the same library over TCP alone.",
)  # fmt: skip
@click.option("--page-bytes", multiple=True, type=click.IntRange(MIN_PAGE_BYTES), default=PAGE_BYTES, show_default=True)
@click.option("--pages", multiple=True, type=click.IntRange(1, MAX_PAGES), default=PAGES, show_default=True)
@click.option("--budget-s", type=click.FloatRange(0.01, 600), default=1.0, show_default=True, help="For each cell.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--serve", "as_source", is_flag=True, hidden=True)
def command(
    engines: tuple[str, ...], page_bytes: tuple[int, ...], pages: tuple[int, ...], budget_s: float, as_json: bool,
    as_source: bool,
) -> int:  # fmt: skip
    """Measures verified page reads against bare ones, engine by engine."""
    if as_source:
        serve(engines[0], page_bytes[0], pages[0])
        return 0
    rows = run(engines, page_bytes, pages, budget_s, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps({"rows": [asdict(row) for row in rows]}))
        return 0
    click.echo(
        "engine     page bytes  pages  verified GB/s  bare GB/s  ratio  memcpy GB/s"
        "  us a page: bare | bytes + digest + tags + book"
    )
    for row in rows:
        click.echo(
            f"{row.engine:9s}  {row.page_bytes:10d}  {row.pages:5d}  {row.gbps_verified:13.2f}  {row.gbps_bare:9.2f}"
            f"  {row.ratio:5.2f}  {row.gbps_memcpy:11.2f}  {row.bare_us_a_page:15.1f} | {row.us_a_page.bytes:.1f}"
            f" + {row.us_a_page.digest:.1f} + {row.us_a_page.tags:.1f} + {row.us_a_page.book:.1f}"
        )
    return 0


if __name__ == "__main__":
    command()
