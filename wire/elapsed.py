"""Durations that are told to others. Pure."""

from __future__ import annotations


def elapsed_ms(since_ms: int, now_ms: int) -> int:
    """At least 0: a worker's clock may jump back, and a negative duration would be refused by whoever hears of it, with
    the answer that it belongs to."""
    return max(0, now_ms - since_ms)
