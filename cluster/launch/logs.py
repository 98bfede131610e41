"""Sets up a process' logging from its settings."""

from __future__ import annotations

import logging

from cluster.settings import LogConfig
from wire.logs import configure

log = logging.getLogger("genlock.start")


def start_logging(settings: LogConfig, part: str) -> None:
    """Once, at the start of a process that serves; `part` is its name. Raises InvalidInput for a folder that cannot be
    written to."""
    configure(settings.level, settings.format, part, folder=settings.folder)
    if settings.prompts:
        log.warning("log.prompts is on: at level debug, what users write and read stands in this log")
