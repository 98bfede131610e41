"""An object of a library that several threads use and one takes down: lent to calls, and gone when none has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")


class Lent:
    """`made` is the object, and nobody else may keep it: its destructor is the proof that nothing lands any more."""

    def __init__(self, made: Any) -> None:
        self._object: Any = made
        self._calls = 0
        self._idle = threading.Condition()

    @property
    def gone(self) -> bool:
        """True once the destructor has run."""
        with self._idle:
            return self._object is None and not self._calls

    def call(self, use: Callable[[Any], R]) -> R | None:
        """Runs `use` on the object, which lives until it returns. `use` must not keep it. None after `take_down`."""
        with self._idle:
            lent = self._object
            if lent is None:
                return None
            self._calls += 1
        try:
            return use(lent)
        finally:
            del lent
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def take_down(self, timeout_ms: int, last: Callable[[Any], None]) -> bool:
        """From here on no call gets the object. Runs `last` on it when all calls have returned, then its destructor.

        False if one has not returned within `timeout_ms`: then `last` does not run, and the object lives until that
        call returns. The second time there is nothing to do.
        """
        with self._idle:
            held, self._object = self._object, None
            if held is None:
                return True
            quiet = self._idle.wait_for(lambda: not self._calls, timeout_ms / 1000)
            self._calls += 1  # `gone` stays False until the destructor has run
        if quiet:
            last(held)
        del held  # runs the destructor, unless a call that hangs still has the object
        with self._idle:
            self._calls -= 1
        return quiet
