"""What a chaos run does and when. Pure: the same seed and shape give the same plan of faults and the same load.

A run is round after round. In a round requests arrive by a Poisson process while faults happen; then every stream
ends, every fault is healed, and the pages must be back before the next round begins.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvstore.errors import InvalidInput

MAX_MINUTES = 24 * 60.0
MAX_RATE_PER_S = 200.0
MAX_PROMPTS = 4096


class Fault(StrEnum):
    KILL = "kill"  # SIGKILL of a worker; it is started again under the same name
    STOP = "stop"  # SIGSTOP, and SIGCONT later
    CANCEL_STORM = "cancel_storm"  # many requests whose callers leave, half of them by Abort
    SLOW_READERS = "slow_readers"
    SAME_IDS = "same_ids"  # many requests with one label at once
    SMALL_POOL = "small_pool"  # SIGKILL, and the next life has a pool of few pages
    DISK_FULL = "disk_full"  # every log line of the worker fails with ENOSPC
    CLOCK_JUMP = "clock_jump"  # the worker's clock runs ahead and later jumps back
    FOREIGN_PAGE = "foreign_page"  # pages that arrive at a decode worker are another prompt's
    GATEWAY_RESTART = "gateway_restart"
    REGISTRY_KILL = "registry_kill"  # SIGKILL of the registry's server; an empty one comes up later
    REGISTRY_FLUSH = "registry_flush"
    LINK_CUT = "link_cut"  # between one decode worker and one prefill worker, and nobody else
    LINK_SLOW = "link_slow"
    MEMORY_PRESSURE = "memory_pressure"  # another process takes the host's memory for a few seconds


LINK_FAULTS = frozenset({Fault.LINK_CUT, Fault.LINK_SLOW})
REGISTRY_FAULTS = frozenset({Fault.REGISTRY_KILL, Fault.REGISTRY_FLUSH})
# These hold one worker down, or keep it busy; a worker has one of them in a round.
OF_WORKERS = frozenset({Fault.KILL, Fault.STOP, Fault.SMALL_POOL, Fault.DISK_FULL, Fault.CLOCK_JUMP})


class Behaviour(StrEnum):
    """What a client does with its stream."""

    READS = "reads"
    SLOW = "slow"  # pauses between messages
    LEAVES = "leaves"  # cancels the call after a while
    ABORTS = "aborts"  # calls Abort after a while
    IMPATIENT = "impatient"  # its own deadline is short


@dataclass(frozen=True)
class Shape:
    """What a plan is drawn from."""

    seed: int
    minutes: float = 1.0
    workers: tuple[str, ...] = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    kinds: tuple[Fault, ...] = tuple(Fault)
    links: tuple[tuple[str, str], ...] = (("decode-0", "prefill-0"),)  # pairs that faults of the link are between
    round_ms: int = 12_000
    faults_per_round: int = 4
    rate_per_s: float = 5.0
    prompts: int = 48
    answer_tokens: tuple[int, int] = (8, 48)

    def __post_init__(self) -> None:
        low, high = self.answer_tokens
        for field, ok, must in (
            ("minutes", 0 < self.minutes <= MAX_MINUTES, f"must be above 0, at most {MAX_MINUTES:g}"),
            ("rate", 0 < self.rate_per_s <= MAX_RATE_PER_S, f"must be above 0, at most {MAX_RATE_PER_S:g}"),
            ("prompts", 2 <= self.prompts <= MAX_PROMPTS, f"must be 2 to {MAX_PROMPTS}"),
            ("round_ms", self.round_ms >= 1000, "must be at least 1000"),
            ("faults_per_round", self.faults_per_round >= 0, "must not be negative"),
            ("answer_tokens", 1 <= low <= high, "must be LOW and HIGH, at least 1"),
            ("kinds", len(set(self.kinds)) == len(self.kinds), "must name each kind once"),
            ("workers", bool(self.workers), "must name a worker"),
        ):
            if not ok:
                raise InvalidInput("bad_chaos", f"{field} {must}", field=field)

    @property
    def rounds(self) -> int:
        """As many as could begin within the time."""
        return max(1, round(self.minutes * 60_000 / self.round_ms))


@dataclass(frozen=True)
class PlannedFault:
    """`at_ms` after the round's start; healed `for_ms` later. `target` is a worker's name, or empty; `peer` the other
    one's whose link to the target is meant. `amount`: requests of a storm, pages of a small pool, milliseconds of a
    clock's jump, kbit/s of a slow link, percent of the memory that is available."""

    at_ms: int
    kind: Fault
    target: str
    for_ms: int
    amount: int = 0
    peer: str = ""


@dataclass(frozen=True)
class Ask:
    """One request. `act_ms`: pause between messages, time until the client leaves, or its own deadline."""

    number: int
    at_ms: int
    prompt_no: int
    answer_tokens: int
    behaviour: Behaviour = Behaviour.READS
    act_ms: int = 0
    label: str = ""


@dataclass(frozen=True)
class Round:
    faults: tuple[PlannedFault, ...]
    asks: tuple[Ask, ...]


