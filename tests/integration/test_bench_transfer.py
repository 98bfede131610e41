"""The transfer benchmark runs, and tells where a verified pull's time goes; its figures are not looked at."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from click.testing import CliRunner

from bench.transfer import Receiver, command, start_source
from kvstore.transfer.base import PagePair, TransferState
from tests.contract.transfer_kit import require


def test_each_cell_tells_its_parts():
    arguments = "--engine shm --page-bytes 4096 --pages 1 --pages 4 --budget-s 0.01 --json"
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["engine"], row["page_bytes"], row["pages"]) for row in rows] == [("shm", 4096, 1), ("shm", 4096, 4)]
    for row in rows:
        assert set(row["us_a_page"]) == {"bytes", "digest", "tags", "book"}
        assert all(value > 0 for value in row["us_a_page"].values()), "each part was on the way, and was measured"
        assert row["bare_us_a_page"] > 0


@pytest.mark.parametrize("engine", ["nixl", "nixl-tcp"])
def test_nixl_has_a_row_for_each_way(engine: str):
    require(engine)
    arguments = f"--engine {engine} --page-bytes 4096 --pages 4 --budget-s 0.01 --json"
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (row["engine"], row["pages"]) == (engine, 4)
    assert row["gbps_verified"] > 0
    assert row["gbps_bare"] > 0


@pytest.mark.parametrize(("engine", "state"), [("nixl", TransferState.DONE), ("nixl-tcp", TransferState.TIMED_OUT)])
def test_a_row_takes_the_way_that_it_names(engine: str, state: TransferState):
    """Over CMA a source that is stopped is read all the same; over TCP its own thread has to answer. The bare side
    reads through the same agent of the library."""
    require(engine)
    with start_source(engine, 4096, 8) as source:
        try:
            receiver = Receiver(engine, 4096, 8, json.loads(source.stdout.readline()))
            places = np.arange(2)
            assert receiver.verified(places, places) > 0
            assert receiver.bare(places, places) > 0
            os.kill(source.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, source.pid, os.WSTOPPED)
            assert receiver.engine.read_pages(receiver.peer, [PagePair(0, 0)]).wait(500) is state
            receiver.engine.close()
        finally:
            source.kill()
