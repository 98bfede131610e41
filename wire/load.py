"""What a worker has been asked and has done, as sums that only grow: two readings give a rate. Counted on the step
thread, read from any."""

from __future__ import annotations

from genlock.v1 import worker_pb2


class LoadTally:
    """Plain integers; times in milliseconds."""

    __slots__ = (
        "arrived_requests", "arrived_tokens", "busy_ms", "computed_tokens", "first_token_ms", "first_tokens",
        "queue_ms", "queued", "token_count", "token_ms",
    )  # fmt: skip

    def __init__(self) -> None:
        self.arrived_requests = 0
        self.arrived_tokens = 0
        self.busy_ms = 0
        self.computed_tokens = 0
        self.queue_ms = 0
        self.queued = 0
        self.first_token_ms = 0
        self.first_tokens = 0
        self.token_ms = 0
        self.token_count = 0

    def arrived(self, tokens: int) -> None:
        """A request of so many prompt tokens was taken."""
        self.arrived_requests += 1
        self.arrived_tokens += tokens

    def step(self, rows: int, tokens: int, took_ms: int) -> None:
        """One step of the loop; each row waited for the whole of it."""
        self.busy_ms += took_ms
        self.computed_tokens += tokens
        self.token_ms += took_ms * rows
        self.token_count += rows

    def waited(self, queue_ms: float) -> None:
        """A request's compute began after so long."""
        self.queue_ms += int(queue_ms)
        self.queued += 1

    def first_token(self, after_ms: float) -> None:
        self.first_token_ms += int(after_ms)
        self.first_tokens += 1

    def read(self, *, backlog_tokens: int, slots: int) -> worker_pb2.LoadCounters:
        """`backlog_tokens`: prompt tokens not computed yet; `slots`: most requests in one step."""
        return worker_pb2.LoadCounters(
            backlog_tokens=backlog_tokens,
            slots=slots,
            arrived_requests=self.arrived_requests,
            arrived_tokens=self.arrived_tokens,
            busy_ms=self.busy_ms,
            computed_tokens=self.computed_tokens,
            queue_ms=self.queue_ms,
            queued=self.queued,
            first_token_ms=self.first_token_ms,
            first_tokens=self.first_tokens,
            token_ms=self.token_ms,
            token_count=self.token_count,
        )
