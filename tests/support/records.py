"""Log records that are kept and do not keep what they tell of."""

from __future__ import annotations

import logging

GRPC_LOGGER = "grpc._cython.cygrpc"


def text_alone(record: logging.LogRecord) -> bool:
    """A filter: the record's text is made at once. A server that was never started logs itself while it is being freed
    (`AioServer.__dealloc__`, at DEBUG), and pytest keeps each test's records: they would name an object that is none,
    and the collector's next walk would end the process."""
    record.msg, record.args = record.getMessage(), None
    return True