def make_plan(shape: Shape) -> tuple[Round, ...]:
    """All rounds of a run. Kinds are dealt from a shuffled deck, so that each one comes before any comes twice."""
    rng = random.Random(f"chaos {shape.seed}")
    deck: list[Fault] = []
    rounds: list[Round] = []
    number = 0
    for _ in range(shape.rounds):
        faults = _faults(shape, rng, deck)
        asks = _asks(shape, rng, faults, number)
        number += len(asks)
        rounds.append(Round(faults, asks))
    return tuple(rounds)


def _faults(shape: Shape, rng: random.Random, deck: list[Fault]) -> tuple[PlannedFault, ...]:
    taken: set[str] = set()
    faults: list[PlannedFault] = []
    for _ in range(min(shape.faults_per_round, len(shape.kinds))):
        if not deck:
            deck.extend(rng.sample(shape.kinds, len(shape.kinds)))
        kind = deck.pop()
        at_ms = rng.randrange(shape.round_ms // 10, shape.round_ms * 2 // 3)
        peer = ""
        if kind in LINK_FAULTS:
            target, peer = rng.choice(shape.links) if shape.links else (None, "")
        else:
            target = _target(shape.workers, kind, rng, taken)
        if target is not None:  # there is a link, and a worker without a fault in this round
            faults.append(replace(_drawn(kind, at_ms, target, rng), peer=peer))
    return tuple(sorted(faults, key=lambda f: f.at_ms))


def _target(workers: Sequence[str], kind: Fault, rng: random.Random, taken: set[str]) -> str | None:
    if kind is Fault.FOREIGN_PAGE:
        return rng.choice([w for w in workers if w.startswith("decode")])
    if kind not in OF_WORKERS:
        return ""
    free = [w for w in workers if w not in taken]
    if not free:
        return None
    taken.add(target := rng.choice(free))
    return target


def _drawn(kind: Fault, at_ms: int, target: str, rng: random.Random) -> PlannedFault:
    spans: dict[Fault, tuple[tuple[int, int], tuple[int, int]]] = {
        # how long, how much
        Fault.KILL: ((0, 1500), (0, 0)),
        Fault.STOP: ((300, 4000), (0, 0)),
        Fault.CANCEL_STORM: ((0, 0), (10, 24)),
        Fault.SLOW_READERS: ((0, 0), (3, 6)),
        Fault.SAME_IDS: ((0, 0), (4, 8)),
        Fault.SMALL_POOL: ((0, 500), (20, 32)),
        Fault.DISK_FULL: ((2000, 5000), (0, 0)),
        Fault.CLOCK_JUMP: ((500, 3000), (1000, 120_000)),
        Fault.FOREIGN_PAGE: ((1000, 3000), (0, 0)),
        Fault.GATEWAY_RESTART: ((0, 0), (0, 0)),
        Fault.REGISTRY_KILL: ((1000, 6000), (0, 0)),
        Fault.REGISTRY_FLUSH: ((0, 0), (0, 0)),
        Fault.LINK_CUT: ((500, 6000), (0, 0)),
        Fault.LINK_SLOW: ((2000, 6000), (256, 4096)),
        Fault.MEMORY_PRESSURE: ((3000, 8000), (40, 75)),
    }
    (low, high), (least, most) = spans[kind]
    return PlannedFault(at_ms, kind, target, rng.randint(low, high), rng.randint(least, most))


def _asks(shape: Shape, rng: random.Random, faults: Sequence[PlannedFault], first: int) -> tuple[Ask, ...]:
    drawn: list[tuple[int, Behaviour, int, str]] = []
    at_ms = 0.0
    while at_ms < shape.round_ms:
        drawn.append((int(at_ms), *_behaviour(rng), ""))
        at_ms += rng.expovariate(shape.rate_per_s) * 1000
    for fault in faults:
        drawn.extend(_storm(fault, rng))
    drawn.sort(key=lambda item: item[0])
    low, high = shape.answer_tokens
    return tuple(
        Ask(
            first + n, at, rng.randrange(shape.prompts), rng.randint(low, high), how, act, label or f"chaos-{first + n}"
        )
        for n, (at, how, act, label) in enumerate(drawn)
    )


def _behaviour(rng: random.Random) -> tuple[Behaviour, int]:
    draw = rng.random()
    if draw < 0.85:
        return Behaviour.READS, 0
    if draw < 0.90:
        return Behaviour.SLOW, rng.randint(20, 150)
    if draw < 0.95:
        return Behaviour.LEAVES, rng.randint(0, 800)
    return Behaviour.IMPATIENT, rng.randint(50, 600)


def _storm(fault: PlannedFault, rng: random.Random) -> list[tuple[int, Behaviour, int, str]]:
    """The extra requests of a fault that is made of requests."""
    count, at_ms = fault.amount, fault.at_ms
    if fault.kind is Fault.CANCEL_STORM:
        ways = (Behaviour.LEAVES, Behaviour.ABORTS)
        return [(at_ms, ways[n % 2], rng.randint(0, 500), "") for n in range(count)]
    if fault.kind is Fault.SLOW_READERS:
        return [(at_ms, Behaviour.SLOW, rng.randint(50, 300), "") for _ in range(count)]
    if fault.kind is Fault.SAME_IDS:
        return [(at_ms + n * 20, Behaviour.READS, 0, "the same label") for n in range(count)]
    return []
