"""The thread that owns a worker's core: it runs commands and turns, one after another, also when idle.

Everything that touches the core runs here, so the core needs no locks. An exception in a command or a turn is counted
and survived: one request's surprise never ends a worker. A command that a stop overtakes is refused, never forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from kvstore.errors import NoCapacity, Unavailable
from wire.errors import surprise

R = TypeVar("R")

MAX_COMMANDS = 65_536
IDLE_MS = 20
MAX_COMMANDS_A_TURN = 1024


class _Command(NamedTuple):
    run: Callable[[], None]
    refuse: Callable[[], None]  # in place of `run`, once the loop has stopped


def _nothing() -> None:
    return


class StepLoop:
    """`turn()` does one step and returns True if there is more to do at once; `clock()` gives milliseconds."""

    def __init__(self, name: str, turn: Callable[[], bool], clock: Callable[[], int], idle_ms: int = IDLE_MS) -> None:
        self._turn = turn
        self._clock = clock
        self._idle_ms = idle_ms
        self._commands: queue.Queue[_Command] = queue.Queue()
        self._posting = threading.Lock()  # nothing is queued after the stop
        self._stopping = threading.Event()
        self._gate = threading.Event()
        self._gate.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.surprises = 0
        self.last_turn_ms = clock()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_ms: int) -> bool:
        """Ends the thread after its present turn; commands that still wait are refused. True if it ended in time."""
        with self._posting:
            self._stopping.set()
        self._gate.set()
        if self._thread.is_alive():
            self._thread.join(timeout_ms / 1000)
        if self._thread.is_alive():
            return False
        self._refuse_rest()
        return True

    def post(self, command: Callable[[], None]) -> None:
        """Queues a command. Raises Unavailable when stopped, NoCapacity when MAX_COMMANDS wait already."""
        self._put(_Command(command, _nothing))

    def post_quietly(self, command: Callable[[], None]) -> None:
        """Like `post`, for the end of something that was begun: it passes a full queue (each call ends once, so this
        stays bounded), and on a loop that has stopped there is nothing left to tell."""
        with contextlib.suppress(Unavailable):
            self._put(_Command(command, _nothing), limited=False)

    async def call(self, work: Callable[[], R], undo: Callable[[R], None] | None = None) -> R:
        """Runs `work` on the step thread; returns what it returns or raises what it raises.

        `undo` takes back, on the step thread, the result of a work whose caller was cancelled meanwhile: a queued
        command still runs, and without it nobody would know of what it made.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        made: list[R] = []

        def settle(action: Callable[[], None]) -> None:
            def unless_done() -> None:
                if not future.done():
                    action()

            with contextlib.suppress(RuntimeError):  # a closed loop has nobody left who waits
                loop.call_soon_threadsafe(unless_done)

        def command() -> None:
            try:
                result = work()
            except Exception as error:
                caught = error
                settle(lambda: future.set_exception(caught))
            else:
                made.append(result)
                settle(lambda: future.set_result(result))

        def refuse() -> None:
            settle(lambda: future.set_exception(_stopped()))

        self._put(_Command(command, refuse))
        try:
            return await future
        except asyncio.CancelledError:
            if undo is not None:
                self.post_quietly(lambda: _each(undo, made))
            raise

    def freeze(self, frozen: bool) -> None:
        """Fault injection: stops turning (and running commands) until thawed."""
        if frozen:
            self._gate.clear()
        else:
            self._gate.set()

    def _put(self, command: _Command, *, limited: bool = True) -> None:
        with self._posting:
            if self._stopping.is_set():
                raise _stopped()
            if limited and self._commands.qsize() >= MAX_COMMANDS:
                raise NoCapacity("command_queue_full", "this worker has too many commands waiting")
            self._commands.put_nowait(command)

    def _run(self) -> None:
        busy = False
        while not self._stopping.is_set():
            self._gate.wait()
            self._run_commands(0 if busy else self._idle_ms)
            self.last_turn_ms = self._clock()
            try:
                busy = self._turn()
            except Exception as error:
                self._survive("turn", error)
                busy = False
        self._refuse_rest()

    def _run_commands(self, wait_ms: int) -> None:
        for _ in range(MAX_COMMANDS_A_TURN):
            try:
                command = self._commands.get(timeout=wait_ms / 1000) if wait_ms else self._commands.get_nowait()
            except queue.Empty:
                return
            wait_ms = 0
            try:
                command.run()
            except Exception as error:
                self._survive("command", error)

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait().refuse()

    def _survive(self, where: str, error: Exception) -> None:
        self.surprises += 1
        surprise(error, f"a {where} of the step loop")


def _each(act: Callable[[R], None], made: list[R]) -> None:
    for result in made:
        act(result)


def _stopped() -> Unavailable:
    return Unavailable("worker_stopped", "this worker has stopped")
