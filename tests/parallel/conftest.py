"""Groups of ranks on the CPU, which serve one engine after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from aquifer.engine.leader import start_ranks
from aquifer.parallel.ranks import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """Returns the group of a size, which is started when it is asked for first."""
    groups: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        if size not in groups:
            groups[size] = start_ranks("cpu", size)
        return groups[size]

    yield of_size
    for group in groups.values():
        assert not group.is_lost
        group.close()
