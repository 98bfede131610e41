"""How many threads torch computes on while tests run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One. Tests' tensors are small: a second thread mostly waits for the first, and busily; on a busy machine two that
    wait for each other at every operation are slower than one. A module without torch does not pay for its import."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
