"""What gRPC logs of a server that is being freed names no object afterwards."""

from __future__ import annotations

import logging
import subprocess
import sys

from tests.support.records import GRPC_LOGGER, text_alone

# Whether the kept records of two servers hold objects: without and with the filter. No collector and no orderly end:
# either would look at what the first record holds.
PROGRAM = """
import asyncio, gc, logging, os
import grpc.aio
from tests.support.records import GRPC_LOGGER, text_alone

gc.disable()
kept = []
logger = logging.getLogger(GRPC_LOGGER)
logger.setLevel(logging.DEBUG)
handler = logging.Handler()
handler.emit = kept.append
logger.addHandler(handler)

async def main():
    grpc.aio.server()
    logger.addFilter(text_alone)
    grpc.aio.server()

asyncio.run(main())
print([bool(record.args) for record in kept if "called on running server" in record.msg], flush=True)
os._exit(0)
"""


def test_the_record_of_a_server_that_is_freed_holds_text_alone():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=60, capture_output=True, text=True)
    # Where the first is False, gRPC logs no dying object any more, and the filter can go.
    assert (ended.returncode, ended.stdout.strip()) == (0, "[True, False]"), ended.stderr


def test_the_filter_is_on_in_this_process():
    assert text_alone in logging.getLogger(GRPC_LOGGER).filters
