"""The life of a slot as a pure table: `(slot, event) -> slot`, or a typed error that changes nothing.

    FREE ─ALLOCATE→ OPEN ─SEAL→ SEALED ⇄ SHARE/UNSHARE, LEASE/RELEASE (counts)
      ↑               │RETIRE      │RETIRE (no pins)   │CONDEMN (pins stay)
      └──────────── no hold ───────┴── else QUARANTINED ──PROVE/UNSHARE/RELEASE, until none is left──→ FREE

The generation moves at ALLOCATE, RETIRE and CONDEMN, always before anybody else can write the slot. It is odd
while a slot is owned and even otherwise. A hold is an engine that may still touch the slot; only PROVE ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from kvstore.checks import ALL_CHECKS, Checks
from kvstore.errors import LifecycleError, PagePinned
from kvstore.ids import MAX_GENERATION

NOBODY = 0  # owner of a slot that has none
CACHE_OWNER = -1  # owner of sealed pages that the prefix index keeps


class SlotState(StrEnum):
    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"
    QUARANTINED = "quarantined"


class SlotEvent(StrEnum):
    ALLOCATE = "allocate"
    SEAL = "seal"
    SHARE = "share"
    UNSHARE = "unshare"
    LEASE = "lease"
    RELEASE = "release"
    HOLD = "hold"
    PROVE = "prove"
    RETIRE = "retire"
    CONDEMN = "condemn"


class Slot(NamedTuple):
    """One slot's state. `shares`, `leases` and `holds` are counts of who still counts on it."""

    state: SlotState = SlotState.FREE
    generation: int = 2
    owner: int = NOBODY
    shares: int = 0
    leases: int = 0
    holds: int = 0

    @property
    def pinned(self) -> bool:
        return self.shares > 0 or self.leases > 0

    @property
    def owned(self) -> bool:
        return self.state is SlotState.OPEN or self.state is SlotState.SEALED

    # The table's way, like a NamedTuple's own constructor, takes longer than all checks of a page's way together.
    # These are what its lines come to for the events that each page, or each row of each step, goes through.

    def held(self, step: int) -> Slot:
        """HOLD (1) or PROVE (-1) of an owned slot that has the hold: the count changes and nothing else."""
        state, generation, owner, shares, leases, holds = self
        return tuple.__new__(Slot, (state, generation, owner, shares, leases, holds + step))

    def sealed(self) -> Slot:
        """SEAL of an OPEN slot."""
        return tuple.__new__(Slot, (SlotState.SEALED, *self[1:]))


def _allocate(slot: Slot, owner: int, checks: Checks) -> Slot:
    if slot.generation + 2 >= MAX_GENERATION:
        raise LifecycleError("generation_exhausted", "this slot's generations are used up; it stays out of use")
    return Slot(SlotState.OPEN, _next_odd(slot.generation) if checks.tag_bump else slot.generation | 1, owner)


def _next_odd(generation: int) -> int:
    return generation + 1 if generation % 2 == 0 else generation + 2


def _seal(slot: Slot, owner: int, checks: Checks) -> Slot:
    return slot.sealed()


def _vacant(generation: int) -> Slot:
    """A slot that nobody uses: free, or for ever in quarantine once its generations are used up."""
    worn_out = generation + 2 >= MAX_GENERATION
    return Slot(SlotState.QUARANTINED if worn_out else SlotState.FREE, generation)


def _leave(slot: Slot, checks: Checks) -> Slot:
    """Ends ownership: the tag moves; the slot is free unless somebody may still touch it."""
    generation = slot.generation + 1 if checks.tag_bump else slot.generation
    still_used = slot.holds > 0 or slot.pinned
    if still_used and checks.quarantine:
        return slot._replace(state=SlotState.QUARANTINED, generation=generation, owner=NOBODY)
    return _vacant(generation)


def _retire(slot: Slot, owner: int, checks: Checks) -> Slot:
    if slot.pinned and checks.pins:
        raise PagePinned("page_pinned", f"{slot.shares} sharers and {slot.leases} leases still count on this page")
    return _leave(slot, checks)


def _condemn(slot: Slot, owner: int, checks: Checks) -> Slot:
    return _leave(slot, checks)


def _count(field: str, step: int) -> Callable[[Slot, int, Checks], Slot]:
    place = Slot._fields.index(field)

    def change(slot: Slot, owner: int, checks: Checks) -> Slot:
        value = int(slot[place]) + step
        if value < 0:
            raise LifecycleError(f"no_{field[:-1]}", f"the page has no {field[:-1]} to end")
        # Several a page on its way through; `_replace` takes three times as long.
        moved = Slot._make((*slot[:place], value, *slot[place + 1 :]))
        if moved.state is SlotState.QUARANTINED and not moved.pinned and moved.holds == 0:
            return _vacant(moved.generation)
        return moved

    return change


_Change = Callable[[Slot, int, Checks], Slot]
_S, _E = SlotState, SlotEvent

TABLE: dict[tuple[SlotState, SlotEvent], _Change] = {
    (_S.FREE, _E.ALLOCATE): _allocate,
    (_S.OPEN, _E.SEAL): _seal,
    (_S.OPEN, _E.HOLD): _count("holds", 1),
    (_S.OPEN, _E.PROVE): _count("holds", -1),
    (_S.OPEN, _E.RETIRE): _retire,
    (_S.OPEN, _E.CONDEMN): _condemn,
    (_S.SEALED, _E.SHARE): _count("shares", 1),
    (_S.SEALED, _E.UNSHARE): _count("shares", -1),
    (_S.SEALED, _E.LEASE): _count("leases", 1),
    (_S.SEALED, _E.RELEASE): _count("leases", -1),
    (_S.SEALED, _E.HOLD): _count("holds", 1),
    (_S.SEALED, _E.PROVE): _count("holds", -1),
    (_S.SEALED, _E.RETIRE): _retire,
    (_S.SEALED, _E.CONDEMN): _condemn,
    (_S.QUARANTINED, _E.UNSHARE): _count("shares", -1),
    (_S.QUARANTINED, _E.RELEASE): _count("leases", -1),
    (_S.QUARANTINED, _E.PROVE): _count("holds", -1),
}

_REFUSALS = {
    (_S.FREE, _E.RETIRE): "double_free",
    (_S.QUARANTINED, _E.RETIRE): "double_free",
    (_S.SEALED, _E.SEAL): "already_sealed",
    (_S.OPEN, _E.SHARE): "not_sealed",
    (_S.OPEN, _E.LEASE): "not_sealed",
    (_S.OPEN, _E.ALLOCATE): "already_owned",
    (_S.SEALED, _E.ALLOCATE): "already_owned",
    (_S.QUARANTINED, _E.ALLOCATE): "in_quarantine",
}


def apply_event(slot: Slot, event: SlotEvent, owner: int = NOBODY, checks: Checks = ALL_CHECKS) -> Slot:
    """Returns the slot after `event`. Raises LifecycleError or PagePinned and changes nothing otherwise."""
    change = TABLE.get((slot.state, event))
    if change is None:
        reason = _REFUSALS.get((slot.state, event), "not_allowed")
        raise LifecycleError(reason, f"{event} is not allowed for a page that is {slot.state}")
    return change(slot, owner, checks)
