"""KV cache managers, and the registry that finds one by its name."""

from __future__ import annotations

from functools import partial

from aquifer.cache.base import CacheFactory, KVLayout, SequenceCache
from aquifer.errors import ConfigError
from aquifer.memory.pool import Owner, PagePool

KV_CACHES = ("virtual", "paged")


def kv_cache(name: str, block_size: int = 16) -> CacheFactory:
    """The manager called `name`, imported only when asked for.

    Args:
        name: one of `KV_CACHES`.
        block_size: tokens of a block, where the manager has blocks.

    Raises:
        ConfigError: there is no such manager.
    """
    if name == "virtual":
        from aquifer.cache.virtual import VirtualCache

        return VirtualCache
    if name == "paged":
        return partial(_paged, block_size)
    raise ConfigError(f"unknown KV cache {name!r}; choose one of {', '.join(KV_CACHES)}")


def _paged(
    block_size: int,
    pool: PagePool,
    owner: Owner,
    layout: KVLayout,
    max_seqs: int,
    max_tokens: int,
) -> SequenceCache:
    """A `PagedCache`; without KV a `VirtualCache`, since blocks would have no bytes."""
    from aquifer.cache.paged import PagedCache
    from aquifer.cache.virtual import VirtualCache

    if not layout.token_bytes:
        return VirtualCache(pool, owner, layout, max_seqs, max_tokens)
    return PagedCache(pool, owner, layout, max_seqs, max_tokens, block_size=block_size)
