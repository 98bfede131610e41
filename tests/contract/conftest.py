"""Fixtures of the transfer engines' contract suite."""

from collections.abc import Iterator

import pytest

from tests.contract.transfer_kit import KINDS, PROCESS_KINDS, Kit, require


@pytest.fixture(params=KINDS)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    require(request.param)
    made = Kit(request.param)
    yield made
    made.close()


@pytest.fixture(params=PROCESS_KINDS)
def process_kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    require(request.param)
    made = Kit(request.param)
    yield made
    made.close()


@pytest.fixture
def mooncake() -> Iterator[Kit]:
    require("mooncake")
    made = Kit("mooncake")
    yield made
    made.close()


@pytest.fixture
def nixl() -> Iterator[Kit]:
    """Over CMA, as one host has it."""
    require("nixl")
    made = Kit("nixl")
    yield made
    made.close()


@pytest.fixture
def nixl_tcp() -> Iterator[Kit]:
    require("nixl-tcp")
    made = Kit("nixl-tcp")
    yield made
    made.close()


@pytest.fixture
def shm() -> Iterator[Kit]:
    made = Kit("shm")
    yield made
    made.close()
