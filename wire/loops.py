"""Loops that run as long as their process: nothing that one turn raises ends them.

A task that ends by an exception is silent: nobody waits for it, and what it did (asking workers, reading keys) is done
no more while the process goes on. So every such loop is `keep_going`; tests/unit/test_loops.py lists the tasks that are
none, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import NoReturn

from kvstore.errors import GenlockError
from wire.errors import surprise

log = logging.getLogger("genlock.loops")

RETRY_S = 1.0


async def keep_going(
    turn: Callable[[], Awaitable[None]],
    where: str,
    on_surprise: Callable[[], None],
    *,
    retry_s: float = RETRY_S,
) -> NoReturn:
    """Calls `turn` again and again until it is cancelled; waiting for its time is the turn's own. What a turn raises
    costs that turn: `on_surprise` counts it, it is logged where it is another than the last one, and `retry_s` later
    the next turn comes."""
    last = ""
    while True:
        try:
            await turn()
        except Exception as unexpected:
            on_surprise()
            kind = _kind(unexpected)
            if kind != last:
                _tell(unexpected, where)
            last = kind
            await asyncio.sleep(retry_s)
        else:
            if last:
                log.info("%s: well again", where)
            last = ""
            await asyncio.sleep(0)  # a turn that waits for nothing leaves time to others all the same


def _kind(error: Exception) -> str:
    """Class and place: the same surprise at every turn is told once."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} {getattr(error, 'reason', '')} {place}"


def _tell(error: Exception, where: str) -> None:
    if isinstance(error, GenlockError):
        log.error("%s: a turn failed: %s; it goes on", where, error.reason)
    else:
        surprise(error, where)
