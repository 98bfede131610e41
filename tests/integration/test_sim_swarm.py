"""More seeds than `tests/sim` plays, and seeds that are played in processes of their own."""

import os
import subprocess
import sys

import pytest

from sim.coverage import REJECTS
from sim.laws import LAWS
from sim.runner import Report, play, run, swarm

SLICE = range(150)


@pytest.fixture(scope="module")
def report() -> Report:
    return play(SLICE, (), tuple(LAWS))


def test_slice_finds_nothing(report):
    assert report.seeds == len(SLICE)
    assert report.violations == 0, report.failures


def test_slice_answers_and_refuses(report):
    assert report.outcomes["ok"] > 300
    assert sum(report.outcomes.values()) - report.outcomes["ok"] > 300
    assert report.page_operations > 200_000


def test_slice_reaches_nearly_everything(report):
    unreached = report.unreached()
    assert len(unreached) <= 12, unreached
    checks = [name for name in REJECTS if any(u.startswith(f"{name}:") for u in unreached)]
    assert not checks, f"never said no: {checks}"


def test_same_seed_same_trace_in_another_process():
    code = "from sim.runner import run; print(run(9).trace)"
    traces = set()
    for salt in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=100
        )
        traces.add(done.stdout)
    assert traces == {run(9).trace + "\n"}


def test_two_processes_count_like_one():
    alone, both = play(range(8), (), ("wrong_token",)), swarm(range(8), jobs=2, laws=("wrong_token",))
    assert (alone.operations, alone.events, alone.outcomes) == (both.operations, both.events, both.outcomes)
