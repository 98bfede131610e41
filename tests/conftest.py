"""What the whole suite shares."""

from __future__ import annotations

import gc
import logging

from hypothesis import HealthCheck, settings

from tests.support.records import GRPC_LOGGER, text_alone

# How long a case takes is the host's affair: speed is measured in bench/, and a busy host makes nothing red.
settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")

logging.getLogger(GRPC_LOGGER).addFilter(text_alone)


def pytest_collection_finish() -> None:
    """Modules stay until the end: the collector need not walk over them again and again. And pytest hangs its handlers
    on each logger that does not propagate, six times a test: torch has dozens of those, and no test reads them."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.collect()
    gc.freeze()
