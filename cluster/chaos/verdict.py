"""The judge: what each stream was, against the oracle, and the totals of a run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.errors import GenlockError

# A surprise inside the product, or a status that is not the product's own: no typed error.
UNTYPED = frozenset({"internal", "peer_internal"})


class End(StrEnum):
    OK = "ok"  # a whole answer, and the oracle's
    ERROR = "error"  # a typed error; every token before it is the oracle's
    CANCELLED = "cancelled"  # we left
    WRONG = "wrong"  # it ended as if it were well, with other tokens or with too few
    HUNG = "hung"  # no end within the deadline and a second


@dataclass(frozen=True)
class Seen:
    """What the client saw of one stream. `finished`: it ended properly. `left`: the client cancelled or aborted it."""

    tokens: tuple[int, ...] = ()
    finished: bool = False
    error: GenlockError | None = None
    left: bool = False
    hung: bool = False


@dataclass(frozen=True)
class Verdict:
    end: End
    cause: str = ""
    foreign_tokens: int = 0


def judge(wanted: Sequence[int], seen: Seen) -> Verdict:
    """`wanted`: the oracle's whole answer. A token that is not the oracle's at its place is foreign, whatever the
    stream's end was; so is one beyond the answer's length."""
    foreign = sum(1 for at, token in enumerate(seen.tokens) if at >= len(wanted) or token != wanted[at])
    if seen.hung:
        return Verdict(End.HUNG, "hung", foreign)
    if seen.finished:
        whole = seen.tokens == tuple(wanted)
        return Verdict(End.OK if whole else End.WRONG, "" if whole else "wrong_answer", foreign)
    if seen.left:
        return Verdict(End.CANCELLED, "cancelled_by_caller", foreign)
    if seen.error is None:
        return Verdict(End.WRONG, "ended_without_a_word", foreign)
    return Verdict(End.ERROR, seen.error.reason, foreign)


@dataclass
class Totals:
    """Adds up as it goes; `add_up` tells whether every request that was sent is counted once: as `ok`, as `hung`, or
    under the cause for which it was neither. What is `cancels` and `wrong` has its cause there, too."""

    sent: int = 0
    ok: int = 0
    cancels: int = 0
    hung: int = 0
    wrong: int = 0
    foreign_tokens: int = 0
    tokens: int = 0
    errors_by_cause: Counter[str] = field(default_factory=Counter)

    def count(self, seen: Seen, verdict: Verdict) -> None:
        self.tokens += len(seen.tokens)
        self.foreign_tokens += verdict.foreign_tokens
        self.ok += verdict.end is End.OK
        self.cancels += verdict.end is End.CANCELLED
        self.hung += verdict.end is End.HUNG
        self.wrong += verdict.end is End.WRONG
        if verdict.end in (End.ERROR, End.CANCELLED, End.WRONG):
            self.errors_by_cause[verdict.cause] += 1

    @property
    def untyped(self) -> int:
        return sum(count for cause, count in self.errors_by_cause.items() if cause in UNTYPED)

    @property
    def add_up(self) -> bool:
        return self.ok + self.hung + sum(self.errors_by_cause.values()) == self.sent


@dataclass(frozen=True)
class Report:
    """A run as it is printed. Times are milliseconds."""

    seed: int
    minutes: float  # asked for
    seconds: float  # taken
    engine: str
    model: str
    rounds: int
    sent: int
    ok: int
    cancels: int
    errors_by_cause: dict[str, int]  # of all that is neither `ok` nor `hung`
    hung: int
    wrong: int
    foreign_tokens: int
    untyped: int
    tokens: int
    kills: int
    faults: dict[str, int]  # by kind, carried out
    skipped: dict[str, str]  # kinds that could not be, and why
    deaths: tuple[str, ...]  # workers that nobody killed
    excused_deaths: int  # of these, by a known limit of the engine's library; not in `deaths`
    fault_errors: tuple[str, ...]  # faults that could not be carried out or healed
    pages_back: bool
    pages_back_ms: dict[str, float]  # p50 and max over the rounds, from the last stream's end
    not_back: tuple[str, ...]  # what was not back, by round
    refused_log_lines: int
    foreign_pages: int  # that were injected
    link_packets: int  # that met a fault of the link
    balloon_mib: int  # most memory that a balloon held
    loop_lag_ms: float  # longest: how late this process itself was
    adds_up: bool

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the run failed, in words; empty when it passed."""
        checks = (
            (self.foreign_tokens == 0, f"{self.foreign_tokens} tokens are not the oracle's"),
            (self.hung == 0, f"{self.hung} streams had no end a second after their deadline"),
            (self.wrong == 0, f"{self.wrong} answers ended as if they were well and were not whole"),
            (self.untyped == 0, f"{self.untyped} errors were not typed"),
            (self.adds_up, "the totals do not add up to the requests sent"),
            (self.pages_back, "pages did not come back: " + "; ".join(self.not_back)),
            (not self.deaths, "workers died by themselves: " + "; ".join(self.deaths)),
            (not self.fault_errors, "faults went wrong: " + "; ".join(self.fault_errors)),
            (self.ok > 0, "no request was answered"),
        )
        return tuple(text for good, text in checks if not good)
