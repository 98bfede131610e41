"""Fixtures of the transfer engines' contract suite."""

from collections.abc import Iterator

import pytest

from tests.contract.transfer_kit import KINDS, PROCESS_KINDS, Kit, kit_of


@pytest.fixture(params=KINDS)
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with kit_of(request.param) as made:
        yield made


@pytest.fixture(params=PROCESS_KINDS)
def process_kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    with kit_of(request.param) as made:
        yield made


@pytest.fixture
def mooncake() -> Iterator[Kit]:
    with kit_of("mooncake") as made:
        yield made


@pytest.fixture
def nixl() -> Iterator[Kit]:
    """Over CMA, as one host has it."""
    with kit_of("nixl") as made:
        yield made


@pytest.fixture
def nixl_tcp() -> Iterator[Kit]:
    with kit_of("nixl-tcp") as made:
        yield made


@pytest.fixture
def shm() -> Iterator[Kit]:
    with kit_of("shm") as made:
        yield made
