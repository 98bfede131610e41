"""A process that takes host memory for a while and gives it back: it goes first where memory runs out, keeps a reserve
for all others, and ends with its parent. It runs as a script of its own, so that it imports nothing of the product."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
CHUNK_BYTES = 64 * MIB
MOST_BYTES = 8192 * MIB  # however much a host has
RESERVE_BYTES = 1024 * MIB
RESERVE_SHARE = 5  # of all memory the fifth part, if that is more
LOOK_S = 0.05
ALARM_S = 5  # after its time a balloon that hangs is ended by the kernel
OWN_BYTES = 512 * MIB  # of address space, for the interpreter itself
_PR_SET_PDEATHSIG = 1
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Limit and use of one group, of the second version and of the first.
_GROUP_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def field_of(meminfo: str, name: str) -> int:
    """Bytes of one line of /proc/meminfo; 0 where it is not there."""
    for line in meminfo.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def groups_of(cgroup: str, root: Path = _CGROUPS) -> list[Path]:
    """The folders of a process's memory groups, from its own up, of both versions; those that are there."""
    found = []
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        # In a container the path may be the host's, and the mount the container's own group.
        base = root if number == "0" else root / "memory"
        inside = base / path.lstrip("/")
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return found


def limit_of(folder: Path) -> tuple[int, int] | None:
    """Limit and use of one group in bytes; None where it has no limit. Its page cache counts as used: to take too
    little is no harm here."""
    for limit_name, used_name in _GROUP_FILES:
        try:
            limit, used = (folder / limit_name).read_text().strip(), (folder / used_name).read_text().strip()
        except OSError:
            continue
        if limit != "max":
            return int(limit), int(used)
    return None


def memory(proc: Path = _PROC, root: Path = _CGROUPS) -> tuple[int, int]:
    """What there is, and what may be taken without swapping: of the host, and of every group of this process."""
    limits = [limit_of(folder) for folder in groups_of((proc / "self/cgroup").read_text(), root)]
    meminfo = (proc / "meminfo").read_text()
    total = min([field_of(meminfo, "MemTotal"), *(found[0] for found in limits if found)])
    rooms = [max(0, found[0] - found[1]) for found in limits if found]
    return total, min([field_of(meminfo, "MemAvailable"), *rooms])


def available_bytes() -> int:
    """What may be taken here, now."""
    return memory()[1]


def reserve_of(total: int) -> int:
    """What is left to all others, always."""
    return max(RESERVE_BYTES, total // RESERVE_SHARE)


def goal_bytes(available: int, percent: int, reserve: int) -> int:
    """How much a balloon takes: a share of what is available, never the reserve, never more than `MOST_BYTES`."""
    return max(0, min(available * percent // 100, available - reserve, MOST_BYTES))


def next_chunks(held: int, goal: int, available: int, reserve: int) -> int:
    """How many chunks there are after the next look: one more while the goal and the reserve allow it; as many less as
    the reserve lacks, whoever took it."""
    if available < reserve:
        lack = -(-(reserve - available) // CHUNK_BYTES)
        return max(0, held - lack)
    grows = (held + 1) * CHUNK_BYTES <= goal and available - CHUNK_BYTES >= reserve
    return held + 1 if grows else held


def why_not() -> str:
    """Why there can be no balloon on this host, "" where there can be one."""
    if not sys.platform.startswith("linux"):
        return "memory pressure needs Linux"
    try:
        total, available = memory()
        score = int((_PROC / "self/oom_score_adj").read_text())
    except (OSError, ValueError) as error:
        return f"/proc does not tell how much memory is available: {error}"
    if score >= 1000:
        return "this process already goes first where memory runs out: a balloon could not go before it"
    reserve = reserve_of(total)
    if available - reserve < CHUNK_BYTES:
        return f"{available // MIB} MiB are available, and {reserve // MIB} of them are the reserve"
    return ""


class Balloon:
    """Memory that is really there: every page of it was touched."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        self._available = available
        self._chunks: list[mmap.mmap] = []
        self.most = 0

    @property
    def held(self) -> int:
        return len(self._chunks) * CHUNK_BYTES

    def look(self, goal: int, reserve: int) -> bool:
        """Grows by a chunk or shrinks to what the reserve allows; whether it grew."""
        before = len(self._chunks)
        wanted = next_chunks(before, goal, self._available(), reserve)
        while len(self._chunks) > wanted:
            self._chunks.pop().close()
        if wanted > before:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._chunks.append(mmap.mmap(-1, CHUNK_BYTES, flags=flags))
        self.most = max(self.most, self.held)
        return wanted > before


def first_to_go(parent: int, seconds: float, goal: int) -> None:
    """Before the first byte is taken. Raises OSError where a guard cannot be had: then nothing may be taken."""
    (_PROC / "self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_DATA, (goal + OWN_BYTES, goal + OWN_BYTES))
    signal.setitimer(signal.ITIMER_REAL, seconds + ALARM_S)  # its default is the end
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        raise OSError("the parent ended before the guards were up")


def hold(balloon: Balloon, goal: int, reserve: int, seconds: float) -> None:
    """Until the time is over or stdin ends: whoever holds the other end of it may end this, and its death does."""
    deadline = time.monotonic() + seconds
    pause_s = 0.0
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], min(pause_s, left))[0]:
            return
        pause_s = 0.0 if balloon.look(goal, reserve) else LOOK_S


def main() -> None:
    """Arguments: the parent's process id, percent of what is available, seconds. Says the most it held, in MiB."""
    parent, percent, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    total, available = memory()
    reserve = reserve_of(total)
    goal = goal_bytes(available, percent, reserve)
    first_to_go(parent, seconds, goal)
    balloon = Balloon()
    hold(balloon, goal, reserve, seconds)
    print(balloon.most // MIB, flush=True)


if __name__ == "__main__":
    main()
