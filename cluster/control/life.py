"""What the controller's shell keeps of one life of a worker, beside the core's row."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from genlock.v1 import worker_pb2


@dataclass
class Life:
    """Times on the controller's clocks."""

    status: worker_pb2.WorkerStatus | None = None
    # When that status was asked for.
    asked_ms: float = 0.0
    asking: asyncio.Task[None] | None = None
    checking: bool = False
    starting: asyncio.Task[None] | None = None
    started_unix_ms: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
