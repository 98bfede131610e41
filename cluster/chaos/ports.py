"""The ports on which a worker listens, as /proc tells of its process: those that were there before the worker was made
are its host's (Ray's), the others its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"
_PROC = Path("/proc")
_TABLES = ("net/tcp", "net/tcp6")


def listeners(table: str) -> dict[str, int]:
    """Of a table like /proc/net/tcp: the ports of listening sockets by inode."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {row[9]: int(row[1].rsplit(":", 1)[1], 16) for row in rows if len(row) > 9 and row[3] == _LISTENS}


def listening(pid: int | str, proc: Path = _PROC) -> frozenset[int]:
    """Ports on which a process listens, in whatever network namespace it is; none for one that is gone."""
    folder = proc / str(pid)
    try:
        links = [_target(link) for link in (folder / "fd").iterdir()]
        # The process's own table: another namespace has another one.
        by_inode = {inode: port for name in _TABLES for inode, port in listeners((folder / name).read_text()).items()}
    except OSError:
        return frozenset()
    inodes = (link.removeprefix("socket:[").rstrip("]") for link in links)
    return frozenset(by_inode[inode] for inode in inodes if inode in by_inode)


def _target(link: Path) -> str:
    """ "" for a descriptor that was closed meanwhile: the one, at least, by which the folder was read."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _note(folder: str, worker_id: str) -> Path:
    return Path(folder) / f"{worker_id}.ports"


def note_the_hosts(folder: str, worker_id: str) -> None:
    """Inside the worker's process, before the worker is made."""
    _note(folder, worker_id).write_text(json.dumps(sorted(listening("self"))))


def own_ports(folder: str, worker_id: str, pid: int, but: Iterable[int] = ()) -> tuple[int, ...]:
    """The worker's own ports: gRPC's and the transfer engine's. None where it is gone."""
    note = _note(folder, worker_id)
    hosts = json.loads(note.read_text()) if note.exists() else []
    return tuple(sorted(listening(pid) - {*hosts, *but}))
