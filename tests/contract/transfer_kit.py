"""Pools of every engine kind, here and in other processes, for the contract suite."""

import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.transfer.base import (
    PagePair,
    Peer,
    PoolExport,
    TransferEngine,
    TransferState,
)
from kvstore.transfer.common import slots_of, tags_of
from kvstore.transfer.faulty import FaultyEngine
from kvstore.transfer.memory import MemoryEngine, MemoryFabric
from kvstore.transfer.mooncake import MooncakeEngine
from kvstore.transfer.nixl import NixlEngine
from kvstore.transfer.shm import ShmEngine

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHILD = pathlib.Path(__file__).with_name("transfer_peer.py")
TIMEOUT_MS = 10_000
KINDS = ("memory", "shm", "mooncake", "nixl", "nixl-tcp", "faulty")
PROCESS_KINDS = ("shm", "mooncake", "nixl", "nixl-tcp", "faulty")
INCARNATION = 0x1234_5678_9ABC_DEF1


@dataclass
class Pool:
    """One engine with its published pool."""

    engine: TransferEngine
    buffer: np.ndarray
    export: PoolExport

    @property
    def slots(self) -> np.ndarray:
        return slots_of(self.buffer, self.export.slots, self.export.slot_bytes)

    @property
    def tags(self) -> np.ndarray:
        return tags_of(self.buffer, self.export.slots)


@dataclass
class Child:
    """A pool in another process."""

    process: subprocess.Popen
    export: PoolExport
    slots: np.ndarray

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@dataclass
class Kit:
    """Makes engines of one kind and closes them."""

    kind: str
    fabric: MemoryFabric = field(default_factory=MemoryFabric)
    made: list[TransferEngine] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    @property
    def wire_name(self) -> str:
        return {"faulty": "shm", "nixl-tcp": "nixl"}.get(self.kind, self.kind)

    def engine(self, address: str = "", **options: object) -> TransferEngine:
        match self.kind:
            case "memory":
                engine = MemoryEngine(self.fabric, address or f"pool-{len(self.made)}")
            case "shm":
                engine = ShmEngine(**options)
            case "faulty":
                engine = FaultyEngine(ShmEngine(**options))
            case "nixl":
                engine = NixlEngine(**options)
            case "nixl-tcp":
                engine = NixlEngine("tcp", **options)
            case _:
                engine = MooncakeEngine(**options)
        self.made.append(engine)
        return engine

    def pool(self, slots: int, slot_bytes: int, seed: int = 0, incarnation: int = INCARNATION, **options) -> Pool:
        engine = self.engine(**options)
        buffer = engine.allocate(slots, slot_bytes)
        pool = Pool(engine, buffer, engine.publish(incarnation, "layout"))
        pool.slots[:] = np.random.default_rng(seed).integers(0, 256, pool.slots.shape, dtype=np.uint8)
        return pool

    def child(self, slots: int, slot_bytes: int, seed: int = 0, incarnation: int = INCARNATION) -> Child:
        numbers = [str(n) for n in (slots, slot_bytes, incarnation, seed)]
        process = subprocess.Popen(
            [sys.executable, str(CHILD), self.wire_name, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        export = PoolExport(**json.loads(process.stdout.readline()))
        content = np.random.default_rng(seed).integers(0, 256, (slots, slot_bytes), dtype=np.uint8)
        self.children.append(Child(process, export, content))
        return self.children[-1]

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.process.stdin.close()
            child.process.stdout.close()
        for engine in self.made:
            engine.close()


def require(kind: str) -> None:
    library = {"mooncake": MooncakeEngine, "nixl": NixlEngine, "nixl-tcp": NixlEngine}.get(kind)
    reason = library.available() if library is not None else None
    if reason is not None:
        pytest.skip(reason)


@contextmanager
def kit_of(kind: str) -> Iterator[Kit]:
    """Skips the test where the kind's library is not there."""
    require(kind)
    made = Kit(kind)
    yield made
    made.close()


def random_pairs(seed: int, count: int, remote_slots: int, local_slots: int) -> list[PagePair]:
    rng = random.Random(seed)
    return [
        PagePair(*pair)
        for pair in zip(rng.sample(range(remote_slots), count), rng.sample(range(local_slots), count), strict=True)
    ]


def read(reader: Pool, peer: Peer, pairs: list[PagePair], timeout_ms: int = TIMEOUT_MS) -> TransferState:
    return reader.engine.read_pages(peer, pairs).wait(timeout_ms)


def assert_exactly(before: np.ndarray, reader: Pool, source_slots: np.ndarray, pairs: list[PagePair]) -> None:
    """The named slots hold the source's bytes and every other byte of the whole buffer is as it was."""
    expected = before.copy()
    expected_slots = slots_of(expected, reader.export.slots, reader.export.slot_bytes)
    for pair in pairs:
        expected_slots[pair.local_page_id] = source_slots[pair.remote_page_id]
    np.testing.assert_array_equal(reader.buffer, expected)
