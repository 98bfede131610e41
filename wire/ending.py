"""Ends tasks, also those in which a library swallowed the cancellation: a loop that calls a Redis server was seen to go
on after it had been cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)

TRIES = 5
RETRY_S = 0.5


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancels until they have ended, for at most TRIES x RETRY_S. What they raised is dropped."""
    every = list(tasks)
    pending = {task for task in every if not task.done()}
    for _try in range(TRIES):
        if not pending:
            break
        for task in pending:
            task.cancel()
        _done, pending = await asyncio.wait(pending, timeout=RETRY_S)
    for task in pending:
        log.error("%s does not end", task.get_name())
    await asyncio.gather(*(task for task in every if task.done()), return_exceptions=True)
