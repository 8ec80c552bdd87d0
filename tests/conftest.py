"""Pools of ranks that the distributed tests share; a pool starts at its first use."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import RankPool

# The same examples in every run, however slow the machine is.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks on one host."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks on one host."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_hosts() -> Iterator[RankPool]:
    """Two ranks on each of two hosts."""
    with RankPool(4, local_world_size=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks8() -> Iterator[RankPool]:
    """Eight ranks on four hosts of two."""
    with RankPool(8, local_world_size=2) as pool:
        yield pool
