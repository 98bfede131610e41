"""What a chaos run can do to a worker, and when it cannot make a link."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from cluster.chaos import network
from cluster.chaos.arena import unsettled
from cluster.chaos.worker import LOG_EVERY_TURNS, Switch, Switchboard, _Clock, _Foreign
from genlock.v1 import worker_pb2
from kvstore.beacon import LANDING_SLOTS
from kvstore.transfer.common import monotonic_ms


@pytest.fixture
def board(tmp_path: Path) -> Switchboard:
    return Switchboard(tmp_path / "board")


def test_two_processes_see_the_same_board(board: Switchboard, tmp_path: Path):
    other = Switchboard(tmp_path / "board")
    board.set(Switch.CLOCK_SHIFT_MS, -5)
    board.add(Switch.REFUSED_LINES)
    assert (other.get(Switch.CLOCK_SHIFT_MS), other.get(Switch.REFUSED_LINES)) == (-5, 1)
    assert other.get(Switch.DISK_FULL) == 0


def test_the_clock_jumps_while_the_switch_is_on(board: Switchboard):
    clock = _Clock(board)
    board.set(Switch.CLOCK_SHIFT_MS, 1_000_000)
    assert clock() - monotonic_ms() > 900_000
    board.set(Switch.CLOCK_SHIFT_MS, 0)
    assert abs(clock() - monotonic_ms()) < 100_000


def test_lines_for_a_full_disk_are_refused_and_nothing_is_raised(board: Switchboard):
    clock = _Clock(board)
    board.set(Switch.DISK_FULL, 1)
    handlers = list(logging.getLogger().handlers)
    try:
        for _ in range(3 * LOG_EVERY_TURNS):
            clock()
        assert board.get(Switch.REFUSED_LINES) >= 3
    finally:
        board.set(Switch.DISK_FULL, 0)
        clock()
    assert logging.getLogger().handlers == handlers


def test_later_pages_become_the_first_one_while_the_switch_is_on(board: Switchboard):
    foreign = _Foreign(board)
    slots = np.arange(4 * (3 + LANDING_SLOTS), dtype=np.uint8).reshape(-1, 4)
    before = slots.copy()
    board.set(Switch.FOREIGN_PAGES, 1)
    assert not foreign(slots, [3]), "the page of a peer's proof is not kept, and there is no other yet"
    board.set(Switch.FOREIGN_PAGES, 0)
    assert not foreign(slots, [1])
    assert (slots == before).all()
    board.set(Switch.FOREIGN_PAGES, 1)
    assert foreign(slots, [0, 2])
    assert (slots[[0, 1, 2]] == before[1]).all()
    assert board.get(Switch.INJECTED_PAGES) == 2


@pytest.mark.parametrize(
    ("pool", "others", "back"),
    [
        ({"pages": 9, "free": 7, "cached": 2}, {}, True),
        ({"pages": 9, "free": 7, "cached": 1}, {}, False),
        ({"pages": 9, "free": 9, "quarantined": 1}, {}, False),
        ({"pages": 9, "free": 9}, {"leases": 1}, False),
        ({"pages": 9, "free": 9}, {"running_requests": 1}, False),
    ],
)
def test_a_worker_is_at_its_baseline_only_when_nobody_holds_a_page(pool, others, back):
    status = worker_pb2.WorkerStatus(worker_id="w", pool=worker_pb2.PoolStatus(**pool), **others)
    assert (unsettled(status) == "") is back


def test_why_there_is_no_link_is_said(monkeypatch: pytest.MonkeyPatch):
    assert "shm engine does not cross a network" in network.why_not("shm")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in network.why_not("nixl")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    assert "iproute2" in network.why_not("nixl")
    assert set(network.network_of("nixl")[1]) == {"link_cut", "link_slow"}


def test_the_pair_that_serves_first_lives_on_two_hosts():
    assert [network.is_far(name) for name in ("prefill-0", "decode-0")] == [False, True]
    assert [network.is_far(name) for name in ("prefill-1", "decode-1")] == [True, False]
    assert not network.is_far("prefill-11")
