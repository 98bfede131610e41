"""What a fuzzed layer is: cases by number, each of which ends well or with a typed error, and a baseline at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvstore.errors import GenlockError, InvalidInput

SURPRISES = ("internal", "step_failed", "peer_internal")


class Finding(AssertionError):
    """A promise that a hostile input broke."""


class Case(Protocol):
    """One layer that is being fuzzed."""

    def case(self, number: int) -> str:
        """Runs a case; what became of it. Raises Finding, or whatever should not have been raised."""

    def close(self) -> None:
        """Raises Finding unless everything is at its baseline."""


@dataclass(frozen=True)
class Layer:
    """`share`: how many of a hundred thousand cases."""

    name: str
    share: int
    make: Callable[[int], Case]


@dataclass
class Report:
    """What a layer's cases came to. `findings` hold the case's number, which reproduces it."""

    layer: str
    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def typed(work: Callable[[], object]) -> str:
    """'ok' or the reason of the typed error that `work` raised. Anything else that it raises is a finding."""
    try:
        work()
    except GenlockError as error:
        return reason_of(error)
    except Exception as error:  # what a fuzzer is for
        raise Finding(f"{type(error).__name__}: {str(error)[:200]}") from error
    return "ok"


def reason_of(error: GenlockError) -> str:
    """A typed error's reason. Raises Finding for surprises and for refused input that names no field."""
    if error.reason in SURPRISES:
        raise Finding(f"a surprise: {error.reason}: {error.message[:200]}")
    if isinstance(error, InvalidInput) and not error.field:
        raise Finding(f"InvalidInput without a field: {error.reason}: {error.message[:200]}")
    return error.reason
