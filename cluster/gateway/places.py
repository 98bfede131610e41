"""Places that one gateway gives to what a tenant has on its way here, beside its running requests (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import NoCapacity


class Places:
    """`what`: what is held there, as its error tells it."""

    def __init__(self, what: str, retry_after_ms: int) -> None:
        self._what = what
        self._retry_after_ms = retry_after_ms
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, tenant: str, most: int) -> Iterator[None]:
        """Raises NoCapacity (`tenant_full`) where the tenant holds `most` already."""
        if self._held[tenant] >= most:
            raise NoCapacity("tenant_full", f"{most} {self._what}", retry_after_ms=self._retry_after_ms)
        self._held[tenant] += 1
        try:
            yield
        finally:
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
