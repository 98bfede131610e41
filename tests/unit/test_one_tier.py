"""There is one place for pages, a worker's pool: nothing that handles pages writes files or calls a store."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("kvstore", "prefill", "decode")
# The shared memory that a pool is.
POOLS = {"kvstore/transfer/shm.py"}
WRITERS = frozenset(
    {
        "write_bytes",
        "write_text",
        "tofile",
        "memmap",
        "save",
        "savez",
        "dump",
        "pwrite",
        "mkstemp",
        "sendfile",
        "copyfile",
    }
)
STORES = frozenset({"redis", "boto3", "fsspec", "sqlite3", "shelve", "pickle", "tempfile", "lmdb", "requests", "httpx"})


def writes(tree: ast.Module) -> Iterator[str]:
    """What in a module could put pages somewhere else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            yield from (name for name in names if name.partition(".")[0] in STORES)
        elif isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            words = [w.value for w in ast.walk(node) if isinstance(w, ast.Constant) and isinstance(w.value, str)]
            flags = {getattr(w, "attr", "") for w in ast.walk(node)}
            if name in WRITERS or (
                name == "open"
                and (
                    any(set(w) & set("wax+") and len(w) <= 3 for w in words)
                    or flags & {"O_RDWR", "O_WRONLY", "O_CREAT"}
                )
            ):
                yield name


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_that_handles_pages_writes_files_or_calls_a_store(room: str):
    for path in (ROOT / room).rglob("*.py"):
        found = list(writes(ast.parse(path.read_text("utf-8"))))
        assert not found or str(path.relative_to(ROOT)) in POOLS, (path, found)


@pytest.mark.parametrize(
    "text",
    [
        "import redis", "from redis.asyncio import Redis", "open('kv', 'wb')", "Path('kv').open('ab')",
        "page.tofile('kv')", "Path('kv').write_bytes(page)", "np.save('kv', page)",
        "os.open('kv', os.O_WRONLY | os.O_CREAT)", "import pickle",
    ],
)  # fmt: skip
def test_control_a_tier_would_be_seen(text: str):
    assert list(writes(ast.parse(text)))
