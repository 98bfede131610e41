"""A small team of threads for kernels that run without the GIL.

Work is a row of chunks. The caller takes chunks too, so the work ends even when no helper ever wakes up (a loaded
machine, a forked child): the caller waits only for chunks that a helper has begun. Any number of threads may use one
team at once; a caller that finds it busy does its own work alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class _Job:
    """One call's chunks. `list.pop` hands each chunk to exactly one thread."""

    def __init__(self, work: Callable[[int, int], None], bounds: list[tuple[int, int]]) -> None:
        self._work = work
        self._left = bounds
        self._unfinished = len(bounds)
        self._lock = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()
        self.error: BaseException | None = None

    def take_chunks(self) -> None:
        while True:
            try:
                start, stop = self._left.pop()
            except IndexError:
                return
            try:
                self._work(start, stop)
            except BaseException as error:  # handed to the caller, who raises it
                self.error = error
            with self._lock:
                self._unfinished -= 1
                if not self._unfinished:
                    self._done.release()

    def wait(self) -> None:
        """Returns when every chunk is done; then lets go of the work, which a helper may find long after."""
        self._done.acquire()
        self._work = _nothing


class ThreadTeam:
    """`threads` in all, the caller included; helpers start with the first call that needs them and are daemons."""

    def __init__(self, threads: int) -> None:
        self._helpers = max(0, threads - 1)
        self._busy = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = False
        self._dismiss = weakref.finalize(self, _send_home, self._jobs, self._helpers)

    def run(self, work: Callable[[int, int], None], items: int, chunks_per_thread: int = 4) -> None:
        """Calls `work(start, stop)` until every item in [0, items) is done; raises the first error of any chunk."""
        if not self._helpers or items < 2 or not self._busy.acquire(blocking=False):
            work(0, items)
            return
        try:
            self._start()
            chunks = min(items, chunks_per_thread * (self._helpers + 1))
            job = _Job(work, [(items * i // chunks, items * (i + 1) // chunks) for i in range(chunks)])
            for _ in range(min(self._helpers, chunks - 1)):
                self._jobs.put(job)
            job.take_chunks()
            job.wait()
        finally:
            self._busy.release()
        if job.error is not None:
            raise job.error

    def close(self) -> None:
        """Ends the helpers, as losing the team does. The team still works afterwards, with the caller alone."""
        with self._busy:
            self._helpers = 0
            self._dismiss()

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        for index in range(self._helpers):
            threading.Thread(target=_help, args=(self._jobs,), name=f"attention-{index}", daemon=True).start()


def _help(jobs: SimpleQueue[_Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        job.take_chunks()
        del job  # waiting for the next one must not keep this one's arrays


def _send_home(jobs: SimpleQueue[_Job | None], helpers: int) -> None:
    for _ in range(helpers):
        jobs.put(None)


def _nothing(_start: int, _stop: int) -> None:
    """The work of a job that is done."""
