"""The registry that the settings name."""

from __future__ import annotations

from collections.abc import Callable

from cluster.registry.base import Registry
from cluster.registry.memory import MemoryRegistry
from cluster.settings import Config

MEMORY = "memory"


def registry_from(config: Config, now_ms: Callable[[], float]) -> Registry:
    """Not opened yet. `now_ms`: a clock that does not go back; a Redis server uses its own."""
    if is_shared(config):
        # Imported here: a cluster on one machine does not need it.
        from cluster.registry.redis import RedisRegistry

        return RedisRegistry(config.registry)
    return MemoryRegistry(now_ms, config.registry.event_limit)


def is_shared(config: Config) -> bool:
    """Whether other processes see the same registry."""
    return config.registry.url != MEMORY
