"""Process groups of 2, 4 and 8 ranks, shared by all tests of this folder."""

import pytest
from ranks import Ranks


def _group(world_size):
    ranks = Ranks(world_size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def ranks2():
    yield from _group(2)


@pytest.fixture(scope="session")
def ranks4():
    yield from _group(4)


@pytest.fixture(scope="session")
def ranks8():
    yield from _group(8)


@pytest.fixture(scope="session")
def groups(ranks2, ranks4, ranks8):
    """By world size."""
    return {2: ranks2, 4: ranks4, 8: ranks8}
