"""gRPC for asyncio hands over what has completed on a thread of its own, which wakes the event loop's.

Where the two share a core, every single hand-over interrupts the loop in the middle of its work: two switches of
threads for each token that is written. Scheduled as a batch thread it waits, on that core, until the loop waits, and
then hands over all that has gathered. Where another core is idle it runs there at once, as before. What it may cost:
on a host whose cores are all busy with others' work, a hand-over waits for the scheduler's next turn, a few
milliseconds.
"""

from __future__ import annotations

import os
import threading

# As grpcio names the method that the thread runs; of another version it may not be found, and all is as before.
POLLER = "_poll_wrapper"


def hand_over_in_batches() -> int:
    """For the threads that are there now: call it once something of `grpc.aio` has been made. Returns how many."""
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    pollers = [thread.native_id for thread in threading.enumerate() if POLLER in thread.name]
    found = 0
    for native_id in pollers:
        try:
            if native_id is not None and os.sched_getscheduler(native_id) == os.SCHED_OTHER:
                os.sched_setscheduler(native_id, os.SCHED_BATCH, os.sched_param(0))
                found += 1
        except OSError:
            continue  # it has ended, or a sandbox forbids it
    return found
