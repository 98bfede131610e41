"""Faults of a transfer: one frozen record, decided per transfer by a plan.

A plan is a function of what is known when a transfer starts; `SeededPlan` derives every decision from a seed, the
reader's name and the transfer's number, so a run repeats exactly. The record only describes; the `memory` engine
and `FaultyEngine` (faulty.py) carry it out, both through `steps_of` and `damage`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidInput
from kvstore.transfer.base import PagePair, PoolExport

U8 = npt.NDArray[np.uint8]


class Ending(StrEnum):
    """How a transfer ends."""

    HONEST = "honest"  # DONE once every byte has landed
    DROP = "drop"  # never completes and nothing lands; only a teardown proves quiescence
    EARLY_NOTICE = "early_notice"  # DONE at once; the bytes land later
    LATE = "late"  # TIMED_OUT at once; the bytes land later
    ERROR_REST_LANDS = "error_rest_lands"  # FAILED after `landed_pages`; the rest lands later
    PEER_LOSS = "peer_loss"  # FAILED after `landed_pages`; the connection is lost, nothing lands any more


LANDS_LATER = frozenset({Ending.EARLY_NOTICE, Ending.LATE, Ending.ERROR_REST_LANDS})


class BitFlip(NamedTuple):
    """Bit `bit` (0..7) of byte `byte_offset` in the `page`-th page of the batch is inverted after it landed."""

    page: int
    byte_offset: int
    bit: int


@dataclass(frozen=True)
class TransferFaults:
    """What goes wrong with one transfer. Page numbers are places in the batch (0-based); the default is no fault.

    Places are taken modulo the batch's length, so that a plan need not know it.
    """

    ending: Ending = Ending.HONEST
    delay_ms: int = 0  # how long after the start the bytes land
    landed_pages: int = 0  # pages that land before ERROR_REST_LANDS or PEER_LOSS is told
    short_tail_bytes: int = 0  # so many bytes at the end of a page arrive as zeros
    short_page: int | None = None  # the short page; None: every page
    torn_page: int | None = None  # the hook `between_halves` runs in the middle of this page
    reverse_order: bool = False  # pages land last first
    duplicate: tuple[int, int] | None = None  # (page, victim): the victim's slot receives `page` instead
    swap: tuple[int, int] | None = None  # the two slots receive each other's page
    bit_flips: tuple[BitFlip, ...] = ()
    wrap_out_of_range: bool = False  # no bounds check of remote ids: a read beyond the pool wraps around
    follow_restart: bool = False  # reads whatever pool now lives at the peer's address, as a NIC would

    @property
    def alters_bytes(self) -> bool:
        """Whether landed bytes can differ from what the source page of the pair held at one moment."""
        return bool(self.short_tail_bytes or self.torn_page is not None or self.bit_flips)

    @property
    def honest(self) -> bool:
        return self == NO_FAULTS


NO_FAULTS = TransferFaults()


@dataclass(frozen=True)
class TransferInfo:
    """What a plan may decide on. `sequence` counts the transfers that the plan's owner has started, from 0."""

    sequence: int
    reader: str
    source: PoolExport
    pages: int


class FaultPlan(Protocol):
    def __call__(self, info: TransferInfo) -> TransferFaults: ...


def no_faults(info: TransferInfo) -> TransferFaults:
    """The plan in which nothing goes wrong."""
    return NO_FAULTS


@dataclass(frozen=True)
class FaultHooks:
    """Calls that a test places inside a transfer. Hooks run on the thread that copies."""

    before_copy: Callable[[Sequence[PagePair]], None] | None = None
    between_halves: Callable[[PagePair], None] | None = None


@dataclass(frozen=True)
class Step:
    """Copy one page. `place` is the page's place in the batch."""

    place: int
    remote_page_id: int
    local_page_id: int


