"""Which faults both systems get, the prompts that hide a marker each, and how an answer is judged. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

ANSWER_TOKENS = 24
FILLER = "The weather was mild and the market was busy that day. "
FILLERS = 27
_ONSETS = ("Bran", "Kol", "Mer", "Tash", "Vor", "Zel", "Hux", "Pim", "Quor", "Dra")
_ENDINGS = ("dale", "mouth", "grad", "vick", "stein", "lom", "wex", "thorpe", "fell", "nare")


@dataclass(frozen=True)
class Case:
    """One row of the comparison. `once`: a repetition costs a restart of a server, so there is one."""

    name: str
    title: str
    once: bool = False


CASES: tuple[Case, ...] = (
    Case("healthy", "healthy"),
    Case("unknown-id", "reference with an unknown request id"),
    Case("out-of-range", "block ids outside the pool"),
    Case("other-live", "another live request's blocks"),
    Case("half-list", "half of the block list", once=True),
    Case("consumed-recycled", "consumed reference again, blocks recycled"),
    Case("expired-recycled", "lease expired, blocks recycled"),
    Case("expired", "lease expired, blocks not recycled"),
    Case("restarted", "prefill restarted, blocks refilled by others", once=True),
    Case("killed", "prefill killed (SIGKILL)", once=True),
    Case("stopped", "prefill stopped (SIGSTOP)", once=True),
)


class Verdict(StrEnum):
    """What a client got."""

    RIGHT = "right"  # the tokens of the same system without a fault
    FOREIGN = "another prompt's secret"
    WRONG = "wrong text"
    REFUSED = "an error, no wrong token"
    NOTHING = "no answer in time"
    DEAD = "an error, and the engine died"


@dataclass(frozen=True)
class Outcome:
    """One trial. `told` is the status that the client saw; `others_served`: the next request, or a neighbour, was
    answered right on the same workers."""

    system: str
    case: str
    repeat: int
    told: str
    verdict: Verdict
    others_served: bool
    seconds: float
    answer: str = ""
    note: str = ""


@dataclass(frozen=True)
class Marked:
    """A prompt of about 370 tokens and the two words that nobody else's prompt has."""

    name: str
    city: str
    number: str

    @property
    def text(self) -> str:
        """With the chat markers of SmolLM2. The beginning of the answer is given, so that a small model tells."""
        return (
            f"<|im_start|>user\nThe city is {self.city} and its secret number is {self.number}. {FILLER * FILLERS}"
            f"What is the name of the city and its secret number?<|im_end|>\n<|im_start|>assistant\nThe city is"
        )

    def in_text(self, text: str) -> bool:
        return self.city in text or self.number in text


def marked(name: str) -> Marked:
    """The same marker for a name every time."""
    rng = random.Random(f"marker of {name}")
    return Marked(name, rng.choice(_ONSETS) + rng.choice(_ENDINGS), str(rng.randint(10_000, 99_999)))


def judge(text: str, right: str, others: Iterable[Marked]) -> Verdict:
    """Of an answer that the client took for a whole one."""
    if text == right:
        return Verdict.RIGHT
    return Verdict.FOREIGN if any(other.in_text(text) for other in others) else Verdict.WRONG


@dataclass(frozen=True)
class Summary:
    """All repetitions of one case on one system."""

    case: str
    title: str
    system: str
    told: str
    verdict: str
    others_served: bool


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """One line for each case and system, in the order of CASES."""
    systems = list(dict.fromkeys(o.system for o in outcomes))
    lines = []
    for case in CASES:
        for system in systems:
            same = [o for o in outcomes if (o.case, o.system) == (case.name, system)]
            if not same:
                continue
            told = ", ".join(dict.fromkeys(o.told for o in same))
            served = all(o.others_served for o in same)
            lines.append(Summary(case.name, case.title, system, told, _verdicts(same), served))
    return lines


def _verdicts(same: Sequence[Outcome]) -> str:
    kinds = list(dict.fromkeys(o.verdict for o in same))
    if len(kinds) == 1:
        return f"{kinds[0].value}, {len(same)} of {len(same)}" if len(same) > 1 else kinds[0].value
    return "; ".join(f"{kind.value}, {sum(o.verdict is kind for o in same)} of {len(same)}" for kind in kinds)
