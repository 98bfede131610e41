"""The thread that owns a worker's core: it runs commands and turns, one after another, also when idle.

Everything that touches the core runs here, so the core needs no locks. An exception in a command or a turn is counted
and survived: one request's surprise never ends a worker.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import NoCapacity, Unavailable

R = TypeVar("R")

log = logging.getLogger("genlock.step_loop")

MAX_COMMANDS = 65_536
IDLE_MS = 20
MAX_COMMANDS_A_TURN = 1024


class StepLoop:
    """`turn()` does one step and returns True if there is more to do at once; `clock()` gives milliseconds."""

    def __init__(self, name: str, turn: Callable[[], bool], clock: Callable[[], int], idle_ms: int = IDLE_MS) -> None:
        self._turn = turn
        self._clock = clock
        self._idle_ms = idle_ms
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue(MAX_COMMANDS)
        self._stopping = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.surprises = 0
        self.last_turn_ms = clock()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_ms: int) -> bool:
        """Ends the thread after its present turn. True if it ended in time."""
        self._stopping.set()
        self._gate.set()
        if self._thread.is_alive():
            self._thread.join(timeout_ms / 1000)
        return not self._thread.is_alive()

    def post(self, command: Callable[[], None]) -> None:
        """Queues a command. Raises Unavailable when stopped, NoCapacity when the queue is full."""
        if self._stopping.is_set():
            raise Unavailable("worker_stopped", "this worker has stopped")
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            raise NoCapacity("command_queue_full", "this worker has too many commands waiting") from None

    def post_quietly(self, command: Callable[[], None]) -> None:
        """Like `post`; on a loop that has stopped there is nothing left to tell."""
        try:
            self.post(command)
        except Unavailable:
            return

    async def call(self, work: Callable[[], R]) -> R:
        """Runs `work` on the step thread; returns what it returns or raises what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def settle(action: Callable[[], None]) -> None:
            if not future.done():
                action()

        def command() -> None:
            try:
                result = work()
            except Exception as error:
                caught = error
                loop.call_soon_threadsafe(settle, lambda: future.set_exception(caught))
            else:
                loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

        self.post(command)
        return await future

    def freeze(self, frozen: bool) -> None:
        """Fault injection: stops turning (and running commands) until thawed."""
        if frozen:
            self._gate.clear()
        else:
            self._gate.set()

    def _run(self) -> None:
        busy = False
        while not self._stopping.is_set():
            self._gate.wait()
            self._run_commands(0 if busy else self._idle_ms)
            self.last_turn_ms = self._clock()
            try:
                busy = self._turn()
            except Exception:
                self._survive("turn")
                busy = False

    def _run_commands(self, wait_ms: int) -> None:
        try:
            command = self._commands.get(timeout=wait_ms / 1000) if wait_ms else self._commands.get_nowait()
            for _ in range(MAX_COMMANDS_A_TURN):
                try:
                    command()
                except Exception:
                    self._survive("command")
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _survive(self, where: str) -> None:
        self.surprises += 1
        log.exception("a %s of the step loop raised; the worker goes on", where)
