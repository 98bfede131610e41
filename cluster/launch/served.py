"""What the gateway needs of a model: its identity, its limits and its tokenizer; not its weights."""

from __future__ import annotations

import asyncio

from cluster.gateway.served import ServedModel
from cluster.settings import Config


async def load_served(config: Config) -> ServedModel:
    """Raises InvalidInput when the model is not there."""
    return await asyncio.get_running_loop().run_in_executor(None, _load, config)


def _load(config: Config) -> ServedModel:
    # Imported here: torch costs seconds, and who only talks to a cluster does not need it.
    from model.load import load_identity

    return ServedModel(*load_identity(config.model.path or config.model.name))
