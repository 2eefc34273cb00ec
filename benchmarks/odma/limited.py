"""An engine in which KV has as much memory as is said, and no more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aquifer.errors import ConfigError
from aquifer.llm import LLM
from aquifer.memory.pool import Kind, Owner

OTHER_BYTES = 32 << 30
"""Memory beside that for KV, on a GPU: weights, activations, graphs, and what is left unused."""

_RECLAIM_SHARE = 0.1
"""Share of the memory for KV below which pages of ended requests are unmapped; the default."""


@contextmanager
def engine_with_kv_memory(
    model: str, kv_bytes: int, memory_bytes: int | None, **options: Any
) -> Iterator[LLM]:
    """An engine with random weights.

    Args:
        model: as for `LLM`.
        kv_bytes: memory for KV.
        memory_bytes: memory in all; None for `OTHER_BYTES` more than for KV.
        options: further ones of `LLM`. Where `bucket_memory` is among them, KV is in that memory,
            and the pool is left alone.

    Raises:
        ConfigError: less than `kv_bytes` is left beside the weights.
    """
    memory_bytes = memory_bytes or kv_bytes + OTHER_BYTES
    with LLM(
        model,
        load_format="dummy",
        memory=memory_bytes,
        enable_prefix_caching=False,
        guard_pages=False,
        reclaim_below=_RECLAIM_SHARE * kv_bytes / memory_bytes,
        seed=0,
        **options,
    ) as llm:
        pool = llm.engine.pool
        # From now on the overhead counts as it is, so that KV has the same memory throughout.
        pool.account_overhead(pool.driver.overhead_bytes())
        llm.engine.meter.every_s = math.inf
        if options.get("bucket_memory") is not None:
            yield llm
            return
        count = (pool.free_bytes - kv_bytes) // pool.page_bytes
        others = pool.acquire(Owner("others", Kind.WEIGHTS), count) if count >= 0 else None
        if others is None:
            raise ConfigError("less memory than that for KV is left beside the weights; give more")
        try:
            yield llm
        finally:
            pool.release(others)
