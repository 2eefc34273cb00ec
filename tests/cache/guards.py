"""What tests of caches leave out of their figures where the pool has guard pages."""

from __future__ import annotations

from aquifer.cache.base import KVPart
from aquifer.memory.owners import GUARD
from aquifer.memory.pool import Owner, PagePool


def in_use_bytes(pool: PagePool) -> dict[Owner, int]:
    """Bytes of the pages that each owner uses, but for the guard page."""
    found = pool.usage().in_use_bytes
    return {owner: num_bytes for owner, num_bytes in found.items() if owner != GUARD}


def guards_of(cache: KVPart) -> set[int]:
    """Places of a cache with the guard page."""
    return set() if cache.tensors.guard is None else set(cache.tensors.guard.guards)
