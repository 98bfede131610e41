"""The workers of a chaos run: real ones, with a switchboard that the run reaches into from outside their process."""

from __future__ import annotations

import logging
import mmap
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np

from cluster.chaos.ports import note_the_hosts
from cluster.launch.build import BuiltWorker, WorkerTuning
from cluster.launch.spec import WorkerSpec
from cluster.roles import Role
from cluster.selftest.injector import LandingEngine
from kvstore.beacon import LANDING_SLOTS
from kvstore.checks import ALL_CHECKS
from kvstore.tables import U8
from kvstore.transfer.base import TransferEngine
from kvstore.transfer.common import monotonic_ms

FULL_DISK = "/dev/full"  # every write fails with ENOSPC
LOG_EVERY_TURNS = 20
_BYTES = 64


class Switch(IntEnum):
    """Places on the board, 8 bytes each. The run writes the first three, the worker the others."""

    CLOCK_SHIFT_MS = 0
    DISK_FULL = 1
    FOREIGN_PAGES = 2
    REFUSED_LINES = 3
    INJECTED_PAGES = 4


class Switchboard:
    """A file of a few numbers that two processes share. Each number has one writer."""

    def __init__(self, path: Path) -> None:
        """Creates the file if it is not there."""
        path.touch()
        with path.open("r+b") as file:
            if path.stat().st_size < _BYTES:
                file.truncate(_BYTES)
            self._map = mmap.mmap(file.fileno(), _BYTES)

    def get(self, switch: Switch) -> int:
        return int(struct.unpack_from("q", self._map, switch * 8)[0])

    def set(self, switch: Switch, value: int) -> None:
        struct.pack_into("q", self._map, switch * 8, value)

    def add(self, switch: Switch) -> None:
        self.set(switch, self.get(switch) + 1)


class FullDiskHandler(logging.FileHandler):
    """A log file on a full disk. Counts what it could not write instead of telling stderr."""

    def __init__(self, board: Switchboard) -> None:
        super().__init__(FULL_DISK, mode="w")
        self._board = board

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802,RUF100 # logging's name
        self._board.add(Switch.REFUSED_LINES)


class _Clock:
    """The worker's clock. It runs ahead when told to; on a full disk it also logs, on whatever thread asks the time."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._log = logging.getLogger("genlock.chaos")
        self._handler: FullDiskHandler | None = None
        self._turns = 0

    def __call__(self) -> int:
        full = bool(self._board.get(Switch.DISK_FULL))
        if full != (self._handler is not None):
            self._switch(full)
        self._turns += 1
        if full and self._turns % LOG_EVERY_TURNS == 0:
            self._log.warning("a line for a full disk")
        return monotonic_ms() + self._board.get(Switch.CLOCK_SHIFT_MS)

    def _switch(self, full: bool) -> None:
        root = logging.getLogger()
        if full:
            self._handler = FullDiskHandler(self._board)
            root.addHandler(self._handler)
        elif self._handler is not None:
            root.removeHandler(self._handler)
            self._handler = None  # not closed: its buffer could not be written


class _Foreign:
    """Keeps the first page of a request that arrived, and puts it in the place of all later ones while the switch is
    on. Not the page that proves a peer: no model reads that one, and a wrong answer would not show what it shows."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._kept: bytes = b""

    def __call__(self, slots_SU8: U8, page_ids: Sequence[int]) -> bool:
        if not self._kept and page_ids[0] < len(slots_SU8) - LANDING_SLOTS:
            self._kept = slots_SU8[page_ids[0]].tobytes()
        if not self._kept or not self._board.get(Switch.FOREIGN_PAGES):
            return False
        for page_id in page_ids:
            slots_SU8[page_id] = np.frombuffer(self._kept, np.uint8)
            self._board.add(Switch.INJECTED_PAGES)
        return True


def board_path(folder: str, worker_id: str) -> Path:
    return Path(folder) / f"{worker_id}.board"


def build_for_chaos(folder: str, checks_off: tuple[str, ...], spec: WorkerSpec) -> BuiltWorker:
    """A worker with a switchboard in `folder`; picklable, so that an actor can make it. `checks_off` is for the
    control that shows that the judge can see."""
    note_the_hosts(folder, spec.worker_id)
    board = Switchboard(board_path(folder, spec.worker_id))
    foreign = _Foreign(board)

    def wrap(engine: TransferEngine) -> TransferEngine:
        return LandingEngine(engine, foreign)

    return BuiltWorker(
        spec,
        WorkerTuning(
            checks=ALL_CHECKS.without(*checks_off),
            clock=_Clock(board),
            wrap_engine=wrap if spec.role is Role.DECODE else None,
        ),
    )
