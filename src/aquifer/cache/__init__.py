"""KV cache managers, and the registry that finds one by its name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from aquifer.cache.base import (
    CacheFactory,
    GroupFactory,
    KVLayout,
    KVPart,
    SequenceCache,
    StateLayout,
)
from aquifer.cache.slot_pages import MappingOptions
from aquifer.errors import ConfigError
from aquifer.memory.pool import Owner, PagePool

if TYPE_CHECKING:
    from aquifer.cache.bucketed import BucketOptions

KV_CACHES = ("virtual", "paged")
BASELINES = ("avmp", "avmp-fixed", "avmp-padded")
"""Managers to compare with, which retain no prefixes."""
BUCKETED = "bucketed"
"""The manager of regions of predicted size, which retains no prefixes."""


def kv_cache(
    name: str,
    block_size: int = 16,
    max_step_tokens: int | None = None,
    mapping: MappingOptions | None = None,
    buckets: BucketOptions | None = None,
) -> CacheFactory:
    """The manager called `name`, for layers with and without windows.

    Args:
        name: one of `KV_CACHES` or `BASELINES`, or `BUCKETED`.
        block_size: tokens of a block, where the manager has blocks.
        max_step_tokens: tokens of the largest step; None for as many as a sequence may have.
        mapping: see `group_cache`.
        buckets: options of buckets, where the manager has some; None for the default ones.

    Raises:
        ConfigError: there is no such manager.
    """
    if name in (*BASELINES, BUCKETED) and mapping is not None and mapping.is_layer_major:
        raise ConfigError(
            f"kv_cache {name} keeps whole tokens together; choose kv_layout token-major"
        )
    if name == BUCKETED:
        from aquifer.cache.bucketed import BucketedCache, BucketOptions

        options = buckets or BucketOptions()
        return partial(
            BucketedCache,
            block_size=block_size,
            routing=options.routing,
            has_equal_widths=options.has_equal_widths,
            kept_bytes=options.kept_bytes,
        )
    if name in BASELINES:
        from aquifer.cache.avmp.manager import AvmpCache

        return partial(AvmpCache, name, block_size, max_step_tokens)
    make = group_cache(name, block_size, mapping)
    return partial(_of_layers, make, max_step_tokens)


def group_cache(
    name: str, block_size: int = 16, mapping: MappingOptions | None = None
) -> GroupFactory:
    """The manager called `name`, imported only when asked for, which keeps all tokens.

    Args:
        name: one of `KV_CACHES`.
        block_size: tokens of a block, where the manager has blocks.
        mapping: how pages are mapped, where the manager has no blocks; and whether KV is
            layer-major, in any manager.

    Raises:
        ConfigError: there is no such manager.
    """
    if name == "virtual":
        from aquifer.cache.virtual import VirtualCache

        return partial(VirtualCache, mapping=mapping)
    if name == "paged":
        is_layer_major = mapping is not None and mapping.is_layer_major
        return partial(_paged, block_size, is_layer_major)
    known = ", ".join((*KV_CACHES, BUCKETED, *BASELINES))
    raise ConfigError(f"unknown KV cache {name!r}; choose one of {known}")


def _of_layers(
    make: GroupFactory,
    max_step_tokens: int | None,
    pool: PagePool,
    owner: Owner,
    layout: KVLayout,
    max_seqs: int,
    max_tokens: int,
    state: StateLayout | None = None,
) -> SequenceCache:
    """The manager of all layers itself, or one of several if some have a window or state."""
    if state is None and all(layer.window_tokens is None for layer in layout.layers):
        return make(pool, owner, layout, max_seqs, max_tokens)
    from aquifer.cache.groups import GroupedCache

    return GroupedCache(make, pool, owner, layout, max_seqs, max_tokens, max_step_tokens, state)


def _paged(
    block_size: int,
    is_layer_major: bool,
    pool: PagePool,
    owner: Owner,
    layout: KVLayout,
    max_seqs: int,
    max_tokens: int,
) -> KVPart:
    """A `PagedCache`; without KV a `VirtualCache`, since blocks would have no bytes."""
    from aquifer.cache.paged import PagedCache
    from aquifer.cache.virtual import VirtualCache

    if not layout.token_bytes:
        return VirtualCache(pool, owner, layout, max_seqs, max_tokens)
    return PagedCache(
        pool,
        owner,
        layout,
        max_seqs,
        max_tokens,
        block_size=block_size,
        is_layer_major=is_layer_major,
    )
