"""Names of things: incarnations, tags, page refs. A bare slot number is never a name.

Widths: an incarnation is 63 random bits or a registry counter; a generation counts to 2^62. Both fit signed
64-bit columns, which numba, torch and Triton all compare natively.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

INCARNATION_BITS = 63
MAX_GENERATION = 1 << 62


class Tag(NamedTuple):
    """One life of one slot. `Tag(0, 0)` is never valid; an odd generation is an owned slot, an even one is free."""

    incarnation: int
    generation: int

    @property
    def valid(self) -> bool:
        return self.incarnation > 0 and self.generation > 0


NO_TAG = Tag(0, 0)


class PageRef(NamedTuple):
    """The only way to name a page: the slot and the tag that it must still carry."""

    page_id: int
    tag: Tag


def draw_incarnation(random_bytes: Callable[[int], bytes]) -> int:
    """Returns a new incarnation in [1, 2^63). `random_bytes` is `os.urandom` in shells and seeded in the simulator."""
    while True:
        value = int.from_bytes(random_bytes(8), "little") >> 1
        if value:
            return value
