"""What is wanted, as the controller knows it and as the registry has it: which of the two counts. Pure."""

from __future__ import annotations

from dataclasses import replace

from cluster.registry.records import Desired


def lost(ours: Desired, stored: Desired) -> bool:
    """Whether the registry lacks something of `ours`, the newest that this controller has told an operator.

    It was flushed, or is as it once was; or it was written again by a refill that this controller knows nothing of:
    one that was long on its way, or of an earlier life. Such a refill has a revision of its own, which may be any, and
    holds what was wanted before."""
    unknown = stored.refills > ours.refills and stored.controller_starts <= ours.controller_starts
    return stored.revision < ours.revision or unknown


def refill(ours: Desired, stored: Desired, unix_ms: int) -> Desired:
    """What is written in place of `stored`. All of it is `ours`; only refills are counted on."""
    return replace(ours, refills=max(ours.refills, stored.refills) + 1, refilled_ms=unix_ms)