def steps_of(faults: TransferFaults, remote_ids: Sequence[int], local_ids: Sequence[int]) -> list[Step]:
    """The copies that a batch really makes, in their order: duplicate, swap and order applied."""
    count = len(remote_ids)
    sources = list(remote_ids)
    if faults.duplicate is not None:
        page, victim = faults.duplicate
        sources[victim % count] = sources[page % count]
    if faults.swap is not None:
        one, other = faults.swap[0] % count, faults.swap[1] % count
        sources[one], sources[other] = sources[other], sources[one]
    steps = [Step(place, sources[place], local_ids[place]) for place in range(count)]
    return steps[::-1] if faults.reverse_order else steps


def is_torn(faults: TransferFaults, place: int, count: int) -> bool:
    """Whether the page at `place` of a batch of `count` is copied in two halves."""
    return faults.torn_page is not None and faults.torn_page % count == place


def damage(faults: TransferFaults, place: int, count: int, page_U8: U8) -> None:
    """Applies short and bit_flips to a page that has just landed."""
    if faults.short_tail_bytes and (faults.short_page is None or faults.short_page % count == place):
        page_U8[max(0, page_U8.size - faults.short_tail_bytes) :] = 0
    for flip in faults.bit_flips:
        if flip.page % count == place:
            page_U8[flip.byte_offset % page_U8.size] ^= np.uint8(1 << flip.bit % 8)


@dataclass(frozen=True)
class FaultRates:
    """Chance of each kind, 0..1; at most one kind strikes a transfer (their sum is at most 1). Delays are apart."""

    drop: float = 0.0
    early_notice: float = 0.0
    late: float = 0.0
    error_rest_lands: float = 0.0
    peer_loss: float = 0.0
    short: float = 0.0
    torn: float = 0.0
    reorder: float = 0.0
    duplicate: float = 0.0
    swap: float = 0.0
    bit_flip: float = 0.0
    delay: float = field(default=0.0, kw_only=True)
    max_delay_ms: int = field(default=50, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*KINDS, "delay"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidInput("bad_rate", f"{name} must be in 0..1", field=f"faults.{name}")
        if sum(getattr(self, name) for name in KINDS) > 1.0 + 1e-9:
            raise InvalidInput("bad_rate", "the rates of all kinds add up to more than 1", field="faults")
        if self.max_delay_ms < 1:
            raise InvalidInput("bad_rate", "max_delay_ms must be at least 1", field="faults.max_delay_ms")


KINDS = (
    "drop",
    "early_notice",
    "late",
    "error_rest_lands",
    "peer_loss",
    "short",
    "torn",
    "reorder",
    "duplicate",
    "swap",
    "bit_flip",
)


def draw_faults(rng: random.Random, rates: FaultRates, pages: int, slot_bytes: int) -> TransferFaults:
    """Draws one transfer's faults. Deterministic in the state of `rng`."""
    point, kind = rng.random(), ""
    for name in KINDS:
        point -= getattr(rates, name)
        if point < 0:
            kind = name
            break
    delayed = rng.random() < rates.delay
    delay_ms = rng.randint(1, rates.max_delay_ms)
    one, other = rng.randrange(max(1, pages)), rng.randrange(max(1, pages))
    offset, bit = rng.randrange(slot_bytes), rng.randrange(8)
    made = {
        "short": TransferFaults(short_tail_bytes=slot_bytes - offset, short_page=one),
        "torn": TransferFaults(torn_page=one),
        "reorder": TransferFaults(reverse_order=True),
        "duplicate": TransferFaults(duplicate=(one, other)),
        "swap": TransferFaults(swap=(one, other)),
        "bit_flip": TransferFaults(bit_flips=(BitFlip(one, offset, bit),)),
    }.get(kind)
    if made is None:
        made = TransferFaults(ending=Ending(kind), landed_pages=one) if kind else NO_FAULTS
    return replace(made, delay_ms=delay_ms if delayed or made.ending in LANDS_LATER else 0)


@dataclass(frozen=True)
class SeededPlan:
    """Every decision from `seed`, the reader's name and the transfer's number."""

    seed: int
    rates: FaultRates

    def __call__(self, info: TransferInfo) -> TransferFaults:
        rng = random.Random(f"{self.seed}/{info.reader}/{info.sequence}")
        return draw_faults(rng, self.rates, info.pages, info.source.slot_bytes)
