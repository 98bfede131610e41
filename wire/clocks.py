"""The clocks of what runs live. Whatever decides takes its clock as an argument; the shells hand it these."""

from __future__ import annotations

import time


def now_ms() -> float:
    """Milliseconds that never go back. They count from an unknown moment and mean nothing on another host."""
    return time.monotonic() * 1000


def unix_ms() -> int:
    """Milliseconds since 1970: what people read, and hosts tell each other. May jump."""
    return int(time.time() * 1000)
