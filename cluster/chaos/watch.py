"""What the soak looks at: this process's memory, descriptors and shared regions, and every table of the cluster."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOMS = ("cluster", "decode", "prefill", "kvstore", "model", "wire")
# Of the libraries' own objects nothing is looked into.
TABLES = (dict, list, set, frozenset, tuple, deque, bytearray)
MAX_OBJECTS = 200_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def of_process() -> dict[str, float]:
    """Resident bytes, open descriptors, threads, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text()
    return {
        "resident_bytes": float(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES),
        "descriptors": float(len(os.listdir("/proc/self/fd"))),
        "threads": float(len(os.listdir("/proc/self/task"))),
        "shared_regions": float(sum("/dev/shm/" in line or "/memfd:" in line for line in maps.splitlines())),
    }


def table_sizes(roots: Iterable[object]) -> dict[str, float]:
    """Lengths of all containers that are attributes of the product's objects reachable from `roots`, summed by class
    and attribute. A table that is new in the product is looked at without being named here."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[object] = list(roots)
    while todo and len(seen) < MAX_OBJECTS:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for name, value in _attributes(item):
            if isinstance(value, TABLES):
                sizes[f"{type(item).__name__}.{name}"] += len(value)
                todo.extend(_inside(value))
            elif _is_ours(value):
                todo.append(value)
    return {name: float(size) for name, size in sorted(sizes.items())}


def _attributes(item: object) -> Iterable[tuple[str, object]]:
    yield from list(getattr(item, "__dict__", {}).items())
    for kind in type(item).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name):
                yield name, getattr(item, name)


def _inside(table: object) -> Iterable[object]:
    """Objects of ours in a table; other tables in it are looked into as well."""
    if isinstance(table, bytearray):
        return
    items = list(table.values()) if isinstance(table, Mapping) else list(table)  # type: ignore[call-overload] # one of TABLES
    for item in items:
        if _is_ours(item):
            yield item
        elif isinstance(item, (list, tuple, set, dict)):
            yield from _inside(item)


def _is_ours(value: object) -> bool:
    if isinstance(value, type) or (callable(value) and not hasattr(value, "__dict__")):
        return False
    return type(value).__module__.split(".")[0] in ROOMS
