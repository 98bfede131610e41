"""Fixtures that several integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.valkey import Valkey


@pytest.fixture
async def valkey(tmp_path: Path) -> AsyncIterator[Valkey]:
    """A real server, empty."""
    server = Valkey(tmp_path)
    await server.start()
    yield server
    server.kill()
