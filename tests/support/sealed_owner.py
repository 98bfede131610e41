"""A worker's pool of sealed pages in a process of its own, for tests that stop that process while it is read.

    python sealed_owner.py ENGINE PAGES

`Owner` starts one. The process prints its export and [page id, generation, digest] of each page as one JSON line and
stays until it is killed. Pages are large (1 MiB), so that a read of many has a middle; page i holds `body_of(i)`.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from kvstore.descriptor import PageDescriptor
from kvstore.digest import Digester
from kvstore.guard import Guard
from kvstore.header import PageHeader
from kvstore.ids import PageRef, Tag
from kvstore.keys import PrefixIdentity, PrefixKeyer
from kvstore.layout import HEADER_BYTES, AttentionKind, KvFormat, PageLayout
from kvstore.receipt import ExpectedPages
from kvstore.transfer.base import PoolExport, TransferEngine
from kvstore.transfer.mooncake import MooncakeEngine
from kvstore.transfer.nixl import NixlEngine

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECRET = b"a secret of the test cluster"
PAGE_TOKENS = 4
LAYOUT = PageLayout(
    "late", AttentionKind.GQA, layers=64, kv_heads=8, key_width=64, value_width=64, page_tokens=PAGE_TOKENS,
    kv_format=KvFormat.NONE,
)  # fmt: skip
OWNER, INCARNATION = 1, 4_242


def make_engine(kind: str, **options: object) -> TransferEngine:
    return NixlEngine("tcp", **options) if kind == "nixl-tcp" else MooncakeEngine(**options)


def make_guard(engine: TransferEngine, slots: int, incarnation: int, **options: object) -> Guard:
    return Guard(LAYOUT, slots, engine, incarnation, Digester(SECRET, LAYOUT.slot_bytes), **options)


def expected_of(pages: int) -> ExpectedPages:
    keyer = PrefixKeyer(SECRET, PrefixIdentity("rev", "tok", LAYOUT.fingerprint))
    tokens = pages * PAGE_TOKENS
    return ExpectedPages(tokens, PAGE_TOKENS, keyer.chain("t", range(tokens), PAGE_TOKENS))


def body_of(index: int) -> bytes:
    """No byte is zero, so that each one that lands in an empty slot shows."""
    rng = np.random.default_rng(index)
    return rng.integers(1, 256, LAYOUT.slot_bytes - HEADER_BYTES, dtype=np.uint8).tobytes()


class Owner:
    """The process, and the descriptors that its pages were given."""

    def __init__(self, kind: str, pages: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, str(pages)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert self._process.stdout is not None
        told = json.loads(self._process.stdout.readline())
        self.export = PoolExport(**told["export"])
        self.expected = expected_of(pages)
        self.descriptors = _descriptors(told["pages"], self.expected)

    def stop(self) -> None:
        """Returns once all threads of the process stand still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _descriptors(told: Sequence[tuple[int, int, int]], expected: ExpectedPages) -> list[PageDescriptor]:
    return [
        PageDescriptor(
            PageRef(page_id, Tag(INCARNATION, generation)), i, i * PAGE_TOKENS, PAGE_TOKENS, LAYOUT.slot_bytes,
            LAYOUT.fingerprint, expected.keys[i], digest,
        )
        for i, (page_id, generation, digest) in enumerate(told)
    ]  # fmt: skip


def serve(kind: str, pages: int) -> None:
    engine = make_engine(kind)
    guard = make_guard(engine, pages, INCARNATION)
    expected, sealed = expected_of(pages), []
    for i, ref in enumerate(guard.allocate(OWNER, pages)):
        guard.fill(ref, OWNER, body_of(i))
        header = PageHeader(ref.tag, LAYOUT.fingerprint, i * PAGE_TOKENS, PAGE_TOKENS, expected.keys[i])
        sealed.append((ref.page_id, ref.tag.generation, guard.seal(ref, OWNER, header, i).digest))
    print(json.dumps({"export": asdict(guard.export), "pages": sealed}), flush=True)
    signal.pause()  # with the engine alive
    engine.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
