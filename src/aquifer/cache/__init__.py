"""KV cache managers, and the registry that finds one by its name."""

from __future__ import annotations

from functools import partial

from aquifer.cache.base import CacheFactory
from aquifer.errors import ConfigError

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
        from aquifer.cache.paged import PagedCache

        return partial(PagedCache, block_size=block_size)
    raise ConfigError(f"unknown KV cache {name!r}; choose one of {', '.join(KV_CACHES)}")
