"""What the whole suite shares."""

from __future__ import annotations

import gc
import logging

from hypothesis import HealthCheck, settings

# How long a case takes is the host's affair: speed is measured in bench/, and a busy host makes nothing red.
settings.register_profile("any host", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any host")


def pytest_collection_finish() -> None:
    """Modules stay until the end: the collector need not walk over them again and again. And pytest hangs its handlers
    on each logger that does not propagate, six times a test: torch has dozens of those, and no test reads them."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.collect()
    gc.freeze()


# So many new objects since the last collection, and the time between two tests is used for one.
COLLECT_AFTER = 200_000


def pytest_runtest_setup() -> None:
    """The collector runs between tests alone. With native libraries of many kinds in one process (gRPC's loop for each
    test, NIXL, Mooncake, Triton's and numba's compilers) a collection on whatever thread is just allocating was seen to
    meet an object that was none, and the process was gone with all results. No program of ours has all of them."""
    gc.disable()


def pytest_runtest_logfinish() -> None:
    if gc.get_count()[0] > COLLECT_AFTER:
        gc.collect()
