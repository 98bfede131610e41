"""gRPC's thread of completions does not interrupt the loop that it wakes."""

from __future__ import annotations

import os
import threading

import grpc.aio

from wire.completions import POLLER, hand_over_in_batches


def _policies(*, of_pollers: bool) -> list[int]:
    threads = [thread for thread in threading.enumerate() if (POLLER in thread.name) is of_pollers]
    return [os.sched_getscheduler(thread.native_id or 0) for thread in threads]


async def test_the_thread_is_found_and_no_other_is_touched() -> None:
    server = grpc.aio.server()
    others = _policies(of_pollers=False)
    hand_over_in_batches()
    pollers = _policies(of_pollers=True)
    assert pollers, "grpcio names its thread otherwise now: see wire/completions.py"
    assert set(pollers) == {os.SCHED_BATCH}
    assert _policies(of_pollers=False) == others
    assert hand_over_in_batches() == 0, "once is enough"
    await server.stop(0)
