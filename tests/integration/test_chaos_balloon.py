"""The balloon of `memory_pressure`: how much it takes, and that it gives back and ends, whatever becomes of others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.chaos import balloon
from cluster.chaos.balloon import CHUNK_BYTES, MIB, MOST_BYTES, Balloon, goal_bytes, next_chunks, reserve_of
from cluster.chaos.pressure import PROGRAM, Pressure
from kvstore.errors import Unavailable

GIB = 1024 * MIB
PATIENCE_S = 60.0


def test_a_balloon_takes_its_share_and_never_the_reserve_nor_more_than_the_most():
    assert reserve_of(2 * GIB) == GIB
    assert reserve_of(20 * GIB) == 4 * GIB
    assert goal_bytes(4 * GIB, 50, GIB) == 2 * GIB
    assert goal_bytes(2 * GIB, 75, GIB) == GIB
    assert goal_bytes(GIB // 2, 75, GIB) == 0
    assert goal_bytes(1000 * GIB, 75, GIB) == MOST_BYTES


@pytest.mark.parametrize(
    ("held", "goal", "available", "wanted"),
    [
        (0, 3, 9, 1),
        (2, 3, 9, 3),
        (3, 3, 9, 3),  # the goal
        (2, 9, 4, 2),  # the next chunk would come out of the reserve
        (2, 9, 3, 1),  # somebody needs a chunk of the reserve
        (2, 9, 0, 0),  # and more of it than the balloon has
    ],
)
def test_it_grows_to_its_goal_and_gives_back_what_the_reserve_lacks(held: int, goal: int, available: int, wanted: int):
    chunk = CHUNK_BYTES
    assert next_chunks(held, goal * chunk, available * chunk, 4 * chunk) == wanted


def test_what_it_gives_back_is_given_back():
    available = [10 * CHUNK_BYTES]
    taken = Balloon(lambda: available[0])
    before = resident()
    while taken.look(2 * CHUNK_BYTES, 2 * CHUNK_BYTES):
        pass
    assert taken.held == 2 * CHUNK_BYTES
    assert resident() - before > CHUNK_BYTES * 3 // 2
    available[0] = 0
    assert not taken.look(2 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert taken.held == 0
    assert resident() - before < CHUNK_BYTES // 2
    assert taken.most == 2 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("cgroup", "files", "wanted"),
    [
        ("0::/", {}, (8, 6)),
        ("0::/pod/me", {"pod/memory.max": "4", "pod/memory.current": "1"}, (4, 3)),
        ("0::/pod/me", {"pod/me/memory.max": "max", "pod/me/memory.current": "1"}, (8, 6)),
        ("4:cpu,memory:/me", {"memory/me/memory.limit_in_bytes": "5", "memory/me/memory.usage_in_bytes": "5"}, (5, 0)),
        ("4:cpu:/me", {"memory/me/memory.limit_in_bytes": "5", "memory/me/memory.usage_in_bytes": "5"}, (8, 6)),
        # In a container the path is the host's, and the mount is the group itself.
        ("4:memory:/far", {"memory/memory.limit_in_bytes": "2", "memory/memory.usage_in_bytes": "1"}, (2, 1)),
    ],
)
def test_the_limits_of_groups_count_as_the_hosts_do(tmp_path: Path, cgroup: str, files: dict[str, str], wanted):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup + "\n")
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 6291456 kB\n")
    for name, value in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(value if value == "max" else str(int(value) * GIB))
    assert balloon.memory(tmp_path, tmp_path / "groups") == tuple(number * GIB for number in wanted)


def test_why_there_is_no_balloon_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(balloon, "memory", lambda: (8 * GIB, GIB))
    assert "1024 MiB are available, and 1638 of them are the reserve" in balloon.why_not()
    monkeypatch.setattr(balloon, "_PROC", Path("/nowhere"))
    assert "does not tell" in balloon.why_not()
    monkeypatch.setattr(sys, "platform", "plan9")
    assert "Linux" in balloon.why_not()


# --- real ones ------------------------------------------------------------------------------------------------------


@pytest.fixture
def percent() -> int:
    """A share that is one chunk or a little more."""
    if reason := balloon.why_not():
        pytest.skip(reason)
    return 1 + 100 * CHUNK_BYTES // balloon.available_bytes()


@pytest.fixture
def held(percent: int) -> Iterator[subprocess.Popen[bytes]]:
    """A balloon of ours that holds its chunk and would do so for long."""
    process = blow(percent, os.getpid(), 50)
    try:
        until(lambda: process.poll() is not None or resident(process.pid) >= CHUNK_BYTES)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_real_balloon_is_the_first_to_go_and_may_not_take_more_than_its_goal(held: subprocess.Popen[bytes]):
    assert resident(held.pid) >= CHUNK_BYTES
    assert Path(f"/proc/{held.pid}/oom_score_adj").read_text().strip() == "1000"
    limit = next(x for x in Path(f"/proc/{held.pid}/limits").read_text().splitlines() if x.startswith("Max data size"))
    assert int(limit.split()[3]) < 2 * CHUNK_BYTES + balloon.OWN_BYTES + balloon.available_bytes() // 50


def test_a_real_balloon_ends_when_its_stdin_does(held: subprocess.Popen[bytes]):
    told, _ = held.communicate(timeout=PATIENCE_S)  # closes stdin
    assert held.returncode == 0
    assert int(told) * MIB >= CHUNK_BYTES


def test_a_real_balloon_dies_with_its_parent_even_if_another_holds_its_stdin(percent: int):
    code = (
        "import os, subprocess, sys, time\n"
        f"arguments = [sys.executable, '-I', {str(PROGRAM)!r}, str(os.getpid()), {str(percent)!r}, '50']\n"
        "print(subprocess.Popen(arguments, stdin=0, stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "time.sleep(50)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            until(lambda: resident(child) >= CHUNK_BYTES)
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            until(lambda: resident(child) == 0)
        finally:
            parent.kill()


def test_a_balloon_whose_parent_is_gone_takes_nothing(percent: int):
    process = blow(percent, 1, 50)
    _, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode
    assert b"the parent ended" in complaint


async def test_pressure_ends_by_itself_and_tells_what_it_held(percent: int):
    pressure = Pressure()
    await pressure.squeeze(percent, 2.0)
    assert pressure.most_mib * MIB >= CHUNK_BYTES
    await pressure.squeeze(0, 0.1)
    assert pressure.most_mib * MIB >= CHUNK_BYTES, "the most of all"


async def test_a_balloon_that_fails_or_hangs_is_told_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "program.py"
    monkeypatch.setattr("cluster.chaos.pressure.PROGRAM", program)
    monkeypatch.setattr("cluster.chaos.pressure.END_S", 2.0)
    program.write_text("raise SystemExit('no memory')")
    with pytest.raises(Unavailable, match="no memory"):
        await Pressure().squeeze(1, 0.1)
    pid = tmp_path / "pid"
    program.write_text(f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(50)")
    with pytest.raises(Unavailable, match="did not end"):
        await Pressure().squeeze(1, 0.1)
    assert resident(int(pid.read_text())) == 0


async def test_a_run_that_is_cancelled_takes_its_balloon_along(percent: int):
    task = asyncio.create_task(Pressure().squeeze(percent, 50))
    while not (found := children()):
        await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [resident(pid) for pid in found] == [0] * len(found)


def blow(percent: int, parent: int, seconds: float) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-I", str(PROGRAM), str(parent), str(percent), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe)


def resident(pid: int | str = "self") -> int:
    """Bytes; 0 for a process that is gone, or that nobody has asked for its end yet."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return balloon.field_of(status, "VmRSS")


def children() -> list[int]:
    """Balloons of this process."""
    pids = [pid for t in Path("/proc/self/task").iterdir() for pid in (t / "children").read_text().split()]
    return [int(pid) for pid in pids if str(PROGRAM).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)
