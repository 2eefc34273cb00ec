"""AVMP (Asymmetric Virtual Memory Paging) and its baselines: allocators of KV and state slots.

They divide a fixed number of bytes into slots for the KV of attention layers and slots for the
state of recurrent layers, in the ways that the paper compares. What they give out are slots: none
of them moves physical memory, which is what the page pool of `aquifer.memory` does instead.
`manager.py` serves requests with them.
"""

from aquifer.cache.avmp.allocators import (
    DynamicPools,
    FixedDual,
    HybridAllocator,
    PaddedUnified,
    SharedPages,
    StaticPools,
)
from aquifer.cache.avmp.slots import EvictionRule, SlotSizes

__all__ = [
    "DynamicPools",
    "EvictionRule",
    "FixedDual",
    "HybridAllocator",
    "PaddedUnified",
    "SharedPages",
    "SlotSizes",
    "StaticPools",
]
