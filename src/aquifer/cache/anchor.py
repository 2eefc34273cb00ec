"""A page that stays mapped at the beginning of a cache's addresses.

Kernels are given the address of the first slot or block, whoever runs, and find all others from
there. Nothing is read there that is not written, but Triton's launcher asks the driver whose memory
a tensor's first byte is, and refuses the launch if it is nobody's. So the first token's addresses
are given to no sequence, and have a page of their own, accounted as overhead of the model.
"""

from __future__ import annotations

from dataclasses import replace

from aquifer.errors import ConfigError
from aquifer.memory.pool import Kind, Owner, PagePool
from aquifer.memory.range import VirtualRange


def anchor_pages(pool: PagePool, num_bytes: int) -> int:
    """Pages that hold so many bytes; none on the host, where nobody asks."""
    return -(-num_bytes // pool.page_bytes) if pool.driver.device.type == "cuda" else 0


class Anchor:
    """Keeps the first pages of a range mapped.

    Args:
        pool: where they come from.
        owner: of the cache.
        range_: of the cache; nothing is mapped at its beginning.
        num_pages: how many.

    Raises:
        ConfigError: the pool is short.
    """

    def __init__(self, pool: PagePool, owner: Owner, range_: VirtualRange, num_pages: int) -> None:
        self._pool = pool
        self._range = range_
        self._num_pages = num_pages
        handles = pool.acquire(replace(owner, kind=Kind.OVERHEAD), num_pages)
        if handles is None:
            raise ConfigError(f"the pool has no room for any KV of {owner.model}; raise --memory")
        if handles:
            range_.map(0, handles)

    def close(self) -> None:
        """Give the pages back. Pre-condition: nothing in flight knows the cache's addresses."""
        self._pool.release(self._range.unmap(range(self._num_pages)))
