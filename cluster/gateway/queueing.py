"""The waiting room: requests for which all workers are full, and whose turn it is. Pure: a room in, a room out.

A higher priority goes first. Within one priority tenants take turns, one request each, however many they have waiting;
within one tenant the one that came first goes first. Nobody passes the one whose turn it is: a request that needs
several places at once would never get them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType

from kvstore.errors import NoCapacity


class Priority(IntEnum):
    LOW = 1
    NORMAL = 2
    HIGH = 3


PRIORITIES: Mapping[str, Priority] = MappingProxyType({one.name.lower(): one for one in Priority})


@dataclass(frozen=True)
class Line:
    """One tenant's requests of one priority, the oldest first. Never empty within a room."""

    tenant: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """Who waits. `lines`: by priority, the tenants in the order of their turns."""

    limit: int
    lines: Mapping[Priority, tuple[Line, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __len__(self) -> int:
        return sum(len(line.numbers) for lines in self.lines.values() for line in lines)


def joined(room: Room, number: int, tenant: str, priority: Priority, *, retry_after_ms: int) -> Room:
    """`number` waits, and no other has that number. Raises NoCapacity (`waiting_room_full`)."""
    if len(room) >= room.limit:
        raise NoCapacity(
            "waiting_room_full",
            f"all workers are full, and {room.limit} requests wait already (api.max_queued)",
            retry_after_ms=retry_after_ms,
        )
    lines = room.lines.get(priority, ())
    if any(line.tenant == tenant for line in lines):
        lines = tuple(Line(tenant, (*line.numbers, number)) if line.tenant == tenant else line for line in lines)
    else:
        # Behind those who wait: a tenant that comes again and again takes no turn before its own.
        lines = (*lines, Line(tenant, (number,)))
    return _with(room, priority, lines)


def waiting_of(room: Room, tenant: str) -> int:
    """How many requests of `tenant` wait."""
    return sum(len(line.numbers) for lines in room.lines.values() for line in lines if line.tenant == tenant)


def turn(room: Room) -> int | None:
    """The request whose turn it is; None when nobody waits."""
    if not room.lines:
        return None
    return room.lines[max(room.lines)][0].numbers[0]


def served(room: Room) -> Room:
    """The request whose turn it was has its workers: its tenant's next one waits for the tenant's next turn."""
    priority = max(room.lines)
    first, *others = room.lines[priority]
    rest = first.numbers[1:]
    return _with(room, priority, (*others, Line(first.tenant, rest)) if rest else tuple(others))


def left(room: Room, number: int) -> Room:
    """`number` waits no longer: its time was up, its caller left, or it failed. No effect when it does not wait. Its
    tenant's turn stays where it is."""
    for priority, lines in room.lines.items():
        for at, line in enumerate(lines):
            if number in line.numbers:
                rest = tuple(other for other in line.numbers if other != number)
                kept = (replace(line, numbers=rest),) if rest else ()
                return _with(room, priority, (*lines[:at], *kept, *lines[at + 1 :]))
    return room


def _with(room: Room, priority: Priority, lines: tuple[Line, ...]) -> Room:
    others = {key: value for key, value in room.lines.items() if key is not priority}
    return replace(room, lines=MappingProxyType({**others, priority: lines} if lines else others))
