"""How the engine's caches map pages: the options, and what they are where none is given."""

from __future__ import annotations

from typing import Literal

from aquifer.cache.slot_pages import MappingOptions
from aquifer.config import EngineConfig
from aquifer.memory.budget import choose_prompt_page
from aquifer.memory.driver.base import Driver
from aquifer.memory.pool import PagePool


def map_ahead(config: EngineConfig, driver: Driver) -> Literal["background", "step", "off"]:
    """When pages for later tokens are mapped.

    A thread is of use where a device computes meanwhile. On the host it would take the time from
    the computation.
    """
    return config.map_ahead or ("background" if driver.runs_ahead else "step")


def mapping_options(config: EngineConfig, pool: PagePool) -> MappingOptions:
    """How caches map pages, and in which order they keep KV.

    Raises:
        ConfigError: the size of pages for prompts is no multiple of the page size.
    """
    ahead_tokens = 0 if map_ahead(config, pool.driver) == "off" else None
    return MappingOptions(
        choose_prompt_page(config, pool),
        ahead_tokens,
        config.eager_pages,
        is_layer_major=config.kv_layout == "layer-major",
    )
