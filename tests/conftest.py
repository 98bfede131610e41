"""What the whole suite shares."""

from __future__ import annotations

import gc
import logging


def pytest_collection_finish() -> None:
    """Modules stay until the end: the collector need not walk over them again and again. And pytest hangs its handlers
    on each logger that does not propagate, six times a test: torch has dozens of those, and no test reads them."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.collect()
    gc.freeze()
